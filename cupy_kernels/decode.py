"""Paged decode from call to launches: check, plan, partial states, merge. The whole flow is in this file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from . import jit, tensor_core
from .arrays import check_choice, check_int, check_unit_stride, dtype_name, on_device
from .merge import bind_merge
from .plan import MAX_SPLITS, plan_splits
from .problem import MAX_HEADS_PER_BLOCK, DecodeProblem, check_problem

SCHEDULES = ("balanced", "uniform", "fixed")
THREADS = 128
TILE = 32
# schedule="fixed" without pages_per_split: long enough to pay for a partial, short enough to fill a device from one request.
FIXED_SPLIT_TOKENS = 512
# Bytes of shared memory that a block of partial.cu takes without asking, about.
STATIC_SHARED_BYTES = 3 << 10
# The CPU stand-in plans as an H200 would, so that a call gives the same splits wherever it runs.
STAND_IN = {"MultiProcessorCount": 132, "MaxThreadsPerMultiProcessor": 2048, "MaxSharedMemoryPerMultiprocessor": 228 << 10}


def paged_decode(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, sm_scale: float | None = None,
    layout: str = "NHD", schedule: str | None = None, num_splits: int | None = None, pages_per_split: int | None = None,
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
        schedule: "balanced" lays all tokens end to end and cuts them into equal shares on the device, in one launch; "uniform"
            cuts every request into `num_splits`; "fixed" into splits of `pages_per_split` pages, so that the bits of a request do
            not depend on its batch-mates. None is "balanced", unless `num_splits`, `partial_dtype` ("uniform") or
            `pages_per_split` ("fixed") is given. What the tensor-core kernel can't take ("balanced": float32, other head_dims,
            rows not aligned to 16 bytes) goes to the readable kernel in a planned "uniform" cut.
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
    cut = choose_cut(problem, schedule, num_splits, pages_per_split, dtype_name("partial_dtype", partial_dtype))
    with on_device(problem.q):
        out, lse = outputs(problem, (problem.num_q_heads,), out, lse_out, out_dtype)
        for launch in launches(problem, cut, out, lse):
            launch()
    return out, lse


def launches(problem: DecodeProblem, cut: Cut, out: Any, lse: Any) -> list[jit.Launch]:
    """The launches of a call, in order, with the memory between them: balanced; or partial; or partial and merge."""
    if out.size == 0:
        return []
    if cut.schedule == "balanced":
        grid = plan_grid(problem)
        return [tensor_core.bind_balanced(problem, out, lse, grid, tensor_core.Workspace.of(problem.xp, grid))]
    # A 16-bit partial is rounded even where a request has but one split: "fixed" promises bits that other requests don't change.
    if cut.num_splits == 1 and (cut.schedule == "uniform" or cut.partial_dtype == "float32"):
        return [bind_partial(problem, out[:, :, None], lse[:, :, None], cut.pages_per_split)]
    o_part, lse_part = outputs(problem, (problem.num_q_heads, cut.num_splits), None, None, cut.partial_dtype)
    return [
        bind_partial(problem, o_part, lse_part, cut.pages_per_split),
        bind_merge(problem.xp, o_part, lse_part, out, lse, lse_base=problem.lse_base),
    ]


def split_decode(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, sm_scale: float | None = None,
    layout: str = "NHD", schedule: str | None = None, num_splits: int | None = None, pages_per_split: int | None = None,
    window: int | None = None, softcap: float | None = None, sinks: Any = None, alibi_slopes: Any = None,
    k_scale: float = 1.0, v_scale: float = 1.0, kv_dtype: str | None = None, lse_base: str = "e",
    partial_dtype: Any = "float32", out: Any = None, lse_out: Any = None, check_values: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """The first pass of `paged_decode` alone: the attention state of every split, for `merge_states` or for a look.

    Arguments as `paged_decode`'s, of the same names; `out` and `lse_out` take the partials here. `schedule` is "uniform" or
    "fixed"; None is the one whose argument is given. An empty split is (0, -inf).

    Returns:
        o_part [batch_size, num_q_heads, num_splits, head_dim] of `partial_dtype` and lse_part, float32, of the same shape without
        head_dim. With `schedule="fixed"` num_splits is that of the table's width.

    Raises:
        TypeError, ValueError, NotImplementedError: as `paged_decode`.
    """
    problem = check_problem(
        q, k_cache, v_cache, page_table, context_lens, sm_scale=sm_scale, layout=layout, lse_base=lse_base,
        check_values=check_values,
        not_yet={"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
                 "k_scale": k_scale, "v_scale": v_scale, "kv_dtype": kv_dtype},
    )  # fmt: skip
    if schedule is None:
        schedule = "uniform" if pages_per_split is None else "fixed"
    if schedule == "balanced":
        raise ValueError("schedule: expected 'uniform' or 'fixed', got 'balanced', whose cut has no splits to look at")
    partial_dtype = dtype_name("partial_dtype", partial_dtype)
    cut = choose_cut(problem, schedule, num_splits, pages_per_split, partial_dtype)
    with on_device(problem.q):
        o_part, lse_part = outputs(problem, (problem.num_q_heads, cut.num_splits), out, lse_out, partial_dtype)
        if o_part.size:
            bind_partial(problem, o_part, lse_part, cut.pages_per_split)()
    return o_part, lse_part


@dataclass(frozen=True)
class Cut:
    """How a call is cut: the schedule, its number of splits, and the pages of each where the schedule fixes them (else 0)."""

    schedule: str
    num_splits: int
    pages_per_split: int
    partial_dtype: str


def choose_cut(
    problem: DecodeProblem, schedule: str | None, num_splits: int | None, pages_per_split: int | None, partial_dtype: str
) -> Cut:
    """The cut that the caller asked for, or else the one for this device and the longest context the table holds."""
    if schedule is None:
        asked = num_splits is not None or partial_dtype != "float32"
        schedule = "fixed" if pages_per_split is not None else "uniform" if asked else "balanced"
    check_choice("schedule", schedule, SCHEDULES)
    if schedule != "uniform" and num_splits is not None:
        raise ValueError(f"num_splits: expected None with schedule={schedule!r}, got {num_splits}")
    if schedule != "fixed" and pages_per_split is not None:
        raise ValueError(f"pages_per_split: expected None with schedule={schedule!r}, got {pages_per_split}")
    if schedule == "balanced":
        if partial_dtype != "float32":
            raise ValueError(f"partial_dtype: expected 'float32' with schedule='balanced', got {partial_dtype!r}")
        if takes_tensor_cores(problem):
            return Cut(schedule, 0, 0, partial_dtype)
        schedule = "uniform"
    if schedule == "uniform":
        if num_splits is None:
            longest = min(problem.max_pages * problem.page_size, 2**31 - 1)
            num_splits = plan_splits(
                [longest] * problem.batch_size, page_size=problem.page_size, num_q_heads=problem.num_q_heads,
                num_kv_heads=problem.num_kv_heads, num_sms=device_sms(problem), **partial_blocks(problem),
            )  # fmt: skip
        return Cut(schedule, check_int("num_splits", num_splits, 1, MAX_SPLITS), 0, partial_dtype)
    if pages_per_split is None:
        pages_per_split = math.ceil(FIXED_SPLIT_TOKENS / problem.page_size)
    pages_per_split = check_int("pages_per_split", pages_per_split, 1, 2**31 - 1)
    splits = max(1, math.ceil(problem.max_pages / pages_per_split))
    if splits > MAX_SPLITS:
        least = math.ceil(problem.max_pages / MAX_SPLITS)
        raise ValueError(f"pages_per_split: expected at least {least} for {problem.max_pages} pages, got {pages_per_split}")
    return Cut(schedule, splits, pages_per_split, partial_dtype)


def takes_tensor_cores(problem: DecodeProblem) -> bool:
    """Whether the tensor-core kernels can take this call; the readable kernel takes any."""
    return tensor_core.refusal(problem) is None and not jit.wants_readable()


def device_attribute(problem: DecodeProblem, name: str) -> int:
    """An attribute of the device the arrays are on, by CUDA's name for it."""
    return int((STAND_IN if problem.xp.__name__ == "numpy" else problem.q.device.attributes)[name])


