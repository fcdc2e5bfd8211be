"""Inputs for the tests of the reference, and what an error of theirs may be."""

import math

import numpy as np

from reference import Precision, merge, paged_decode, partial

U32, U64 = 2.0**-24, 2.0**-53
F64 = Precision.uniform("float64")
INT_MAX = np.iinfo(np.int32).max
ALGORITHMS = ("max_first", "online")


def paged(q, k, v, context_lens, page_size=4, layout="NHD", poison=np.nan, extra_entries=2):
    """q [B, Hq, D] and contiguous k, v [B, N, Hkv, D] as arguments of a decode; what none owns is poison.

    Pages are handed out from a shuffled pool with spare pages; entries past the last page are -1 and INT_MAX.
    """
    num_pages = [-(-n // page_size) for n in context_lens]
    pool_pages = sum(num_pages) + 3
    free = iter(np.random.default_rng(len(k)).permutation(pool_pages).tolist())
    table = np.resize(np.array([-1, INT_MAX], np.int32), (len(q), max(num_pages, default=0) + extra_entries))
    caches = [np.full((pool_pages, page_size, *x.shape[2:]), poison, x.dtype) for x in (k, v)]
    for b, n in enumerate(context_lens):
        for i in range(num_pages[b]):
            table[b, i] = next(free)
            tokens = slice(i * page_size, min((i + 1) * page_size, n))
            for cache, x in zip(caches, (k, v), strict=True):
                cache[table[b, i], : tokens.stop - tokens.start] = x[b, tokens]
    if layout == "HND":
        caches = [np.ascontiguousarray(cache.swapaxes(1, 2)) for cache in caches]
    return q, *caches, table, np.array(context_lens, np.int32)


def normal(context_lens, num_q_heads=4, num_kv_heads=2, head_dim=8, dtype=np.float64, seed=0):
    """q, k, v, context_lens for `paged`."""
    rng = np.random.default_rng(seed)
    shape = (len(context_lens), max(context_lens, default=0), num_kv_heads, head_dim)
    q = rng.standard_normal((shape[0], num_q_heads, head_dim))
    k, v = rng.standard_normal((2, *shape))
    return *(x.astype(dtype) for x in (q, k, v)), context_lens


def with_scores(target, v, dtype=np.float16, seed=0):
    """q, k, v, context_lens of one head whose default-scaled scores are about `target [N]`; v is [N, D]."""
    rng = np.random.default_rng(seed)
    n, head_dim = v.shape
    q = rng.standard_normal(head_dim).astype(dtype).astype(np.float64)
    unit = q / np.linalg.norm(q)
    noise = 0.05 * rng.standard_normal((n, head_dim))
    k = noise - np.outer(noise @ unit, unit)
    k += np.outer(target * math.sqrt(head_dim) / np.linalg.norm(q), unit)
    return q.astype(dtype)[None, None], k.astype(dtype)[None, :, None], v.astype(dtype)[None, :, None], [n]


def numbers(values):
    """q, k, v, context_lens with D = 1 whose scores (at sm_scale=1) and values are the two given rows."""
    s, v = (np.array(row, np.float64)[None, :, None, None] for row in values)
    return np.ones((1, 1, 1)), s, v, [s.shape[1]]


def budget(q, k, v, u, depth, out, lse):
    """What one request's decode in roundoff u may miss by: `[Hq, D]` for o and `[Hq]` for lse.

    k, v [n, Hkv, D] are its visible tokens. A score is off by at most D + 4 roundings of its parts' sizes (D
    products and sums, the scale's own two, scaling, one spare), its weight by one more of s - m and two for
    exp. Centring (numerator and denominator move together) makes that sum_j pi_j delta_j |v_j - out|. A sum
    of `depth` roundings, twice (acc and l), and 4 for product, division and stores cost u * sum_j pi_j |v_j|
    each. 1 % covers the second order.
    """
    scale = 1 / math.sqrt(q.shape[1])
    group_size = len(q) // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    e_o, e_lse = np.zeros(q.shape), np.zeros(len(q))
    for h in range(len(q)):
        k_h, v_h = k[:, h // group_size], v[:, h // group_size]
        s = scale * (k_h @ q[h])
        parts = scale * (np.abs(k_h) @ np.abs(q[h]))
        delta = u * ((q.shape[1] + 4) * parts + np.abs(s - s.max()) + 2)
        pi = np.exp(s - s.max())
        pi /= pi.sum()
        e_o[h] = 1.01 * (pi * delta) @ np.abs(v_h - out[h]) + (2 * depth + 4) * u * (pi @ np.abs(v_h))
        e_lse[h] = 1.01 * pi @ delta + u * (depth + 4 + 3 * np.abs(lse[h]) + np.abs(s).max())
    return e_o, e_lse


def pairwise_depth(n):
    """Roundings in NumPy's pairwise sum of n numbers: 16 in each of 8 lanes, 3 to join them, then halves."""
    return 19 + max(0, math.ceil(math.log2(max(n, 1) / 128)))


def states_equal(a, b):
    """The bits of two (o, lse) agree; no NaN in either."""
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def random_states(num_states, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((5, num_states, 6)), spread * rng.standard_normal((5, num_states))


def every_form(args, **options):
    """`(o, lse)` of dense and of every split count and algorithm."""
    yield paged_decode(*args, **options)
    for num_splits in (1, 2, 3, 5, 8):
        states = partial(*args, num_splits=num_splits, **options)
        for algorithm in ALGORITHMS:
            yield merge(*states, algorithm=algorithm)
