"""The contract, rules 8 to 12: addresses, options to come, sizes, refusals, bits."""

import mmap

import numpy as np
import pytest
from helpers import (
    CANARY,
    INT_MAX,
    ONE_PER_SCHEDULE,
    assert_same_bits,
    assert_within,
    bits,
    check,
    decode,
    decode_bound,
    every_kernel,
    every_schedule,
    merge_bound,
    move,
    on,
    paged,
    to_numpy,
)

import reference
from cupy_kernels import jit, merge_state, merge_state_in_place, merge_states, paged_decode, split_decode
from cupy_kernels.problem import NOT_YET

F64 = reference.Precision.uniform("float64")


def vast(xp, elements):
    """Zero float16 elements, more than fit 32 bits. On Linux, memory nobody touches costs nothing."""
    if xp is not np:
        free = xp.cuda.Device().mem_info[0]
        if free < 2 * elements:
            pytest.skip(f"the device has {free >> 30} GB left, expected {2 * elements >> 30}")
        return xp.zeros(elements, xp.float16)
    if not hasattr(mmap, "MAP_PRIVATE"):
        pytest.skip("no anonymous private mapping on this system")
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.10 has no name for
    memory = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, np.float16)


class TestRule8Addresses:
    """Offsets beyond 2^31 and 2^32 elements."""

    @pytest.mark.parametrize("axis", ["page", "slot", "head"])
    @pytest.mark.parametrize("head_dim", [8, 64])
    def test_caches(self, xp, axis, head_dim):
        # a view of a tensor over all layers: five pages, slots or heads 2^30 elements apart, so that the last begins at 2^32
        where = ("page", "slot", "head").index(axis)
        others = [n for i, n in enumerate((3, 4, 2, head_dim)) if i != where]
        room = int(np.prod(others))
        memory = vast(xp, 4 * 2**30 + 2 * room)
        strides = [2 * 2**30, *(2 * int(np.prod(others[i + 1 :])) for i in range(3))]
        views = [
            xp.moveaxis(xp.lib.stride_tricks.as_strided(memory[offset:], (5, *others), strides), 0, where) for offset in (0, room)
        ]
        shape = views[0].shape
        rng = np.random.default_rng(3)
        k, v = rng.standard_normal((2, *shape)).astype(np.float16)
        for view, values in zip(views, (k, v), strict=True):
            view[...] = xp.asarray(values)
            np.testing.assert_array_equal(to_numpy(view), values)
        pages, page_size, heads, _ = shape
        q = rng.standard_normal((2, heads, head_dim)).astype(np.float16)
        table = np.stack([np.arange(pages), np.arange(pages)[::-1]]).astype(np.int32)
        args = {"q": q, "k_cache": k, "v_cache": v, "page_table": table}
        args["context_lens"] = np.array([pages * page_size, pages * page_size - 1], np.int32)
        want, want_lse = reference.paged_decode(**args)
        e_o, e_lse = decode_bound(args, want, want_lse, num_splits=2)
        out, lse = decode(xp, args | {"k_cache": views[0], "v_cache": views[1]}, num_splits=2, out_dtype="float32")
        assert_within(out, want, e_o)
        assert_within(lse, want_lse, e_lse)

    def test_states(self, xp):
        memory = vast(xp, 4 * 2**30 + 8)
        o = xp.lib.stride_tricks.as_strided(memory, (5, 2, 4), (2 * 2**30, 8, 2))
        values = np.random.default_rng(4).standard_normal((5, 2, 4)).astype(np.float16)
        o[...] = xp.asarray(values)
        lse = np.zeros((5, 2), np.float32)
        for got, states in ((o, values), (o.transpose(1, 0, 2), values.transpose(1, 0, 2))):
            weights = lse if states is values else lse.T.copy()
            want = reference.merge(states, weights, precision=F64)
            e_o, e_lse = merge_bound(states, weights, *want, out_dtype="float16")
            merged = merge_states(got, xp.asarray(weights))
            assert_within(merged[0], want[0], e_o)
            assert_within(merged[1], want[1], e_lse)


# A value that each option takes once it exists.
LATER = {
    "window": 8, "softcap": 30.0, "sinks": np.zeros(4, np.float32), "alibi_slopes": np.zeros(4, np.float32), "k_scale": 0.5,
    "v_scale": 2.0, "kv_dtype": "float8_e4m3fn",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_YET)
