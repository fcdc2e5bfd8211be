"""Paged decode from call to launches: check, plan, partial states, merge. The whole flow is in this file."""

from __future__ import annotations

import math
from typing import Any

from . import jit
from .arrays import check_choice, check_int, check_unit_stride, dtype_name, element_strides
from .merge import launch_merge
from .plan import MAX_SPLITS, plan_splits
from .problem import DecodeProblem, check_problem

SCHEDULES = ("uniform", "fixed")
THREADS = 128
TILE = 32
# schedule="fixed" without pages_per_split: long enough to pay for a partial, short enough to fill a device from one request.
FIXED_SPLIT_TOKENS = 512
# The CPU stand-in plans as an H200 would, so that a call gives the same splits wherever it runs.
STAND_IN_SMS = 132


def paged_decode(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, sm_scale: float | None = None,
    layout: str = "NHD", schedule: str = "uniform", num_splits: int | None = None, pages_per_split: int | None = None,
    window: int | None = None, softcap: float | None = None, sinks: Any = None, alibi_slopes: Any = None,
    k_scale: float = 1.0, v_scale: float = 1.0, kv_dtype: str | None = None, lse_base: str = "e",
    partial_dtype: Any = "float32", out: Any = None, lse_out: Any = None, out_dtype: Any = None, check_values: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of one query token per request over its paged KV cache: `out = softmax(sm_scale q.K) V`.

    NumPy arrays run on the CPU; CuPy arrays on their device and the current stream, without a host synchronisation; other arrays
    that speak DLPack or `__cuda_array_interface__` are taken as they lie and give CuPy (on a CPU: NumPy) arrays back.

    Args:
        q: [batch_size, num_q_heads, head_dim], float16, bfloat16 or float32; head_dim a multiple of 8 up to 256.
        k_cache: [pool_pages, page_size, num_kv_heads, head_dim] ("NHD") or [pool_pages, num_kv_heads, page_size, head_dim]
            ("HND"), dtype of q, any strides with a unit stride on head_dim; num_kv_heads divides num_q_heads.
        v_cache: as `k_cache`, with strides of its own.
        page_table: [batch_size, max_pages] int32: pages of each request in order. Entries past its last page are never read.
        context_lens: [batch_size] int32: tokens of each request, 0 to max_pages * page_size. 0 gives o = 0, lse = -inf.
        sm_scale: factor of the scores; None is 1 / sqrt(head_dim).
        layout: "NHD" or "HND", of both caches.
        schedule: "uniform" cuts every request into `num_splits`; "fixed" into splits of `pages_per_split` pages, so that the
            bits of a request do not depend on its batch-mates.
        num_splits: for "uniform"; None plans it from the table's width and the device. 1 is the unsplit kernel: one launch.
        pages_per_split: for "fixed"; None is about 512 tokens.
        window, softcap, sinks, alibi_slopes, k_scale, v_scale, kv_dtype: not there yet; only their defaults are taken.
        lse_base: base of the returned lse, "e" or "2".
        partial_dtype: storage of o between the two passes: "float32", "float16" or "bfloat16". A partial lse is float32.
        out: [batch_size, num_q_heads, head_dim] to write to, unit stride on head_dim; None makes a new array.
        lse_out: [batch_size, num_q_heads] float32 to write to; None makes a new array.
        out_dtype: dtype of out; None is that of q.
        check_values: also check lengths and page ids, which reads them from the device and waits for it.

    Returns:
        out [batch_size, num_q_heads, head_dim] and lse [batch_size, num_q_heads] float32.

    Raises:
        TypeError: kind or dtype of an argument.
        ValueError: shape, layout, stride or range of an argument.
        NotImplementedError: an option that is not there yet. In all cases nothing has been launched or written.
    """
    problem = check_problem(
        q, k_cache, v_cache, page_table, context_lens, sm_scale=sm_scale, layout=layout, lse_base=lse_base,
        check_values=check_values,
        not_yet={"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
                 "k_scale": k_scale, "v_scale": v_scale, "kv_dtype": kv_dtype},
    )  # fmt: skip
    partial_dtype = dtype_name("partial_dtype", partial_dtype)
    num_splits, pages_per_split = choose_splits(problem, schedule, num_splits, pages_per_split)
    out, lse = _outputs(problem, (problem.num_q_heads,), out, lse_out, out_dtype)

    # A 16-bit partial is rounded even where a request has but one split: "fixed" promises bits that other requests don't change.
    if num_splits == 1 and (schedule == "uniform" or partial_dtype == "float32"):
        launch_partial(problem, out[:, :, None], lse[:, :, None], pages_per_split)
        return out, lse
    o_part, lse_part = _outputs(problem, (problem.num_q_heads, num_splits), None, None, partial_dtype)
    launch_partial(problem, o_part, lse_part, pages_per_split)
    launch_merge(problem.xp, o_part, lse_part, out, lse, lse_base=lse_base)
    return out, lse


def split_decode(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, sm_scale: float | None = None,
    layout: str = "NHD", schedule: str = "uniform", num_splits: int | None = None, pages_per_split: int | None = None,
    window: int | None = None, softcap: float | None = None, alibi_slopes: Any = None, k_scale: float = 1.0,
    v_scale: float = 1.0, kv_dtype: str | None = None, lse_base: str = "e", partial_dtype: Any = "float32", out: Any = None,
    lse_out: Any = None, check_values: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """The first pass of `paged_decode` alone: the attention state of every split, for `merge_states` or for a look.

    Arguments as `paged_decode`'s, of the same names; `out` and `lse_out` take the partials here. An empty split is (0, -inf).

    Returns:
        o_part [batch_size, num_q_heads, num_splits, head_dim] of `partial_dtype` and lse_part, float32, of the same shape without
        head_dim. With `schedule="fixed"` num_splits is that of the table's width.

    Raises:
        TypeError, ValueError, NotImplementedError: as `paged_decode`.
    """
    problem = check_problem(
        q, k_cache, v_cache, page_table, context_lens, sm_scale=sm_scale, layout=layout, lse_base=lse_base,
        check_values=check_values,
        not_yet={"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "k_scale": k_scale, "v_scale": v_scale,
                 "kv_dtype": kv_dtype},
    )  # fmt: skip
    partial_dtype = dtype_name("partial_dtype", partial_dtype)
    num_splits, pages_per_split = choose_splits(problem, schedule, num_splits, pages_per_split)
    o_part, lse_part = _outputs(problem, (problem.num_q_heads, num_splits), out, lse_out, partial_dtype)
    launch_partial(problem, o_part, lse_part, pages_per_split)
    return o_part, lse_part


def choose_splits(problem: DecodeProblem, schedule: str, num_splits: int | None, pages_per_split: int | None) -> tuple[int, int]:
    """The number of splits, and the pages of each where the schedule fixes them (else 0)."""
    check_choice("schedule", schedule, SCHEDULES)
    if schedule == "uniform":
        if pages_per_split is not None:
            raise ValueError(f"pages_per_split: expected None with schedule='uniform', got {pages_per_split}")
        if num_splits is not None:
            return check_int("num_splits", num_splits, 1, MAX_SPLITS), 0
        longest = problem.max_pages * problem.page_size
        return plan_splits(
            [min(longest, 2**31 - 1)] * problem.batch_size, page_size=problem.page_size, num_q_heads=problem.num_q_heads,
            num_kv_heads=problem.num_kv_heads, num_sms=device_sms(problem),
        ), 0  # fmt: skip
    if num_splits is not None:
        raise ValueError(f"num_splits: expected None with schedule='fixed', got {num_splits}")
    if pages_per_split is None:
        pages_per_split = math.ceil(FIXED_SPLIT_TOKENS / problem.page_size)
    pages_per_split = check_int("pages_per_split", pages_per_split, 1, 2**31 - 1)
    splits = max(1, math.ceil(problem.max_pages / pages_per_split))
    if splits > MAX_SPLITS:
        least = math.ceil(problem.max_pages / MAX_SPLITS)
        raise ValueError(f"pages_per_split: expected at least {least} for {problem.max_pages} pages, got {pages_per_split}")
    return splits, pages_per_split


def device_sms(problem: DecodeProblem) -> int:
    """Multiprocessors of the device the arrays are on."""
    if problem.xp.__name__ == "numpy":
        return STAND_IN_SMS
    return int(problem.q.device.attributes["MultiProcessorCount"])


def launch_partial(problem: DecodeProblem, o_part: Any, lse_part: Any, pages_per_split: int) -> None:
    """The partial kernel: o_part [batch_size, num_q_heads, num_splits, head_dim] and lse_part, by their strides."""
    p, num_splits = problem, o_part.shape[2]
    q, k, v, o, lse = map(element_strides, (p.q, p.k_cache, p.v_cache, o_part, lse_part))
    heads = min(p.group_size, 16)
    shared_floats = 2 * heads * p.head_dim + TILE * (p.head_dim + 1)
    partial = jit.kernel("partial.cu", "partial", KV=p.dtype, OUT=str(o_part.dtype), THREADS=THREADS)
    partial(
        p.xp, (p.batch_size, p.num_kv_heads * p.head_chunks, num_splits), THREADS, 4 * shared_floats,
        q=p.q, k_cache=p.k_cache, v_cache=p.v_cache, page_table=p.page_table, context_lens=p.context_lens, o=o_part, lse=lse_part,
        group_size=p.group_size, head_chunks=p.head_chunks, head_dim=p.head_dim, page_size=p.page_size, max_pages=p.max_pages,
        num_splits=num_splits, pages_per_split=pages_per_split, window=p.window or 0, scale_log2=p.scale_log2,
        natural=int(p.lse_base == "e"),
        q_batch_stride=q[0], q_head_stride=q[1], k_page_stride=k[0], k_slot_stride=k[1], k_head_stride=k[2],
        v_page_stride=v[0], v_slot_stride=v[1], v_head_stride=v[2], page_table_stride=element_strides(p.page_table)[0],
        context_lens_stride=element_strides(p.context_lens)[0], o_batch_stride=o[0], o_head_stride=o[1], o_split_stride=o[2],
        lse_batch_stride=lse[0], lse_head_stride=lse[1], lse_split_stride=lse[2],
    )  # fmt: skip


def _outputs(problem: DecodeProblem, rows: tuple[int, ...], out: Any, lse_out: Any, out_dtype: Any) -> tuple[Any, Any]:
    """The caller's outputs, checked, or new ones: [batch_size, *rows, head_dim] and [batch_size, *rows]."""
    dtype = problem.dtype if out_dtype is None else dtype_name("out_dtype", out_dtype)
    shape = (problem.batch_size, *rows)
    out = problem.output("out", out, (*shape, problem.head_dim), dtype)
    check_unit_stride("out", out)
    return out, problem.output("lse_out", lse_out, shape, "float32")
