"""What a run ran on: one probe, for reports, for results kept on disk and for the header of the tests."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cupy_kernels.host.build import CompilerNotFoundError, find_compiler

ROOT = Path(__file__).resolve().parents[1]
# What is worth keeping of a run.
RESULTS = Path(__file__).with_name("results")
DEVICES = ("auto", "cpu", "gpu")


@functools.cache
def no_gpu_reason() -> str | None:
    """Why nothing can run on a GPU here; None if it can."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    # Broken drivers raise whatever they like, and the reason is shown.
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {error}"
    return None if count else "no GPU: CuPy sees no device"


def choose_device(wanted: str) -> str:
    """`"cpu"` or `"gpu"` for one of `DEVICES`.

    Raises:
        ValueError: another word, or "gpu" where there is none.
    """
    if wanted not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {wanted!r}")
    reason = None if wanted == "cpu" else no_gpu_reason()
    if wanted == "gpu" and reason:
        raise ValueError(f"device: expected a GPU, got {reason}")
    return "cpu" if wanted == "cpu" or reason else "gpu"


def environment(device: str) -> dict[str, Any]:
    """Device, versions, commit and date of a run on `device` ("cpu" or "gpu"); None for what there is none of."""
    found: dict[str, Any] = {"device": describe_cpu(), "sms": None, "driver": None, "cuda": None, "cupy": None}
    if device == "gpu":
        import cupy

        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
        found = {
            "device": properties["name"].decode(),
            "sms": properties["multiProcessorCount"],
            "driver": driver_version(),
            "cuda": cuda_version(runtime.runtimeGetVersion()),
            "cupy": cupy.__version__,
        }
    return {
        **found,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "compiler": describe_compiler(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def keep(paths: Iterable[Path], found: dict[str, Any]) -> list[Path]:
    """Copies what a run in `environment` wrote to `RESULTS`, named by device and date; returns the copies."""
    name = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    RESULTS.mkdir(exist_ok=True)
    return [Path(shutil.copy(path, RESULTS / f"{path.stem}-{name}-{found['date'][:10]}{path.suffix}")) for path in paths]


def describe_cpu() -> str:
    """The stand-in's machine: the processor's name, or at least its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU stand-in ({names[0] if names else platform.processor() or platform.machine()})"


def describe_compiler() -> str | None:
    """The first line of `--version` of the compiler that builds kernels for NumPy arrays."""
    try:
        command = find_compiler()
    except CompilerNotFoundError:
        return None
    return _first_line([*command, "--version"])


def cuda_version(number: int) -> str:
    """13000 -> "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str | None:
    """The driver's own version number, which CUDA's interface does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(query) if shutil.which(query[0]) else None


def commit() -> str | None:
    """The checkout's commit, with "+" if something in it was changed since. Where git can't tell, `GIT_COMMIT` may."""
    if not shutil.which("git") or not (name := _first_line(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])):
        return os.environ.get("GIT_COMMIT")
    changed = _first_line(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{name}+" if changed else name


def _first_line(command: list[str]) -> str | None:
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].strip() or None