@every_kernel
def test_rule_9_and_11_an_option_to_come_is_refused_by_name(xp, head_dim, name):
    args = paged((37,), head_dim=head_dim)
    for call in (paged_decode, split_decode):
        with pytest.raises(NotImplementedError, match=f"^{name}: expected .*, got "):
            decode(xp, args, call, **{name: LATER[name]})
        decode(xp, args, call, **{name: NOT_YET[name]})


class TestRule10Sizes:
    """Any group size, page size and number of heads, rows and requests."""

    @every_schedule
    @pytest.mark.parametrize("head_dim", [8, 64])
    @pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 15, 16, 17, 24, 31, 32, 33, 71, 127, 128])
    def test_groups(self, xp, schedule, head_dim, group):
        check(xp, paged((19, 0, 5), num_q_heads=2 * group, num_kv_heads=2, head_dim=head_dim, page_size=4), schedule)

    @every_schedule
    @pytest.mark.parametrize("head_dim", [8, 64])
    @pytest.mark.parametrize("page_size", [1, 2, 3, 4, 31, 32, 33, 48, 64, 96, 256, 1000])
    def test_page_sizes(self, xp, schedule, head_dim, page_size):
        lens = [max(0, n) for n in (page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size + 1)]
        check(xp, paged(lens, num_q_heads=2, num_kv_heads=1, head_dim=head_dim, page_size=page_size), schedule)

    def test_more_splits_than_pages_and_than_threads(self, xp):
        for num_splits, head_dim in ((38, 8), (300, 8), (4000, 8), (38, 64)):
            check(xp, paged((37,), num_q_heads=1, num_kv_heads=1, head_dim=head_dim, page_size=1), {"num_splits": num_splits})

    @pytest.mark.parametrize("heads", [1, 24, 28, 65, 200])
    @pytest.mark.parametrize("head_dim", [1, 3, 7, 100, 129, 257, 600])
    def test_merges(self, xp, heads, head_dim):
        rng = np.random.default_rng(5)
        o = rng.standard_normal((2, heads, 3, head_dim)).astype(np.float32)
        lse = rng.standard_normal((2, heads, 3)).astype(np.float32)
        want = reference.merge(o, lse, precision=F64)
        e_o, e_lse = merge_bound(o, lse, *want)
        got = merge_states(move(xp, o), move(xp, lse))
        assert_within(got[0], want[0], e_o)
        assert_within(got[1], want[1], e_lse)
        assert_same_bits(
            *(tuple(map(to_numpy, x)) for x in (
                merge_state(*(move(xp, x) for x in (o[:, :, 0], lse[..., 0], o[:, :, 1], lse[..., 1]))),
                merge_states(move(xp, o[:, :, :2]), move(xp, lse[..., :2])),
            ))
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("schedule", "head_dim"), [(*p.values, 8) for p in ONE_PER_SCHEDULE] + [({"schedule": "balanced"}, 64)], ids=str
    )
    def test_more_than_65535_requests(self, xp, schedule, head_dim):
        few, times = 800, 82
        args = paged((2,), num_q_heads=1, num_kv_heads=1, head_dim=head_dim, page_size=2, extra_entries=0, order=[1])
        rng = np.random.default_rng(6)
        args["q"] = rng.standard_normal((few, 1, head_dim)).astype(np.float16)
        args["context_lens"] = rng.integers(0, 3, few).astype(np.int32)
        args["page_table"] = np.where(args["context_lens"][:, None] > 0, 1, -1).astype(np.int32)
        want, want_lse = reference.paged_decode(**args)
        e_o, e_lse = decode_bound(args, want, want_lse, num_splits=2)
        for name in ("q", "context_lens", "page_table"):
            args[name] = np.concatenate([args[name]] * times)
        out, lse = decode(xp, args, **schedule, out_dtype="float32")
        assert_within(out.reshape(times, few, 1, head_dim), np.broadcast_to(want, (times, *want.shape)), e_o)
        assert_within(lse.reshape(times, few, 1), np.broadcast_to(want_lse, (times, *want_lse.shape)), e_lse)

    def test_more_than_65535_rows_of_a_merge(self, xp):
        rng = np.random.default_rng(7)
        o, lse = rng.standard_normal((65_600, 2, 1)).astype(np.float32), rng.standard_normal((65_600, 2)).astype(np.float32)
        want = reference.merge(o, lse, precision=F64)
        e_o, e_lse = merge_bound(o, lse, *want)
        got = merge_states(move(xp, o), move(xp, lse))
        assert_within(got[0], want[0], e_o)
        assert_within(got[1], want[1], e_lse)


