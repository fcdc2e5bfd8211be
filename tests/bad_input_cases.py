"""Faulty arguments: functions, argument, what is wrong, exception, text."""

import numpy as np
from helpers import CANARY, paged

from cupy_kernels import (
    merge_state,
    merge_state_in_place,
    merge_states,
    paged_decode,
    plan_splits,
    split_decode,
    split_ranges,
)


def decode_arguments():
    """paged_decode: q [2, 4, 16], caches [8, 16, 2, 16], page_table [2, 5]."""
    args = paged((37, 48), seed=1)
    out, lse = np.full((2, 4, 16), CANARY, np.float16), np.full((2, 4), CANARY, np.float32)
    return args | {"out": out, "lse_out": lse, "num_splits": 3}


def split_arguments():
    out, lse = np.full((2, 4, 3, 16), CANARY, np.float32), np.full((2, 4, 3), CANARY, np.float32)
    return decode_arguments() | {"out": out, "lse_out": lse}


def states_arguments():
    return {"o_part": np.zeros((3, 2, 8), np.float32), "lse_part": np.zeros((3, 2), np.float32)}


def pair_arguments(*names):
    return {name: np.full((3, 8) if name.startswith("o") else 3, CANARY, np.float32) for name in names}


VALID = {
    paged_decode: decode_arguments,
    split_decode: split_arguments,
    merge_states: states_arguments,
    merge_state: lambda: pair_arguments("o_a", "lse_a", "o_b", "lse_b"),
    merge_state_in_place: lambda: pair_arguments("o", "lse", "o_other", "lse_other"),
    split_ranges: lambda: {"context_len": 37, "page_size": 16, "num_splits": 4},
    plan_splits: lambda: {"context_lens": [37], "page_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "num_sms": 132},
}
OUTPUTS = {paged_decode: ("out", "lse_out"), split_decode: ("out", "lse_out"), merge_state_in_place: ("o", "lse")}


def cast(dtype):
    return lambda x: x.astype(dtype)


def cut(*index):
    return lambda x: x[index]


def wide(x):
    """The same shape with a stride of 2 on the last axis."""
    return np.repeat(x, 2, -1)[..., ::2]


def read_only(x):
    x.flags.writeable = False
    return x


def misaligned(x):
    return np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(x.dtype).reshape(x.shape)


def fractional(x):
    """Strides that are no whole number of elements."""
    packed = np.zeros(len(x), [("x", x.dtype, x.shape[1:]), ("tag", np.uint8)])
    return packed["x"]


def overlapping(x):
    """Writeable, and each row starts inside the one before."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:-2], x.itemsize, x.itemsize))


def broadcast(x):
    """Writeable, and all rows in one place."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))


ARRAY = "expected a NumPy, CuPy or DLPack array, got"
ANY_FLOAT = "expected dtype float16 or bfloat16 or float32, got"
decodes, merges, IN_PLACE = (paged_decode, split_decode), (merge_state, merge_state_in_place), (merge_state_in_place,)
# (functions, argument, what replaces its value or makes it of the valid one, exception, text after "argument: ")
BAD = [
    (decodes, "q", [[1.0]], TypeError, f"{ARRAY} list"),
    (decodes, "q", None, TypeError, f"{ARRAY} NoneType"),
    (decodes, "q", cast(np.float64), TypeError, f"{ANY_FLOAT} float64"),
    (decodes, "q", cast(np.int32), TypeError, f"{ANY_FLOAT} int32"),
    (decodes, "q", cut(0), ValueError, "expected shape [batch_size, num_q_heads, head_dim], got [4, 16]"),
    (decodes, "q", wide, ValueError, "expected unit stride on the last axis, got 2"),
    (decodes, "k_cache", 3, TypeError, f"{ARRAY} int"),
    (decodes, "k_cache", cast(np.float32), TypeError, "expected dtype float16, got float32"),
    (decodes, "k_cache", cut(0), ValueError, "expected shape [pool_pages, page_size, num_kv_heads, 16], got [16, 2, 16]"),
    (decodes, "k_cache", cut(..., slice(8)), ValueError,
     "expected shape [pool_pages, page_size, num_kv_heads, 16], got [9, 16, 2, 8]"),
    (decodes, "k_cache", wide, ValueError, "expected unit stride on the last axis, got 2"),
    (decodes, "v_cache", "v", TypeError, f"{ARRAY} str"),
    (decodes, "v_cache", cast(np.float32), TypeError, "expected dtype float16, got float32"),
    (decodes, "v_cache", wide, ValueError, "expected unit stride on the last axis, got 2"),
    (decodes, "v_cache", cut(slice(5)), ValueError, "expected the shape of k_cache, [9, 16, 2, 16], got [5, 16, 2, 16] (as NHD)"),
    (decodes, "v_cache", cut(slice(None), slice(8)), ValueError,
     "expected the shape of k_cache, [9, 16, 2, 16], got [9, 8, 2, 16] (as NHD)"),
    (decodes, "page_table", [[0, 1]], TypeError, f"{ARRAY} list"),
    (decodes, "page_table", cast(np.int64), TypeError, "expected dtype int32, got int64"),
    (decodes, "page_table", cast(np.uint32), TypeError, "expected dtype int32, got uint32"),
    (decodes, "page_table", cut(slice(1)), ValueError, "expected shape [2, max_pages], got [1, 5]"),
    (decodes, "page_table", cut(0), ValueError, "expected shape [2, max_pages], got [5]"),
    (decodes, "page_table", wide, ValueError, "expected unit stride on the last axis, got 2"),
    (decodes, "context_lens", [37, 48], TypeError, f"{ARRAY} list"),
    (decodes, "context_lens", cast(np.int64), TypeError, "expected dtype int32, got int64"),
    (decodes, "context_lens", cut(slice(1)), ValueError, "expected shape [2], got [1]"),
    (decodes, "context_lens", cut(None), ValueError, "expected shape [2], got [1, 2]"),
    (decodes, "sm_scale", "1", TypeError, "expected a number, got str"),
    (decodes, "sm_scale", True, TypeError, "expected a number, got bool"),
    (decodes, "sm_scale", np.inf, ValueError, "expected a finite number, got inf"),
    (decodes, "sm_scale", np.nan, ValueError, "expected a finite number, got nan"),
    (decodes, "layout", "DHN", ValueError, "expected 'NHD' or 'HND', got 'DHN'"),
    (decodes, "layout", 3, TypeError, "expected a string, got int"),
    (decodes, "schedule", "random", ValueError, "expected 'balanced' or 'uniform' or 'fixed', got 'random'"),
    (decodes, "schedule", 3, TypeError, "expected a string, got int"),
    (decodes, "num_splits", 0, ValueError, "expected 1 to 65535, got 0"),
    (decodes, "num_splits", 65536, ValueError, "expected 1 to 65535, got 65536"),
    (decodes, "num_splits", 2.0, TypeError, "expected an integer, got float"),
    (decodes, "num_splits", True, TypeError, "expected an integer, got bool"),
    (decodes, "lse_base", "10", ValueError, "expected 'e' or '2', got '10'"),
    (decodes, "lse_base", 2, TypeError, "expected a string, got int"),
    (decodes, "partial_dtype", "float64", TypeError, "expected float16 or bfloat16 or float32, got float64"),
    (decodes, "partial_dtype", 16, TypeError, "expected a dtype, got 16"),
    ((paged_decode,), "out_dtype", "int8", TypeError, "expected float16 or bfloat16 or float32, got int8"),
    (decodes, "out", [0], TypeError, f"{ARRAY} list"),
    ((paged_decode,), "out", cast(np.float32), TypeError, "expected dtype float16, got float32"),
    ((split_decode,), "out", cast(np.float16), TypeError, "expected dtype float32, got float16"),
    ((paged_decode,), "out", cut(slice(1)), ValueError, "expected shape [2, 4, 16], got [1, 4, 16]"),
    ((split_decode,), "out", cut(slice(1)), ValueError, "expected shape [2, 4, 3, 16], got [1, 4, 3, 16]"),
    (decodes, "out", wide, ValueError, "expected unit stride on the last axis, got 2"),
    (decodes, "out", overlapping, ValueError, "expected every element in a place of its own, got strides"),
    (decodes, "out", broadcast, ValueError, "expected every element in a place of its own, got strides"),
    (decodes, "lse_out", 0.0, TypeError, f"{ARRAY} float"),
    (decodes, "lse_out", cast(np.float16), TypeError, "expected dtype float32, got float16"),
    ((paged_decode,), "lse_out", cut(slice(None), slice(3)), ValueError, "expected shape [2, 4], got [2, 3]"),
    ((split_decode,), "lse_out", cut(..., 0), ValueError, "expected shape [2, 4, 3], got [2, 4]"),
    (decodes, "lse_out", broadcast, ValueError, "expected every element in a place of its own, got strides"),
    ((merge_states,), "o_part", [[1.0]], TypeError, f"{ARRAY} list"),
    ((merge_states,), "o_part", cast(np.float64), TypeError, f"{ANY_FLOAT} float64"),
    ((merge_states,), "o_part", cut(0, 0), ValueError, "expected shape [..., num_states, head_dim], got [8]"),
    ((merge_states,), "o_part", wide, ValueError, "expected unit stride on the last axis, got 2"),
    ((merge_states,), "lse_part", 1, TypeError, f"{ARRAY} int"),
    ((merge_states,), "lse_part", cast(np.float16), TypeError, "expected dtype float32, got float16"),
    ((merge_states,), "lse_part", cut(slice(2)), ValueError, "expected shape [3, 2], got [2, 2]"),
    ((merge_states,), "out_dtype", "float64", TypeError, "expected float16 or bfloat16 or float32, got float64"),
    ((merge_states,), "algorithm", "tree", ValueError, "expected 'max_first' or 'online', got 'tree'"),
    ((merge_states,), "algorithm", 1, TypeError, "expected a string, got int"),
    ((merge_states, *merges), "lse_base", "10", ValueError, "expected 'e' or '2', got '10'"),
    ((merge_states, *merges), "lse_base", 2, TypeError, "expected a string, got int"),
    *(
        (function, name, *rest)
        for function, names in (((merge_state,), ("o_a", "o_b", "lse_a", "lse_b")),
                                (IN_PLACE, ("o", "o_other", "lse", "lse_other")))
        for name in names
        for rest in (
            (1.0, TypeError, f"{ARRAY} float"),
            (cast(np.float64), TypeError, "expected dtype float"),
            (cast(np.float16), TypeError, "expected dtype float32, got float16") if name not in ("o_a", "o") else
            (cut(..., slice(0)), ValueError, "expected shape [..., head_dim] with a head_dim of at least 1, got [3, 0]"),
            (cut(slice(2)), ValueError, "expected shape [3") if name not in ("o_a", "o") else
            (wide, ValueError, "expected unit stride on the last axis, got 2"),
        )
    ),
    (IN_PLACE, "o", broadcast, ValueError, "expected every element in a place of its own, got strides"),
    (IN_PLACE, "lse", broadcast, ValueError, "expected every element in a place of its own, got strides"),
    (IN_PLACE, "mask", [True], TypeError, f"{ARRAY} list"),
    (IN_PLACE, "mask", np.ones(3, np.uint8), TypeError, "expected dtype bool, got uint8"),
    (IN_PLACE, "mask", np.ones((3, 8), bool), ValueError, "expected shape [3], got [3, 8]"),
    *(
        ((function,), name, *rest)
        for function, name, least in (
            (split_ranges, "context_len", 0), (split_ranges, "page_size", 1), (split_ranges, "num_splits", 1),
            (plan_splits, "page_size", 1), (plan_splits, "num_q_heads", 1), (plan_splits, "num_kv_heads", 1),
            (plan_splits, "num_sms", 1), (plan_splits, "blocks_per_sm", 1), (plan_splits, "heads_per_block", 1),
        )
        for rest in (
            (1.5, TypeError, "expected an integer, got float"),
            (True, TypeError, "expected an integer, got bool"),
            (least - 1, ValueError, f"expected {least} to 2147483647, got {least - 1}"),
            (2**31, ValueError, f"expected {least} to 2147483647, got 2147483648"),
        )
    ),
    ((plan_splits,), "num_q_heads", 3, ValueError, "expected a multiple of num_kv_heads = 2, got 3"),
    ((plan_splits,), "context_lens", [1.5], TypeError, "expected integers, got dtype float64"),
    ((plan_splits,), "context_lens", [True], TypeError, "expected integers, got dtype bool"),
    ((plan_splits,), "context_lens", 37, ValueError, "expected shape [batch_size], got []"),
    ((plan_splits,), "context_lens", [[37]], ValueError, "expected shape [batch_size], got [1, 1]"),
    ((plan_splits,), "context_lens", [37, -1], ValueError, "expected lengths >= 0, got -1"),
]  # fmt: skip
# Faults of memory that only NumPy arrays can have.
BAD_ON_NUMPY = [
    (decodes, "out", read_only, ValueError, "expected a writeable array, got a read-only one"),
    (decodes, "lse_out", read_only, ValueError, "expected a writeable array, got a read-only one"),
    (IN_PLACE, "o", read_only, ValueError, "expected a writeable array, got a read-only one"),
    (IN_PLACE, "lse", read_only, ValueError, "expected a writeable array, got a read-only one"),
    (decodes, "q", misaligned, ValueError, "expected memory aligned to 2 bytes, got an odd address"),
    (decodes, "k_cache", fractional, ValueError, "expected strides in whole elements, got "),
    ((merge_states,), "lse_part", misaligned, ValueError, "expected memory aligned to 4 bytes, got an odd address"),
]
# Several arguments at fault together, or one named by the size it gives.
TOGETHER = [
    (decodes, {"q": np.zeros((2, 3, 16), np.float16)}, ValueError, "num_q_heads: expected a multiple of num_kv_heads = 2, got 3"),
    (decodes, {"q": np.zeros((2, 0, 16), np.float16)}, ValueError, "num_q_heads: expected at least 1, got 0"),
    *(
        (decodes, {"q": np.zeros((2, 4, d), np.float16)}, ValueError,
         f"head_dim: expected a multiple of 8 from 8 to 256, got {d}")
        for d in (0, 4, 12, 264)
    ),
    (decodes, {name: np.zeros((9, 0, 2, 16), np.float16) for name in ("k_cache", "v_cache")}, ValueError,
     "page_size: expected at least 1, got 0"),
    (decodes, {name: np.zeros((9, 16, 0, 16), np.float16) for name in ("k_cache", "v_cache")}, ValueError,
     "num_q_heads: expected a multiple of num_kv_heads = 0, got 4"),
    (decodes, {"schedule": "uniform", "pages_per_split": 2}, ValueError,
     "pages_per_split: expected None with schedule='uniform', got 2"),
    (decodes, {"pages_per_split": 2}, ValueError, "num_splits: expected None with schedule='fixed', got 3"),
    ((paged_decode,), {"schedule": "balanced"}, ValueError, "num_splits: expected None with schedule='balanced', got 3"),
    ((paged_decode,), {"schedule": "balanced", "num_splits": None, "partial_dtype": "float16"}, ValueError,
     "partial_dtype: expected 'float32' with schedule='balanced', got 'float16'"),
    ((split_decode,), {"schedule": "balanced", "num_splits": None}, ValueError,
     "schedule: expected 'uniform' or 'fixed', got 'balanced'"),
    (decodes, {"schedule": "fixed"}, ValueError, "num_splits: expected None with schedule='fixed', got 3"),
    (decodes, {"schedule": "fixed", "num_splits": None, "pages_per_split": 0}, ValueError,
     "pages_per_split: expected 1 to 2147483647, got 0"),
    (decodes, {"schedule": "fixed", "num_splits": None, "pages_per_split": 1, "page_table": np.zeros((2, 70_000), np.int32)},
     ValueError, "pages_per_split: expected at least 2 for 70000 pages, got 1"),
    ((merge_states,), {"o_part": np.zeros((3, 0, 8), np.float32), "lse_part": np.zeros((3, 0), np.float32)}, ValueError,
     "o_part: expected at least one state and a head_dim of at least 1, got [3, 0, 8]"),
    ((merge_states,), {"o_part": np.zeros((3, 2, 0), np.float32)}, ValueError,
     "o_part: expected at least one state and a head_dim of at least 1, got [3, 2, 0]"),
]  # fmt: skip
