"""A correct simulated decode, and the same with one fault each: what the comparator must accept and reject."""

from dataclasses import replace

import numpy as np
from simulated_kernel import Kernel, random_wobble

from verify import Arithmetic, Case, default_orders
from verify.arithmetic import DTYPES

SIMT = Arithmetic(tile=32, pv="fma_tile", l_sum="tree", dot_depth=15, out_dtype="float16")
CASE = Case("c", context_lens=(0, 37, 200), family="split_flip", num_q_heads=4, num_kv_heads=2)


def decode(inputs, a=SIMT, num_splits=4, seed=0):
    """Output, lse and partials of the simulated kernel, in the dtypes a kernel stores."""
    kernel = Kernel(a, random_wobble(np.random.default_rng(seed)))
    group = inputs.q.shape[1] // inputs.num_kv_heads
    out = np.zeros(inputs.q.shape, DTYPES[a.out_dtype])
    lse = np.full(out.shape[:2], -np.inf, np.float32)
    o_part = np.zeros((*lse.shape, num_splits, out.shape[2]), DTYPES[a.partial_dtype])
    lse_part = np.full(o_part.shape[:3], -np.inf, np.float32)
    for b, order in enumerate(default_orders(inputs, a, num_splits=num_splits)):
        used = [i for i, split in enumerate(order) if split]
        for h in range(inputs.num_kv_heads if used else 0):
            rows = slice(h * group, (h + 1) * group)
            _, out[b, rows], lse[b, rows], (o, l) = kernel.run(*inputs.head(b, h), inputs.sm_scale, order)
            for s, o_s, l_s in zip(used, o, l, strict=True):
                o_part[b, rows, s], lse_part[b, rows, s] = o_s, l_s
    return out, lse, o_part, lse_part


def changed(inputs, **arrays):
    """The kernel's output for other inputs, judged as if it had been given the right ones."""
    return decode(replace(inputs, **arrays))


def wrong_page(inputs):
    table = inputs.page_table.copy()
    table[2, 3] = table[2, 4]
    return changed(inputs, page_table=table)


def swapped_heads(inputs):
    out, lse, *_ = decode(inputs)
    return out[:, [1, 0, 2, 3]], lse[:, [1, 0, 2, 3]]


def wrong_kv_head(inputs):
    return changed(inputs, k_cache=inputs.k_cache[:, :, ::-1], v_cache=inputs.v_cache[:, :, ::-1])


def dropped_token(inputs):
    return changed(inputs, context_lens=np.maximum(inputs.context_lens - 1, 0))


def v_is_k(inputs):
    return changed(inputs, v_cache=inputs.k_cache)


def one_nan(inputs):
    out, lse, *_ = decode(inputs)
    out[1, 2, 3] = np.nan
    return out, lse


def one_rounding_too_many(inputs):
    """Partial o stored in 16 bits."""
    return decode(inputs, replace(SIMT, partial_dtype="float16"))


def truncated_output(inputs):
    exact = decode(inputs, replace(SIMT, out_dtype="float32"))
    bits = exact[0].view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float16), exact[1]


def plain_average(inputs):
    _, lse, o_part, lse_part = decode(inputs)
    count = np.maximum((~np.isneginf(lse_part)).sum(-1), 1)[..., None]
    return (o_part.sum(-2) / count).astype(np.float16), lse


def lse_without_maximum(inputs):
    out, lse, *_ = decode(inputs)
    return out, np.where(np.isneginf(lse), lse, lse - 1).astype(np.float32)


def empty_by_a_sentinel(inputs):
    out, lse, *_ = decode(inputs)
    return out, np.where(np.isneginf(lse), np.float32(-1e30), lse)


def empty_row_unwritten(inputs):
    out, lse, *_ = decode(inputs)
    out[0] = np.float16(6e-8)
    return out, lse


def minus_zero_for_empty(inputs):
    out, lse, *_ = decode(inputs)
    out[0] = -0.0
    return out, lse
