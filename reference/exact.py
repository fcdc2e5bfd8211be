"""Decode and merge in mpmath, to bound the error of the float64 oracle. For small, finite cases.

mpmath's exponent has no bounds, so no maximum is subtracted: `exp(s_j)` is a key's weight in a decode as
`exp(lse_s)`, the headcount behind a partial, is a state's weight in a merge, and both are the same weighted
mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mpmath
import numpy as np
from mpmath import mpf

from .dense import Problem, expect

DIGITS = 60


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` with `DIGITS` significant decimal digits."""

    @wraps(function)
    def at_full_precision(*args: Any, **kwargs: Any) -> Any:
        with mpmath.workdps(DIGITS):
            return function(*args, **kwargs)

    return at_full_precision


def to_mpf(x: np.ndarray) -> np.ndarray:
    """The same numbers, exactly, as an object array of mpf, from mpf or any dtype `dense` takes."""
    return x if x.dtype == object else np.frompyfunc(mpf, 1, 1)(np.asarray(x, np.float64))


def to_float64(x: np.ndarray) -> np.ndarray:
    """An array of mpf rounded to the nearest float64."""
    return np.asarray(x).astype(np.float64)


@exactly
def paged_decode(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    page_table: np.ndarray,
    context_lens: np.ndarray,
    *,
    sm_scale: float | None = None,
    layout: str = "NHD",
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`dense.paged_decode` to 60 digits: same arguments, shapes, log and errors; object arrays of mpf.

    `sm_scale=None` is the exact `1 / sqrt(head_dim)`. Also ValueError if q or a visible key or value is not
    finite.
    """
    problem = Problem.checked(
        q, k_cache, v_cache, page_table, context_lens, sm_scale, layout, window, softcap, sinks, alibi_slopes
    )
    scale = 1 / mpmath.sqrt(q.shape[2]) if sm_scale is None else mpf(sm_scale)
    out, lse = np.empty(q.shape, object), np.empty(q.shape[:2], object)
    for b, begin, end in problem.requests():
        k, v = problem.keys(b, begin, end), problem.values(b, begin, end)
        finite = all(np.isfinite(x.astype(np.float64)).all() for x in (q[b], k, v))
        expect(finite, "q, k_cache, v_cache", "finite numbers", f"NaN or inf in request {b}")
        q_b, k, v = to_mpf(q[b]), to_mpf(k), to_mpf(v)
        for h in range(len(q_b)):
            kv_head = h // (len(q_b) // k.shape[1])
            s = [scale * mpmath.fdot(q_b[h], key) for key in k[:, kv_head]]
            if alibi_slopes is not None:
                s = [s_j + mpf(float(alibi_slopes[h])) * (begin + j - (end - 1)) for j, s_j in enumerate(s)]
            if softcap is not None:
                s = [softcap * mpmath.tanh(s_j / softcap) for s_j in s]
            weights = [mpmath.exp(s_j) for s_j in s]
            extra = mpf(0) if sinks is None else mpmath.exp(float(sinks[h]))
            out[b, h], lse[b, h] = _weighted_mean(weights, v[:, kv_head], extra)
    return out, lse


@exactly
def merge(o_part: np.ndarray, lse_part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge `o_part [..., num_states, head_dim]` by `lse_part [..., num_states]` (natural, finite or -inf).

    Floating or mpf input; a state of lse -inf is left out, whatever its `o`. Returns object arrays of mpf
    `o [..., head_dim]` and `lse [...]`. ValueError for a shape mismatch or an lse of NaN or +inf.
    """
    expect(o_part.shape[:-1] == lse_part.shape, "lse_part", f"shape {o_part.shape[:-1]}", lse_part.shape)
    lse_part = to_mpf(lse_part)
    expect(all(x < mpmath.inf for x in lse_part.flat), "lse_part", "finite numbers or -inf", "NaN or +inf")
    leading = lse_part.shape[:-1]
    o, lse = np.empty((*leading, o_part.shape[-1]), object), np.empty(leading, object)
    for row in np.ndindex(leading):
        states = np.array([x > -mpmath.inf for x in lse_part[row]], bool)
        weights = [mpmath.exp(x) for x in lse_part[row][states]]
        o[row], lse[row] = _weighted_mean(weights, to_mpf(o_part[row][states]), mpf(0))
    return o, lse


def _weighted_mean(weights: list[mpf], values: np.ndarray, extra: mpf) -> tuple[list[mpf], mpf]:
    """Mean of `values [n, head_dim]` and log of the weight; `extra` is a sink's weight, of value 0."""
    total = mpmath.fsum(weights) + extra
    if total == 0:
        return [mpf(0)] * values.shape[1], -mpmath.inf
    return [mpmath.fdot(weights, column) / total for column in values.T], mpmath.log(total)
