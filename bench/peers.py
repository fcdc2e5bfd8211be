"""Other people's decode kernels on the arrays of a case, each correct before it is timed. torch is imported here only.

`python -m bench.peers DTYPE HEAD_DIM ...` compiles FlashInfer's kernels and does nothing else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from . import accuracy, timing
from .cases import BenchCase, PageSets
from .loading import FA3_LIBRARY, file_of, vllm_module

# Enqueues a call on page set i; the output is [batch_size, num_q_heads, head_dim].
Run = Callable[[int], torch.Tensor]


@dataclass
class Tensors:
    """The arrays of a case's page sets, shared with CuPy, as the peers' kernels take them."""

    case: BenchCase
    folder: Path | None
    dtype: torch.dtype
    q: torch.Tensor  # [num_sets, batch_size, num_q_heads, head_dim]
    k: torch.Tensor
    v: torch.Tensor
    # [num_sets, batch_size, max_pages] int32; 0 past the last page: not every peer promises to leave that alone
    tables: torch.Tensor
    lens: torch.Tensor  # [batch_size] int32
    out: torch.Tensor  # as q

    @staticmethod
    def share(sets: PageSets, folder: Path | None) -> Tensors:
        """Without a copy, but for the tables."""
        case, dtype = sets.case, getattr(torch, sets.case.dtype)
        tables = torch.from_dlpack(sets.page_tables).clone()
        past = torch.arange(tables.shape[2]) >= torch.tensor(case.pages)[:, None]
        tables[:, past.to(tables.device)] = 0
        # As integers: bfloat16 has no name that both sides know.
        q, k, v, out = (
            torch.from_dlpack(x.view(f"int{8 * x.itemsize}")).view(dtype) for x in (sets.q, sets.k_cache, sets.v_cache, sets.out)
        )
        return Tensors(case, folder, dtype, q, k, v, tables, torch.from_dlpack(sets.context_lens), out)

    def need(self, **wanted: Any) -> None:
        """ValueError if the case has another value than the peer can take."""
        for name, value in wanted.items():
            if getattr(self.case, name) != value:
                raise ValueError(f"{name} {getattr(self.case, name)} is not for it")


def flashinfer(t: Tensors, tensor_cores: bool) -> Iterator[tuple[str, Run]]:
    """BatchDecodeWithPagedKVCacheWrapper, planned outside the timing, in the form for CUDA graphs and in the other."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

    case, cuda = t.case, {"device": t.q.device, "dtype": torch.int32}
    indptr = torch.tensor([0, *accumulate(case.pages)], dtype=torch.int32)
    last = torch.tensor([(length - 1) % case.page_size + 1 for length in case.context_lens], dtype=torch.int32)
    scratch = torch.zeros(512 << 20, dtype=torch.uint8, device=t.q.device)

    def run(wrappers: list[Any], i: int) -> torch.Tensor:
        return wrappers[i].run(t.q[i], (t.k, t.v), out=t.out[i])

    for graph in (True, False):
        wrappers = []
        for table in t.tables:
            indices = torch.cat([row[:pages] for row, pages in zip(table, case.pages, strict=True)])
            buffers = {"indptr": torch.empty(len(indptr), **cuda), "indices": torch.empty_like(indices),
                       "last_page_len": torch.empty(len(last), **cuda)}  # fmt: skip
            buffers = {f"paged_kv_{name}_buffer": buffer for name, buffer in buffers.items()} if graph else {}
            wrapper = Wrapper(scratch, case.layout, use_cuda_graph=graph, use_tensor_cores=tensor_cores, **buffers)
            wrapper.plan(
                indptr, indices, last, case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size,
                q_data_type=t.dtype, kv_data_type=t.dtype,
            )  # fmt: skip
            wrappers.append(wrapper)
        yield "graph plan" if graph else "plan", functools.partial(run, wrappers)


