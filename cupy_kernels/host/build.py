"""Builds kernel text with the machine's C++ compiler against the CPU stand-in for the CUDA language, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HEADERS = Path(__file__).parent
# _FORTIFY_SOURCE aborts on a longjmp to another stack, which is how fibers take turns. Contraction is off so that the bits do not
# depend on the compiler's mood; where the kernels want a fused multiply-add they say fmaf.
# -O1: what threads wait for takes the time, and -O2 compiles longer than it saves.
FLAGS = ("-std=c++17 -O1 -shared -fPIC -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=0 -ffp-contract=off -fno-strict-aliasing -w").split()
SANITIZER_FLAGS = "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined".split()


class CompilerNotFoundError(RuntimeError):
    """No C++ compiler was found for NumPy arrays."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: `CUPY_KERNELS_CACHE_DIR`, else `cupy_kernels` in the user's cache folder."""
    if chosen := os.environ.get("CUPY_KERNELS_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupy_kernels"


def find_compiler() -> list[str]:
    """The C++ compiler as a command: `CXX`, then c++, g++, clang++, then the ziglang wheel.

    Raises:
        CompilerNotFoundError: none of these exists.
    """
    if chosen := os.environ.get("CXX"):
        command = chosen.split()
        if shutil.which(command[0]) is None:
            raise CompilerNotFoundError(f"CXX: expected a C++ compiler, got {chosen!r}, which is not on the PATH")
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise CompilerNotFoundError(
        "NumPy arrays need a C++ compiler: expected CXX, c++, g++, clang++ or the ziglang wheel, got none. "
        "Install one (Debian: apt install g++; anywhere: pip install ziglang), or pass CuPy arrays."
    )


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"the C++ compiler failed: {' '.join(command)}\n{result.stderr}")
    return result.stdout


@functools.cache
def _compiler() -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """The compiler, its version, and flags for the half conversions and fmaf of this CPU: in software both crawl."""
    command = find_compiler()
    features: tuple[str, ...] = ()
    if platform.machine() in ("x86_64", "AMD64") and Path("/proc/cpuinfo").exists():
        has = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
        if {"f16c", "fma", "avx2"} <= has:
            features = ("-mf16c", "-mfma", "-mavx2")
    return tuple(command), _run([*command, "--version"]), features


@functools.cache
def _headers() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(HEADERS.glob("*.h")) + sorted(HEADERS.glob("*.cuh"))}


def build(source: str, entry_points: tuple[str, ...], defines: tuple[str, ...], sanitize: bool = False) -> Path:
    """Compiles kernel text to a shared library, or finds it in the cache.

    Args:
        source: CUDA text, includes of this project's headers already expanded.
        entry_points: its `extern "C" __global__` functions; each gets a launcher `launch_<name>`.
        defines: `-D` options.
        sanitize: with AddressSanitizer and UBSan; the loading process must have libasan preloaded.

    Returns:
        The library. The key of the cache holds all that decides its contents: text, headers, options, compiler, CPU flags.

    Raises:
        CompilerNotFoundError: no C++ compiler.
        RuntimeError: the text does not compile; the compiler's words are in the message.
    """
    command, version, features = _compiler()
    in_layers = "true" if "#define WAITS_FOR_EARLIER_BLOCKS" in source else "false"
    launchers = "".join(
        f'extern "C" int launch_{name}'
        "(const unsigned* grid, unsigned threads, unsigned shared_bytes, void** arguments, uint64_t seed) {\n"
        f"    return cuda::launch({name}, grid, threads, shared_bytes, arguments, seed, {in_layers});\n}}\n"
        for name in entry_points
    )
    text = f'#include "cuda.h"\n{source}\n{launchers}'
    flags = [*FLAGS, *(SANITIZER_FLAGS if sanitize else ()), *features, *defines]
    key = hashlib.sha256(repr((text, _headers(), flags, command, version, platform.machine())).encode()).hexdigest()
    library = cache_dir() / f"{entry_points[0]}-{key[:32]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            cpp, built = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
            cpp.write_text(text)
            _run([*command, *flags, f"-I{HEADERS}", str(cpp), "-o", str(built)])
            # Renamed into place: another process never sees half a library.
            built.replace(library)
    return library


@functools.cache
def load(source: str, entry_points: tuple[str, ...], defines: tuple[str, ...], sanitize: bool = False) -> ctypes.CDLL:
    """`build`, loaded into this process."""
    return ctypes.CDLL(str(build(source, entry_points, defines, sanitize)))
