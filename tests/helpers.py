"""Inputs whose unreadable parts are poison, their way to the array module under test, and what an error may be."""

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

import reference
from cupy_kernels import paged_decode
from cupy_kernels.decode import SCHEDULES
from cupy_kernels.host import build
from reference import gather

INT_MAX = np.iinfo(np.int32).max
ARRAYS = ("q", "k_cache", "v_cache", "page_table", "context_lens")
CANARY = 77.0  # exact in every dtype
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# Unit roundoff, and half of the least subnormal: the error of a store below the normal numbers.
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
ETA = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
U32 = U["float32"]

# In every test of the contract: head_dim decides which kernels take 16-bit numbers.
KERNELS = [pytest.param(16, id="readable"), pytest.param(64, id="tensor-cores")]
# What selects each schedule, there too. A schedule without an entry joins with its defaults.
OPTIONS = {
    "uniform": [{"num_splits": n} for n in (1, 2, 5, 70)],
    "fixed": [{"pages_per_split": n} for n in (1, 3)],
    "balanced": [{}],
}
EVERY_SCHEDULE = [
    pytest.param({"schedule": name, **more}, id="-".join(map(str, (name, *more.values()))))
    for name in SCHEDULES
    for more in OPTIONS.get(name, [{}])
]
every_kernel = pytest.mark.parametrize("head_dim", KERNELS)
every_schedule = pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
ONE_PER_SCHEDULE = [next(p for p in EVERY_SCHEDULE if p.values[0]["schedule"] == name) for name in SCHEDULES]