def flash_attention_3(t: Tensors) -> Iterator[tuple[str, Run]]:
    """FlashAttention-3 as vLLM builds and calls it, its schedule made beforehand and in the call."""
    t.need(layout="NHD")
    path = file_of(t.folder, FA3_LIBRARY, "vllm.vllm_flash_attn")
    torch.ops.load_library(str(path))
    ops, case, longest = torch.ops._vllm_fa3_C, t.case, max(t.case.context_lens)
    starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device=t.q.device)

    def run(i: int, schedule: torch.Tensor | None) -> torch.Tensor:
        new_kv_qv, rotary_and_batch, scales = (None, None, None), (None,) * 5, (None, None, None)
        return ops.fwd(
            t.q[i], t.k, t.v, *new_kv_qv, t.out[i], starts, None, None, None, t.lens, 1, longest, t.tables[i],
            *rotary_and_batch, *scales, case.sm_scale, False, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    schedule = ops.get_scheduler_metadata(
        case.batch_size, 1, longest, case.num_q_heads, case.num_kv_heads, case.head_dim, case.head_dim, t.dtype, t.lens,
        starts, None, None, None, None, case.page_size, 0, False, -1, -1, False, 0, None, 0,
    )  # fmt: skip
    yield "schedule given", lambda i: run(i, schedule)
    yield "schedule made", lambda i: run(i, None)


def vllm_triton(t: Tensors) -> Iterator[tuple[str, Run]]:
    """vLLM's two-stage Triton decode attention."""
    t.need(layout="NHD")
    case, decode = t.case, vllm_module(t.folder, "triton_decode_attention", torch.float8_e4m3fn).decode_attention_fwd
    lse, one = torch.empty(t.q.shape[1:3], device=t.q.device), torch.ones((), device=t.q.device)
    for splits in (4, 16, 64):
        partial = torch.empty(*t.q.shape[1:3], splits, case.head_dim + 1, device=t.q.device)

        def run(i: int, splits: int = splits, partial: torch.Tensor = partial) -> torch.Tensor:
            decode(
                t.q[i], t.k, t.v, t.out[i], lse, t.tables[i], t.lens, partial, splits, case.sm_scale, case.page_size,
                k_scale=one, v_scale=one,
            )  # fmt: skip
            return t.out[i]

        yield f"{splits} splits", run


def vllm_unified(t: Tensors) -> Iterator[tuple[str, Run]]:
    """vLLM's unified Triton attention, with the segments its backend asks for."""
    t.need(layout="NHD")
    case, attend = t.case, vllm_module(t.folder, "triton_unified_attention", torch.float8_e4m3fn).unified_attention
    starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device=t.q.device)
    threshold, segments = max(1, 128 // case.num_kv_heads), 16
    padded = 2 ** math.ceil(math.log2(case.head_dim))
    rows = (threshold, case.num_q_heads, segments)
    output, highest, total = (torch.empty(*rows, *extra, device=t.q.device) for extra in ((padded,), (), ()))

    def run(i: int) -> torch.Tensor:
        attend(
            t.q[i], t.k, t.v, t.out[i], starts, 1, t.lens, max(case.context_lens), case.sm_scale, True, (-1, -1), t.tables[i],
            0, None, None, None, seq_threshold_3D=threshold, num_par_softmax_segments=segments, softmax_segm_output=output,
            softmax_segm_max=highest, softmax_segm_expsum=total,
        )  # fmt: skip
        return t.out[i]

    yield f"{segments} segments", run


def cudnn_sdpa(t: Tensors) -> Iterator[tuple[str, Run]]:
    """PyTorch's SDPA on cuDNN, over copies of K and V that are not paged: [batch_size, num_kv_heads, context_len, head_dim]."""
    t.need(layout="NHD", context_lens=t.case.context_lens[:1] * t.case.batch_size)
    cuda, length = torch.backends.cuda, t.case.context_lens[0]
    cuda.enable_cudnn_sdp(True)
    for others in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp):
        others(False)
    copies = [
        [cache[table[:, : t.case.pages[0]].long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in (t.k, t.v)]
        for table in t.tables
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    yield "contiguous", lambda i: attend(t.q[i][:, :, None], *copies[i], enable_gqa=True)[:, :, 0]


PEERS: dict[str, Callable[[Tensors], Iterator[tuple[str, Run]]]] = {
    "FlashInfer CUDA-core": lambda t: flashinfer(t, False),
    "FlashInfer tensor-core": lambda t: flashinfer(t, True),
    "FlashAttention-3": flash_attention_3,
    "vLLM Triton": vllm_triton,
    "vLLM unified": vllm_unified,
    "cuDNN SDPA, contiguous": cudnn_sdpa,
}


@dataclass
class Results:
    """What one case's peers gave, by name."""

    us: dict[str, float] = field(default_factory=dict)
    apart_us: dict[str, float] = field(default_factory=dict)  # as timing.measure_apart; what lies between adds 1 to a number
    host_us: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)  # exact_fraction, rho
    variant: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def compare(
    sets: PageSets, folder: Path | None, names: Iterable[str], reference: accuracy.Reference | None = None, repeats: int = 20
) -> Results:
    """Checks and times the peers of these names on a case; the best variant of each counts. What fails is told, not raised."""
    results = Results()
    for name in names:
        try:
            _compare_one(name, Tensors.share(sets, folder), sets, results, reference, repeats)
        # A peer may raise whatever it likes.
        except Exception as error:
            results.errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        torch.cuda.empty_cache()
    return results


def _compare_one(
    name: str, t: Tensors, sets: PageSets, results: Results, reference: accuracy.Reference | None, repeats: int
) -> None:
    errors, number = [], torch.zeros(1, device="cuda")
    graph_us = lambda call: _graph_us(call, len(sets), repeats)
    for variant, run in PEERS[name](t):
        call = lambda i, run=run: _numpy(run(i))
        try:
            try:
                accuracy.check(sets, call)
            except accuracy.NotFiniteError:
                # It reads slots that are not the request's: told, and without their NaN it has another try.
                results.errors[name] = "reads NaN past context_lens; timed without them"
                for cache in (t.k, t.v):
                    torch.nan_to_num(cache, out=cache)
                accuracy.check(sets, call)
            us = graph_us(run)
        except Exception as error:
            errors.append(error)
            continue
        if us < results.us.get(name, math.inf):
            results.us[name], results.variant[name] = us, variant
            results.apart_us[name] = timing.apart(graph_us, run, lambda i: number.add_(1))
            results.host_us[name] = timing.host_us(run, len(sets), 100)
            if reference:
                results.accuracy[name] = reference.measure(sets, call)
    if name not in results.us:
        raise errors[0] if errors else ValueError("no variant of it ran")


def _numpy(out: torch.Tensor) -> Any:
    """The output on the host."""
    if out.dtype != torch.bfloat16:
        return out.cpu().numpy()
    import ml_dtypes

    return out.contiguous().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)