def device_sms(problem: DecodeProblem) -> int:
    """Multiprocessors of the device the arrays are on."""
    return device_attribute(problem, "MultiProcessorCount")


def partial_blocks(problem: DecodeProblem) -> dict[str, int]:
    """What `plan_splits` has to know of the blocks of pass 1: how many an SM runs at once, how many query heads each takes."""
    if takes_tensor_cores(problem):
        grid = plan_grid(problem)
        return {"blocks_per_sm": grid.config.blocks_per_sm, "heads_per_block": grid.block_heads}
    by_threads = device_attribute(problem, "MaxThreadsPerMultiProcessor") // THREADS
    shared_bytes = STATIC_SHARED_BYTES + readable_shared_bytes(problem)
    by_memory = device_attribute(problem, "MaxSharedMemoryPerMultiprocessor") // shared_bytes
    return {"blocks_per_sm": max(1, min(by_threads, by_memory)), "heads_per_block": MAX_HEADS_PER_BLOCK}


def readable_shared_bytes(problem: DecodeProblem) -> int:
    """Dynamic shared memory of kernels/partial.cu: q and acc of each head, a tile of K or V."""
    heads = min(problem.group_size, MAX_HEADS_PER_BLOCK)
    return 4 * (2 * heads * problem.head_dim + TILE * (problem.head_dim + 1))


