"""Where the peers' kernels come from: installed packages, loose files of a folder, FlashInfer's compiler in the background."""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import lzma
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cases import BenchCase

OPS = "vllm.v1.attention.ops"
FA3_LIBRARY = "_vllm_fa3_C.abi3.so"
COMPILE_SECONDS = 270


def find_package(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a package; None if it is not installed, a folder that only bears its name, or a stand-in made here."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec if spec and spec.origin else None


def file_of(folder: Path | None, name: str, package: str) -> Path:
    """A peer's file: loose in the folder, maybe packed as .xz, or in its installed package. FileNotFoundError if in neither."""
    if folder:
        if not (folder / name).exists() and (packed := folder / f"{name}.xz").exists():
            (folder / name).write_bytes(lzma.decompress(packed.read_bytes()))
        if (folder / name).exists():
            return folder / name
    spec = find_package(package)
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / name).exists():
            return Path(place) / name
    raise FileNotFoundError(f"{name}: not in --peers-dir, and {package} is not installed")


def vllm_module(folder: Path | None, name: str, fp8: Any) -> Any:
    """A module of vLLM's Triton kernels: from the package, or a loose file over stand-ins for what it imports of the package.

    `fp8`: the dtype that the kernels ask the platform for.
    """
    full = f"{OPS}.{name}"
    if full in sys.modules:
        return sys.modules[full]
    if find_package("vllm"):
        return importlib.import_module(full)
    _stand_in_for_vllm(fp8)
    if name == "triton_unified_attention":
        vllm_module(folder, "triton_attention_helpers", fp8)
    spec = importlib.util.spec_from_file_location(full, file_of(folder, f"{name}.py", OPS))
    assert spec is not None
    assert spec.loader is not None
    # Triton looks a kernel's module up by name.
    loaded = sys.modules[full] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[full]
        raise
    return loaded


def _stand_in_for_vllm(fp8: Any) -> None:
    import triton
    import triton.language

    modes = enum.IntEnum("KVQuantMode", "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD NVFP4", start=0)  # type: ignore[misc]
    platform = types.SimpleNamespace(is_rocm=lambda: False, fp8_dtype=lambda: fp8)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.v1": {}, "vllm.v1.attention": {}, OPS: {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda _: types.SimpleNamespace()},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": modes},
    }  # fmt: skip
    for module, content in contents.items():
        if module not in sys.modules:
            sys.modules[module] = types.ModuleType(module)
            vars(sys.modules[module]).update(content)
            parent, _, child = module.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[module])


def start_compiling(cases: Iterable[BenchCase]) -> subprocess.Popen[str] | None:
    """Compiles FlashInfer's kernels for these cases in a process of its own; None where FlashInfer is not installed."""
    if not find_package("flashinfer"):
        return None
    import cupy

    number = cupy.cuda.Device().compute_capability
    suffix = "a" if int(number) >= 90 else ""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{number[:-1]}.{number[-1]}{suffix}")
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 2) // 2)))
    kinds = sorted({(case.dtype, str(case.head_dim)) for case in cases})
    command = [sys.executable, "-m", "bench.peers", *(word for kind in kinds for word in kind)]
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish_compiling(process: subprocess.Popen[str], seconds: float = COMPILE_SECONDS) -> str | None:
    """Waits; None if all was compiled, else what went wrong. No process is left behind."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The session that start_compiling gave it: ninja and the compilers with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"compiling its kernels took more than {seconds:.0f} s"
    return None if process.returncode == 0 else f"its kernels could not be compiled: {' '.join(output.split())[-600:]}"
