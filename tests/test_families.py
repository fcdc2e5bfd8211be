"""Families put scores where they say, are the same for the same seed, and cases keep poison out of what is read."""

import numpy as np
import pytest

import reference
from verify import FAMILIES, Case, build
from verify.arithmetic import UNIT, tiled_order, token_splits
from verify.cases import FINITE, NON_FINITE
from verify.families import Shape
from verify.lists import LISTS

SHAPES = [
    Shape(context_len=200, group_size=3, head_dim=64, dtype="float16", sm_scale=0.125, tokens_per_split=64, page_size=16),
    Shape(context_len=33, group_size=1, head_dim=128, dtype="bfloat16", sm_scale=128**-0.5, tokens_per_split=16, page_size=4),
    Shape(context_len=1, group_size=7, head_dim=32, dtype="float32", sm_scale=2.0, tokens_per_split=16, page_size=16),
    Shape(context_len=5, group_size=2, head_dim=8, dtype="float16", sm_scale=1e-4, tokens_per_split=1, page_size=1),
]


def scores(shape, q, k):
    return shape.sm_scale * (q.astype(np.float64) @ k.astype(np.float64).T)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.dtype + str(shape.context_len))
@pytest.mark.parametrize("name", FAMILIES)
def test_draw(name, shape):
    rows = FAMILIES[name].draw((3, 1), shape)
    again, other = FAMILIES[name].draw((3, 1), shape), FAMILIES[name].draw((4, 1), shape)
    n, d = shape.context_len, shape.head_dim
    assert [x.shape for x in rows] == [(shape.group_size, d), (n, d), (n, d)]
    assert all(x.dtype.name == shape.dtype for x in rows)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(rows, again, strict=True))
    # A handful of tokens may be drawn alike.
    assert n < 30 or any(x.tobytes() != y.tobytes() for x, y in zip(rows, other, strict=True))
    finite = all(np.isfinite(x.astype(np.float64)).all() for x in rows)
    assert finite != FAMILIES[name].nonfinite
    assert FAMILIES[name].exposes


# Head 0's target, as the definition of each family has it.
TARGETS = {
    "ramp_up": lambda shape: np.linspace(-10, 10, shape.context_len),
    "ramp_down": lambda shape: np.linspace(10, -10, shape.context_len),
    "staircase": lambda shape: np.arange(shape.context_len) // shape.tile * 0.7,
    "alt_v": lambda shape: np.zeros(shape.context_len),
}
# Centre and largest deviation of what is random: 6 standard deviations.
CENTRES = {
    "offset_plus": (300, 6), "offset_minus": (-300, 6), "neg_sentinel": (-6e4, 6), "neg_1e5": (-1e5, 6),
    "neg_1e4": (-1e4, 6), "pos_1e4": (1e4, 6), "cancel": (0, 0.06),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.dtype + str(shape.context_len))
@pytest.mark.parametrize("name", [*TARGETS, *CENTRES])
def test_scores_are_where_they_were_aimed(name, shape):
    q, k, _ = FAMILIES[name].draw((0,), shape)
    q, k = q.astype(np.float64), k.astype(np.float64)
    target, spread = (TARGETS[name](shape), 0) if name in TARGETS else CENTRES[name]
    lengths = 1 - np.arange(shape.group_size) / (2 * shape.group_size)
    # Rounding moves each product by one unit for K, and for other heads' q by one more; fp16 subnormals by 2^-25.
    slack = 2.1 * UNIT[shape.dtype] * shape.sm_scale * (np.abs(q) @ np.abs(k).T) + 2.0**-24 * shape.sm_scale * np.abs(q).sum()
    error = np.abs(scores(shape, q, k) - lengths[:, None] * target)
    assert (error <= slack + spread).all()


@pytest.mark.parametrize("name", [name for name in FINITE if name.startswith("needle") or name == "dominant"])
def test_needle_takes_the_weight(name):
    shape = SHAPES[0]
    q, k, v = FAMILIES[name].draw((1,), shape)
    s = scores(shape, q, k)
    position = {"needle_first": 0, "needle_last": 199, "needle_page": 192, "needle_page_end": 191, "needle_split": 192,
                "needle_split_end": 191, "needle_window_in": 0, "needle_window_out": 199}.get(name, s[0].argmax())  # fmt: skip
    assert (s.argmax(1) == position).all()
    # The others, 199 of about e^3 against e^40 of the shortest q, weigh less than float16 can tell.
    assert (np.sort(s, axis=1)[:, -1] - np.sort(s, axis=1)[:, -2] > 25).all()
    assert v[position].tolist() == [7 + d % 3 for d in range(64)]


@pytest.mark.parametrize("context_len", [1, 2, 37, 64, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in FINITE if FAMILIES[name].exact])
def test_exact_outputs(name, dtype, context_len):
    case = Case("exact", family=name, dtype=dtype, context_lens=(context_len, 0), num_q_heads=6, num_kv_heads=3)
    inputs = build(case)
    out, _ = reference.paged_decode(**inputs.call())
    assert np.isnan(inputs.exact[1]).all()
    # Exact arithmetic hits a number of the output's dtype, which float64 then rounds to.
    assert (inputs.exact[0] == inputs.exact[0].astype(inputs.q.dtype)).all()
    assert (out[0].astype(inputs.q.dtype) == inputs.exact[0]).all()
    if name == "equal":
        q, k, v = inputs.head(0, 0)
        assert len({*scores(Shape(1, 1, 64, dtype, 1.0, 1, 1), q, k)[0]}) == 1
        assert context_len == 1 or len(np.unique(v.astype(np.float64), axis=0)) > 1
    if name == "gqa_id":
        assert inputs.exact[0, :, 0].tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("name", NON_FINITE)