class TestRule11Refusals:
    """test_bad_input.py has each argument; here: what reads values does so only when asked, and nothing is written."""

    @pytest.mark.parametrize(
        ("name", "index", "value", "text"),
        [
            ("context_lens", 1, -1, r"context_lens\[1\]: expected 0 to 80 \(table width x page_size\), got -1"),
            ("context_lens", 0, 81, r"context_lens\[0\]: expected 0 to 80 \(table width x page_size\), got 81"),
            ("page_table", (0, 2), -1, r"page_table\[0, 2\]: expected 0 to 8, got -1"),
            ("page_table", (1, 1), 9, r"page_table\[1, 1\]: expected 0 to 8, got 9"),
            ("page_table", (1, 1), INT_MAX, r"page_table\[1, 1\]: expected 0 to 8, got 2147483647"),
        ],
    )
    @every_kernel
    def test_values_on_request(self, xp, head_dim, name, index, value, text):
        args = paged((37, 48), head_dim=head_dim)
        outputs = {"out": xp.full((2, 4, head_dim), CANARY, xp.float16), "lse_out": xp.full((2, 4), CANARY, xp.float32)}
        before = {key: bits(array) for key, array in outputs.items()}
        paged_decode(**on(xp, args), check_values=True)
        args[name][index] = value
        with pytest.raises(ValueError, match=f"^{text}$"):
            paged_decode(**on(xp, args), check_values=True, **outputs)
        for key, array in outputs.items():
            np.testing.assert_array_equal(bits(array), before[key])

    @every_schedule
    @every_kernel
    def test_a_length_out_of_range_reads_nothing_outside_the_table(self, xp, head_dim, schedule):
        args = paged((48, 32, 16), extra_entries=0, head_dim=head_dim)
        clipped = decode(xp, args, **schedule)
        # beyond the table's width counts as all of it, below zero as none
        args["context_lens"][0] = INT_MAX
        assert_same_bits(tuple(x[0] for x in decode(xp, args, **schedule)), tuple(x[0] for x in clipped))
        args["context_lens"][0] = -5
        out, lse = decode(xp, args, **schedule)
        assert np.all(out[0] == 0)
        assert np.all(lse[0] == -np.inf)


class TestRule12Bits:
    """Same call, same bits; under "fixed", whoever the batch-mates are."""

    @every_schedule
    @every_kernel
    def test_twenty_repeats_and_another_page_order(self, xp, head_dim, schedule):
        args = paged((370, 0, 100), head_dim=head_dim)
        want = decode(xp, args, **schedule)
        for seed in range(20):
            # On the CPU in other orders of threads and blocks, which on a GPU are never the same.
            with jit.settings(seed=seed):
                assert_same_bits(decode(xp, args, **schedule), want)
        for order in (range(34), range(32, -1, -1)):
            assert_same_bits(decode(xp, paged((370, 0, 100), head_dim=head_dim, order=order), **schedule), want)

    @pytest.mark.parametrize("partial_dtype", ["float32", "float16"])
    @pytest.mark.parametrize("pages_per_split", [None, 1, 7, 100])
    @every_kernel
    def test_batch_mates(self, xp, head_dim, pages_per_split, partial_dtype):
        options = {"schedule": "fixed", "pages_per_split": pages_per_split, "partial_dtype": partial_dtype}
        args = paged((900, 1000, 120, 500), num_q_heads=2, num_kv_heads=1, head_dim=head_dim)
        want = decode(xp, args, **options)
        args["context_lens"][0] = 800
        assert_same_bits(tuple(x[1:] for x in decode(xp, args, **options)), tuple(x[1:] for x in want))
        for rows, width in (([2], 8), ([3, 1], 65), ([1, 2, 2, 3, 1], 63)):
            few = {name: args[name][rows] for name in ("q", "page_table", "context_lens")}
            few["page_table"] = few["page_table"][:, :width]
            assert_same_bits(decode(xp, args | few, **options), tuple(x[rows] for x in want))

    def test_merges(self, xp):
        rng = np.random.default_rng(8)
        o, lse = rng.standard_normal((4, 9, 33)).astype(np.float32), rng.standard_normal((4, 9)).astype(np.float32)
        o, lse = move(xp, o), move(xp, lse)
        want = tuple(map(to_numpy, merge_states(o, lse)))
        for _ in range(20):
            assert_same_bits(tuple(map(to_numpy, merge_states(o, lse))), want)
            a, b = o[:, 0].copy(), lse[:, 0].copy()
            merge_state_in_place(a, b, o[:, 1], lse[:, 1])
            two = merge_states(o[:, :2], lse[:, :2])
            assert_same_bits((to_numpy(a), to_numpy(b)), tuple(map(to_numpy, two)))