def _graph_us(run: Run, num_sets: int, repeats: int) -> float:
    """As timing.measure, through torch's own capture, which knows torch's allocator."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for event in (start, stop):
        for i in range(num_sets):
            run(i)
        event.record()
    torch.cuda.synchronize()
    calls = timing.nodes(num_sets, 1e3 * start.elapsed_time(stop))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(calls):
            run(n % num_sets)
    return timing.measure_replays(graph.replay, calls, repeats).us


def versions(folder: Path | None) -> dict[str, str]:
    """Versions of torch and of each peer's package; a loose file is named as such."""
    found = {"torch": torch.__version__}
    for package in ("flashinfer-python", "triton", "vllm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    found["cudnn"] = str(torch.backends.cudnn.version())
    if folder:
        found["loose files"] = ", ".join(sorted(path.name for path in folder.iterdir()))
    return found


def compile_flashinfer(words: list[str]) -> None:
    """Builds, side by side, the kernels that `flashinfer` above will load."""
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    specs = []
    for name, head_dim in zip(words[::2], map(int, words[1::2]), strict=True):
        kind = (*[getattr(torch, name)] * 3, torch.int32, head_dim, head_dim, 0, False, False)
        specs += [gen_batch_decode_module(*kind), gen_batch_prefill_module("fa2", *kind, False)]
    # Each in its own build folder, as loading does: its build_jit_specs keeps another log, and loading would compile anew.
    with ThreadPoolExecutor(len(specs)) as pool:
        list(pool.map(lambda spec: spec.build(need_lock=True), specs))


if __name__ == "__main__":
    compile_flashinfer(sys.argv[1:])