def paged(
    lens, *, num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=16, dtype="float16", layout="NHD", poison=np.nan,
    extra_entries=2, seed=0, order=None,
):  # fmt: skip
    """The five arrays of a decode, standard normal, in NumPy: pages from a shuffled pool with spare ones.

    Poison: slots past each length, spare pages, the q of requests without tokens; -1 and INT_MAX past each last page.
    `order` says which pages of the pool are taken; another order holds the same numbers.
    """
    rng = np.random.default_rng(seed)
    dtype = DTYPES[dtype]
    # 1e30 is inf in float16
    with np.errstate(over="ignore"):
        poison = np.full((), poison).astype(dtype)
    pages = [-(-n // page_size) for n in lens]
    pool_pages = sum(pages) + 3
    q = rng.standard_normal((len(lens), num_q_heads, head_dim)).astype(dtype)
    table = np.resize(np.array([-1, INT_MAX], np.int32), (len(lens), max(pages, default=0) + extra_entries))
    k, v = (np.full((pool_pages, page_size, num_kv_heads, head_dim), poison) for _ in range(2))
    shuffled = rng.permutation(pool_pages)
    free = iter(shuffled if order is None else order)
    for b, n in enumerate(lens):
        if n == 0:
            q[b] = poison
        table[b, : pages[b]] = [next(free) for _ in range(pages[b])]
        for cache in (k, v):
            tokens = np.full((pages[b] * page_size, *k.shape[2:]), poison)
            tokens[:n] = rng.standard_normal((n, *k.shape[2:]))
            cache[table[b, : pages[b]]] = tokens.reshape(pages[b], *k.shape[1:])
    if layout == "HND":
        k, v = (np.ascontiguousarray(cache.swapaxes(1, 2)) for cache in (k, v))
    return {"q": q, "k_cache": k, "v_cache": v, "page_table": table, "context_lens": np.array(lens, np.int32)}


def slot_of(args, request, token):
    """The place `[page, slot]` of a token in NHD caches."""
    page_size = args["k_cache"].shape[1]
    return args["page_table"][request, token // page_size], token % page_size


def move(xp, array):
    """The array on xp's device, at the same place of a copy of the buffer that it is a view of."""
    if xp is np or not isinstance(array, np.ndarray):
        return array
    buffer = array
    while isinstance(buffer.base, np.ndarray):
        buffer = buffer.base
    offset = (array.ctypes.data - buffer.ctypes.data) // array.itemsize
    moved = xp.asarray(buffer.ravel(order="K"))
    return xp.lib.stride_tricks.as_strided(moved[offset:], array.shape, array.strides) if array.size else xp.asarray(array)


def on(xp, args):
    """Arguments by name, moved."""
    return {name: move(xp, value) for name, value in args.items()}


def to_numpy(array):
    return array if isinstance(array, np.ndarray) else array.get()


def decode(xp, args, call=paged_decode, **options):
    """A call of `paged_decode` or `split_decode` on xp's device, its outputs in NumPy."""
    return tuple(map(to_numpy, call(**on(xp, args), **options)))


def bits(array):
    array = np.ascontiguousarray(to_numpy(array))
    return array.view(f"u{array.itemsize}")


def assert_same_bits(got, want):
    """Two arrays, or two tuples of them, are the same in dtype, shape and every bit."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
        return
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(bits(got), bits(want))


def assert_empty(state):
    """Every o is 0 and every lse -inf."""
    o, lse = map(to_numpy, state)
    assert np.all(o == 0)
    assert np.all(lse == -np.inf)


def assert_within(got, want, bound, what="", infinities=True):
    """Non-finite where `want` is, -inf where it is, and else no further from it than `bound`, element by element.

    Without `infinities`, any non-finite number will do for another: the parts of a P times an infinite V may be inf and NaN.
    """
    got = to_numpy(got).astype(np.float64)
    assert got.shape == want.shape, what
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), f"{what} finite")
    if infinities:
        np.testing.assert_array_equal(got == -np.inf, want == -np.inf, f"{what} -inf")
    finite = np.isfinite(want)
    excess = np.zeros(want.shape)
    excess[finite] = np.abs(got[finite] - want[finite]) - np.broadcast_to(bound, want.shape)[finite]
    if np.any(excess > 0):
        worst = np.unravel_index(excess.argmax(), excess.shape)
        raise AssertionError(f"{what} at {worst}: got {got[worst]!r}, want {want[worst]!r}, {excess[worst]!r} beyond the bound")


def stored(x, dtype):
    """The error of rounding x to a dtype, with one part in 1000 for what x itself is off."""
    return 1.001 * U[dtype] * np.abs(x) + ETA[dtype]


def decode_bound(args, out, lse, *, num_splits=1, out_dtype="float32", partial_dtype="float32", sm_scale=None, layout="NHD", **_):
    """What the kernels may miss by: [B, Hq, D] for o, [B, Hq] for the natural lse, each on its own scale.

    A score: D / 8 + 8 roundings of the dot's terms (on tensor cores 10.5 u for each of ceil(D / 32) steps, and their sum), 3 more
    of scale and difference. Its weight: ex2 is off by 5 u, and it is rescaled once a tile (16 tokens) and once a state, 6 u each
    at worst; a maximum may be 3.5 too low; the merge sees lse, off by a few u of its size. P in parts: 2^-23, or 2^-17 in two
    bfloat16. An error delta_j of a weight costs pi_j delta_j |v_j - out|, as numerator and denominator move together. The sums of
    acc and l cost 32 + 2 tiles + states roundings of sum pi |v|, each; the stores what their dtypes say.
    """
    q, k_cache, v_cache, page_table, context_lens = (args[name] for name in ARRAYS)
    head_dim = q.shape[2]
    scale = 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    e_o, e_lse = np.zeros(out.shape), np.zeros(lse.shape)
    narrow = q.dtype == DTYPES["bfloat16"] and {out_dtype, partial_dtype} != {"float32"}
    parts = 2.0**-17 if narrow else 2.0**-23
    for b, n in enumerate(context_lens.tolist()):
        k, v = (gather(cache, page_table[b], 0, n, layout) for cache in (k_cache, v_cache))
        group = q.shape[1] // k.shape[1]
        for h in range(q.shape[1] if n else 0):
            k_h, v_h, q_h = k[:, h // group], v[:, h // group], q[b, h].astype(np.float64)
            with np.errstate(invalid="ignore"):
                s = scale * (k_h @ q_h)
            # NaN or inf in the result has to match exactly, and a score of -inf has no weight: the bound is for the rest.
            k_h, v_h, s = k_h[s > -np.inf], v_h[s > -np.inf], s[s > -np.inf]
            if len(s) == 0 or not np.isfinite(lse[b, h]):
                continue
            v_h, out_h = (np.where(np.isfinite(x), x, 0) for x in (v_h, out[b, h]))
            size = abs(scale) * (np.abs(k_h) @ np.abs(q_h))
            pi = np.exp(s - lse[b, h])
            tiles = n // 16 + num_splits
            spread = s.max() - s + np.abs(s).max() + math.log(n)
            delta = U32 * ((head_dim / 3 + 14) * size + 6 * spread + 6 * (tiles + num_splits + 6)) + parts
            mean = pi @ np.abs(v_h)
            sums = 2 * (32 + 2 * tiles + num_splits + 6) * U32
            e_o[b, h] = 1.01 * (pi * delta) @ np.abs(v_h - out_h) + sums * mean + n * 2.0**-45 * np.abs(v_h).max()
            e_o[b, h] += (stored(mean, partial_dtype) if partial_dtype != "float32" else 0) + stored(out_h, out_dtype)
            e_lse[b, h] = 1.01 * pi @ delta + sums + 3 * U32 * (abs(lse[b, h]) + np.abs(s).max())
    return e_o, e_lse


def merge_bound(o_part, lse_part, o, lse, out_dtype="float32"):
    """What the merge kernel may miss by, [..., D] for o and [...] for the natural lse.

    A weight: 2 u of the lse's difference, ex2's 5 u, and 6 u a state for the online rescales; it costs omega_s |o_s - o| times
    that. Sums: a rounding a state of sum omega |o|, in numerator and denominator. lse = m + log2(l) / log2(e): 4 roundings.
    """
    num_states = lse_part.shape[-1]
    seen = lse_part != -np.inf
    o_part = np.where(seen[..., None], o_part.astype(np.float64), 0)
    shift = np.where(np.isfinite(lse), lse, 0)
    omega = np.where(seen, np.exp(np.where(seen, lse_part, 0).astype(np.float64) - shift[..., None]), 0)
    spread = np.where(seen, np.abs(shift[..., None] - lse_part), 0)
    delta = omega * U32 * (2 * spread + 2 * math.log(num_states) + 6 * num_states + 6)
    sums = 2 * (num_states + 4) * U32
    e_o = 1.01 * (delta[..., None] * np.abs(o_part - o[..., None, :])).sum(-2)
    e_o += sums * (omega[..., None] * np.abs(o_part)).sum(-2) + stored(o, out_dtype)
    return e_o, 1.01 * delta.sum(-1) + sums + 4 * U32 * np.abs(shift)


def check(xp, args, schedule, **options):
    """A decode with this schedule is the reference's, non-finite elements and all."""
    want, want_lse = reference.paged_decode(**args, **options)
    e_o, e_lse = decode_bound(args, want, want_lse, num_splits=schedule.get("num_splits", 64), **options)
    out, lse = decode(xp, args, **schedule, **options, out_dtype="float32")
    assert_within(out, want, e_o, "out", infinities=False)
    assert_within(lse, want_lse, e_lse, "lse")
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want_lse))
    return out, lse


class Guarded:
    """An output as a strided view, full of NaN, inside a buffer of canaries one element wide on every side."""

    def __init__(self, xp, shape, dtype="float32"):
        self.inside = tuple(slice(1, n + 1) for n in shape)
        buffer = np.full([n + 2 for n in shape], CANARY).astype(DTYPES[dtype])
        buffer[self.inside] = np.nan
        self.buffer = xp.asarray(buffer)
        self.view = self.buffer[self.inside]

    def assert_outside_untouched(self):
        found = to_numpy(self.buffer).copy()
        found[self.inside] = CANARY
        assert np.all(found == CANARY)


def launch(text, name, threads, *arrays, grid=(1, 1, 1), shared_bytes=0, seed=0, defines=()):
    """Runs a kernel text on the CPU, its parameters all pointers; returns the launcher's status."""
    library = build.load(text, (name,), tuple(defines))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    addresses = (ctypes.c_void_p * len(arrays))(*map(ctypes.addressof, pointers))
    sizes = (ctypes.c_uint * 3)(*grid), ctypes.c_uint(threads), ctypes.c_uint(shared_bytes)
    return library[f"launch_{name}"](*sizes, addresses, ctypes.c_uint64(seed))
