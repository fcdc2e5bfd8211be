"""The merge of attention states: many into one, two into one, two in place."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from . import jit
from .arrays import (
    FLOAT_DTYPES,
    array_module,
    as_array,
    check_array,
    check_choice,
    check_output,
    check_unit_stride,
    data_pointer,
    dtype_name,
    element_strides,
    on_device,
    strides,
)
from .problem import LSE_BASES

ALGORITHMS = ("max_first", "online")
THREADS = 256
WARPS = THREADS // 32
# States of a row that a warp has under way at once.
BATCH = 8
_LOG2_PER_UNIT = {"e": math.log2(math.e), "2": 1.0}


def merge_states(
    o_part: Any, lse_part: Any, *, out_dtype: Any = None, lse_base: str = "e", algorithm: str = "max_first"
) -> tuple[Any, Any]:
    """Merges attention states along the axis before the last: `out = sum w_s o_s / sum w_s` with `w_s = exp(lse_s - max lse)`.

    A state whose lse is -inf is empty and selected away, whatever its o holds; a NaN in an lse makes the result NaN; merging
    empties gives the empty state (0, -inf). Formula: the Flash-Decoding post of 2023.

    Args:
        o_part: [..., num_states, head_dim], float16, bfloat16 or float32; any strides with a unit stride on the last axis.
        lse_part: [..., num_states] float32, the states' log-sum-exp.
        out_dtype: dtype of the merged o; None is that of `o_part`.
        lse_base: base of the logarithms, "e" or "2", coming in and going out.
        algorithm: "max_first" finds the maximum of all states first, "online" rescales a running state: equal if exact.

    Returns:
        o [..., head_dim] of `out_dtype` and lse [...] float32, new arrays on the device of `o_part`.

    Raises:
        TypeError: kind or dtype of an argument.
        ValueError: shape, stride or range of an argument; zero states.
    """
    check_choice("lse_base", lse_base, LSE_BASES)
    check_choice("algorithm", algorithm, ALGORITHMS)
    o_part, lse_part = as_array("o_part", o_part), as_array("lse_part", lse_part)
    if o_part.ndim < 2:
        raise ValueError(f"o_part: expected shape [..., num_states, head_dim], got {list(o_part.shape)}")
    check_array("o_part", o_part, o_part, FLOAT_DTYPES, o_part.shape)
    check_array("lse_part", lse_part, o_part, ("float32",), o_part.shape[:-1])
    check_unit_stride("o_part", o_part)
    *lead, num_states, head_dim = o_part.shape
    if num_states == 0 or head_dim == 0:
        raise ValueError(f"o_part: expected at least one state and a head_dim of at least 1, got {list(o_part.shape)}")
    xp = array_module(o_part)
    dtype = str(o_part.dtype) if out_dtype is None else dtype_name("out_dtype", out_dtype)
    outer, inner = _rows(lead)
    with on_device(o_part):
        o, lse = xp.empty((*lead, head_dim), np.dtype(dtype)), xp.empty(lead, np.float32)
        bind_merge(
            xp,
            o_part.reshape(outer, inner, num_states, head_dim),
            lse_part.reshape(outer, inner, num_states),
            o.reshape(outer, inner, head_dim),
            lse.reshape(outer, inner),
            lse_base=lse_base,
            algorithm=algorithm,
        )()
    return o, lse


def bind_merge(
    xp: ModuleType, o_part: Any, lse_part: Any, o: Any, lse: Any, *, lse_base: str, algorithm: str = "max_first"
) -> jit.Launch:
    """The merge kernel on checked arrays [outer, inner, num_states, head_dim] -> [outer, inner, head_dim]."""
    outer, inner, num_states, head_dim = o_part.shape
    rows, width = outer * inner, _width(o_part)
    # Warps of a row: one for each batch of its states, in powers of two, up to a whole block.
    ways = min(1 << (math.ceil(num_states / BATCH) - 1).bit_length(), WARPS)
    blocks = math.ceil(rows * ways / WARPS) * math.ceil(head_dim / (32 * width))
    constants = {"IN": str(o_part.dtype), "OUT": str(o.dtype), "WIDTH": width, "BATCH": BATCH, "THREADS": THREADS}
    return jit.kernel("merge.cu", "merge", **constants).bind(
        xp, (blocks, 1, 1), THREADS, 0,
        o_part=o_part, lse_part=lse_part, o=o, lse=lse, rows=rows, inner=inner, num_states=num_states, head_dim=head_dim,
        ways=ways, log2_per_unit=_LOG2_PER_UNIT[lse_base], max_first=int(algorithm == "max_first"),
        **strides("o_part", o_part, "outer", "inner", "state"), **strides("lse_part", lse_part, "outer", "inner", "state"),
        **strides("o", o, "outer", "inner"), **strides("lse", lse, "outer", "inner"),
    )  # fmt: skip


def merge_state(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, lse_base: str = "e") -> tuple[Any, Any]:
    """Merges two attention states into a new one; see `merge_states` for the algebra and the rules.

    Args:
        o_a: [..., head_dim], float16, bfloat16 or float32, unit stride on the last axis.
        lse_a: [...] float32.
        o_b: as `o_a`, of the same dtype.
        lse_b: as `lse_a`.
        lse_base: base of the logarithms, "e" or "2", coming in and going out.

    Returns:
        o [..., head_dim] of the states' dtype and lse [...] float32, new arrays.

    Raises:
        TypeError, ValueError: as `merge_states`.
    """
    o_a, lse_a, o_b, lse_b = _check_pair(("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b), lse_base)
    xp = array_module(o_a)
    with on_device(o_a):
        o, lse = xp.empty(o_a.shape, o_a.dtype), xp.empty(lse_a.shape, np.float32)
        _launch_pair(xp, o_a, lse_a, o_b, lse_b, o, lse, None, lse_base)
    return o, lse


def merge_state_in_place(o: Any, lse: Any, o_other: Any, lse_other: Any, *, mask: Any = None, lse_base: str = "e") -> None:
    """Merges a second attention state into `(o, lse)`, which it overwrites; see `merge_states` for the algebra and the rules.

    Args:
        o: [..., head_dim], float16, bfloat16 or float32, unit stride on the last axis; overwritten.
        lse: [...] float32; overwritten.
        o_other: as `o`, of the same dtype; may not overlap it, unless it is the same array.
        lse_other: as `lse`.
        mask: bool, shaped as `lse`: True merges the row, False leaves it untouched. None merges every row.
        lse_base: base of the logarithms, "e" or "2", coming in and going out.

    Raises:
        TypeError, ValueError: as `merge_states`; also for an `o` or `lse` that cannot be written. Nothing is written then.
    """
    o, lse, o_other, lse_other = _check_pair(("o", o), ("lse", lse), ("o_other", o_other), ("lse_other", lse_other), lse_base)
    check_output("o", o)
    check_output("lse", lse)
    if mask is not None:
        mask = as_array("mask", mask)
        check_array("mask", mask, o, ("bool",), lse.shape)
    with on_device(o):
        _launch_pair(array_module(o), o, lse, o_other, lse_other, o, lse, mask, lse_base)


def _check_pair(a: Any, lse_a: Any, b: Any, lse_b: Any, lse_base: str) -> list[Any]:
    check_choice("lse_base", lse_base, LSE_BASES)
    arrays = [as_array(name, value) for name, value in (a, lse_a, b, lse_b)]
    first = arrays[0]
    if first.ndim < 1 or first.shape[-1] == 0:
        raise ValueError(f"{a[0]}: expected shape [..., head_dim] with a head_dim of at least 1, got {list(first.shape)}")
    for (name, _), array in zip((a, b), arrays[::2], strict=True):
        check_array(name, array, first, FLOAT_DTYPES if array is first else (str(first.dtype),), first.shape)
        check_unit_stride(name, array)
    for (name, _), array in zip((lse_a, lse_b), arrays[1::2], strict=True):
        check_array(name, array, first, ("float32",), first.shape[:-1])
    return arrays


def _launch_pair(xp: ModuleType, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, o: Any, lse: Any, mask: Any, lse_base: str) -> None:
    outer, inner = _rows(lse.shape)
    head_dim = o.shape[-1]
    states = {
        "o_a": o_a.reshape(outer, inner, head_dim), "lse_a": lse_a.reshape(outer, inner),
        "o_b": o_b.reshape(outer, inner, head_dim), "lse_b": lse_b.reshape(outer, inner),
        "o": o.reshape(outer, inner, head_dim), "lse": lse.reshape(outer, inner),
    }  # fmt: skip
    mask_rows = None if mask is None else mask.reshape(outer, inner)
    by_name = {**states, "mask": states["lse"] if mask is None else mask_rows}
    by_row = {key: value for name, rows in by_name.items() for key, value in strides(name, rows, "outer", "inner").items()}
    rows, width = outer * inner, min(_width(states["o_a"]), _width(states["o_b"]))
    constants = {"IN": str(o.dtype), "OUT": str(o.dtype), "WIDTH": width, "BATCH": BATCH, "THREADS": THREADS}
    jit.kernel("merge.cu", "merge_pair", **constants)(
        xp, (math.ceil(rows / WARPS), 1, 1), THREADS, 0, **states, mask=mask_rows, rows=rows, inner=inner, head_dim=head_dim,
        log2_per_unit=_LOG2_PER_UNIT[lse_base], **by_row,
    )  # fmt: skip
    # Where axes could not be folded into two, reshape made a copy, and the result has to go back.
    for target, written in ((o, states["o"]), (lse, states["lse"])):
        if target.size and data_pointer(target) != data_pointer(written):
            target[...] = written.reshape(target.shape)


def _width(o: Any) -> int:
    """Columns that a lane loads at once: 4 if every row of o begins where so many elements may, else 1."""
    steps = (stride for stride, size in zip(element_strides(o)[:-1], o.shape[:-1], strict=True) if size > 1)
    return 1 if data_pointer(o) % (4 * o.itemsize) or any(x % 4 for x in (o.shape[-1], *steps)) else 4


def _rows(lead: Any) -> tuple[int, int]:
    """Leading axes as (outer, inner): the last one, and all before it folded."""
    return (math.prod(lead[:-1]), lead[-1]) if lead else (1, 1)