def plan_grid(problem: DecodeProblem) -> tensor_core.Grid:
    """The grid of the balanced schedule on this device."""
    p = problem
    return tensor_core.plan_grid(
        batch_size=p.batch_size, num_kv_heads=p.num_kv_heads, group_size=p.group_size, head_dim=p.head_dim, num_sms=device_sms(p)
    )


def bind_partial(problem: DecodeProblem, o_part: Any, lse_part: Any, pages_per_split: int) -> jit.Launch:
    """Pass 1: o_part [batch_size, num_q_heads, num_splits, head_dim] and lse_part, by their strides."""
    p, num_splits = problem, o_part.shape[2]
    arguments = {
        **p.arguments(o_part, lse_part, "batch", "head", "split"), "num_splits": num_splits, "pages_per_split": pages_per_split,
    }  # fmt: skip
    if takes_tensor_cores(p):
        return tensor_core.bind_partial(p, str(o_part.dtype), num_splits, plan_grid(p), arguments)
    partial = jit.kernel("partial.cu", "partial", KV=p.dtype, OUT=str(o_part.dtype), THREADS=THREADS)
    return partial.bind(
        p.xp, (p.batch_size, p.num_kv_heads * p.head_chunks, num_splits), THREADS, readable_shared_bytes(p), **arguments,
        head_chunks=p.head_chunks, head_dim=p.head_dim, window=p.window or 0, scale_log2=p.scale_log2,
    )  # fmt: skip


def outputs(problem: DecodeProblem, rows: tuple[int, ...], out: Any, lse_out: Any, out_dtype: Any) -> tuple[Any, Any]:
    """The caller's outputs, checked, or new ones: [batch_size, *rows, head_dim] and [batch_size, *rows]."""
    dtype = problem.dtype if out_dtype is None else dtype_name("out_dtype", out_dtype)
    shape = (problem.batch_size, *rows)
    out = problem.output("out", out, (*shape, problem.head_dim), dtype)
    check_unit_stride("out", out)
    return out, problem.output("lse_out", lse_out, shape, "float32")