def test_one_visible_element_is_not_finite(name):
    q, k, v = (x.astype(np.float64) for x in FAMILIES[name].draw((0,), SHAPES[0]))
    planted = dict(zip("qkv", (q, k, v), strict=True))[name[-1]]
    assert [(~np.isfinite(x)).sum() for x in (q, k, v)].count(1) == 1
    assert (~np.isfinite(planted)).sum() == 1


def test_split_families_cancel():
    inputs = build(Case("cancel", family="cancel", context_lens=(256,), head_dim=128))
    out, _ = reference.paged_decode(**inputs.call())
    # Four splits of 64 values of size 1: their means differ by about 0.05 / 8, their sum is what weights of 1 % leave.
    assert np.abs(out).max() < 0.05
    _, _, v = inputs.head(0, 0)
    assert (np.sign(v.astype(np.float64))[:, 0].reshape(4, 64) == [[1], [-1], [1], [-1]]).all()


@pytest.mark.parametrize("poison", ["nan", "inf", "large", "zero"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("memory", ["contiguous", "interleaved", "stacked", "padded"])
def test_everything_else_is_poison(poison, layout, memory):
    case = Case("poison", context_lens=(13, 0, 33), page_size=4, poison=poison, layout=layout, memory=memory)
    inputs = build(case)
    plain = build(Case("plain", context_lens=(13, 0, 33), page_size=4, poison="zero", pages="ordered"))
    read = np.zeros(inputs.k_cache.shape[:3], bool)
    for b, length in enumerate(case.context_lens):
        for token in range(length):
            page = inputs.page_table[b, token // 4]
            read[(page, token % 4) if layout == "NHD" else (page, slice(None), token % 4)] = True
        pages = -(-length // 4)
        assert set(inputs.page_table[b, pages:].tolist()) == {-1, 2**31 - 1}
        for kv_head in range(2):
            for x, y in zip(inputs.head(b, kv_head), plain.head(b, kv_head), strict=True):
                assert x.tobytes() == y.tobytes()
    is_poison = {"nan": np.isnan, "inf": np.isposinf, "large": lambda x: x == 3e4, "zero": lambda x: x == 0}[poison]
    for cache in (inputs.k_cache, inputs.v_cache):
        assert is_poison(cache[~read].astype(np.float64)).all()
        assert np.isfinite(cache[read].astype(np.float64)).all()
    assert inputs.k_cache.strides[-1] == 2
    assert (inputs.k_cache.strides != inputs.v_cache.strides) == (memory == "padded")


def test_pages_are_scattered_and_shared():
    ids = build(Case("ids", context_lens=(160, 160))).page_table[:, :10]
    assert len(np.unique(ids)) == 20
    assert (np.diff(ids) != 1).any()
    shared = build(Case("ids", context_lens=(160, 160), pages="shared"))
    assert (shared.page_table[0, :5] == shared.page_table[1, :5]).all()
    assert not set(shared.page_table[0, 5:10]) & set(shared.page_table[1, 5:10])
    (_, k_0, _), (_, k_1, _) = shared.head(0, 0), shared.head(1, 0)
    assert k_0[:80].tobytes() == k_1[:80].tobytes()
    assert k_0[80:].tobytes() != k_1[80:].tobytes()


def test_case_prints_itself():
    for case in LISTS["edge"]:
        assert eval(repr(case)) == case
    assert repr(Case("a", seed=3)) == "Case(name='a', seed=3)"


@pytest.mark.parametrize(
    ("field", "value"),
    [("family", "nromal"), ("dtype", "fp16"), ("poison", "none"), ("num_kv_heads", 3), ("schedule", "fixed"), ("memory", "x")],
)
def test_case_refuses(field, value):
    name = {"num_kv_heads": "num_q_heads", "schedule": "pages_per_split"}.get(field, field)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        Case("bad", **{field: value})


def test_lists():
    names = [case.name for cases in LISTS.values() for case in cases]
    assert len(names) == len(set(names))
    assert {case.family for case in LISTS["edge"]} == set(FAMILIES)
    assert max(sum(case.context_lens) for case in LISTS["smoke"]) <= 1100


@pytest.mark.parametrize(
    ("context_len", "page_size", "splits", "pages"),
    [
        (1000, 16, {"num_splits": 4}, [(0, 16), (16, 32), (32, 48), (48, 63)]),
        (37, 16, {"num_splits": 4}, [(0, 1), (1, 2), (2, 3), (3, 3)]),
        (100, 16, {"num_splits": 4}, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (100, 16, {"pages_per_split": 3}, [(0, 3), (3, 6), (6, 7)]),
        (0, 16, {"pages_per_split": 3}, [(0, 0)]),
    ],
)
def test_token_splits(context_len, page_size, splits, pages):
    cut = token_splits(context_len, page_size, **splits)
    assert [(r.start, r.stop) for r in cut] == [
        (min(a * page_size, context_len), min(b * page_size, context_len)) for a, b in pages
    ]


def test_tiled_order():
    order = tiled_order([range(10), range(10, 10)], tile=4, states=2)
    assert order == [[[range(4), range(8, 10)], [range(4, 8)]], []]
