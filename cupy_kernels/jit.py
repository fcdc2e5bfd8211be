"""Kernel text plus constants -> a compiled kernel, its arguments checked, launched on the GPU or the CPU.

The one place where anything is launched. RawKernel checks no argument, passes a Python float as a double and ignores strides;
so each call is checked here against the parameter list that the kernel's own text declares, and scalars are cast to its types.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from . import driver
from .host import build

KERNELS = Path(__file__).parent / "kernels"
OPTIONS = ("--std=c++17",)
# Shared memory of a block, static and dynamic together, beyond which a kernel has to ask.
UNASKED_SHARED_BYTES = 48 << 10

C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
DTYPES = {
    "__half": np.dtype(np.float16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float": np.dtype(np.float32),
    "int": np.dtype(np.int32),
    "unsigned": np.dtype(np.uint32),
    "bool": np.dtype(np.bool_),
    "long long": np.dtype(np.int64),
}
_SCALARS = {"float": ctypes.c_float, "int": ctypes.c_int, "unsigned": ctypes.c_uint, "long long": ctypes.c_longlong}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, as its text declares it."""

    name: str
    c_type: str  # element type of a pointer, or the scalar's type, constants resolved
    pointer: bool
    nullable: bool  # its comment says "or null"


# Replacements of kernel text, (file, old, new) each; see `patched`.
Patches = tuple[tuple[str, str, str], ...]


@functools.cache
def read_source(name: str, for_cpu: bool = False, patches: Patches = ()) -> str:
    """The text of `kernels/<name>` with the project's own includes expanded, so that a cache key made of it holds everything.

    On the CPU, `host/ptx.cuh` takes the place of `kernels/ptx.cuh`.

    Raises:
        ValueError: a patch whose old text does not stand exactly once in its file.
    """

    def expand(file: str, seen: set[str]) -> str:
        if file in seen:
            return ""
        seen.add(file)
        stand_in = build.HEADERS / file
        text = (stand_in if for_cpu and stand_in.exists() else KERNELS / file).read_text()
        for patched_file, old, new in patches:
            if patched_file == file:
                if text.count(old) != 1:
                    raise ValueError(f"{file}: expected {old!r} once, got it {text.count(old)} times")
                text = text.replace(old, new)
        return re.sub(r'^#include "([^"]+)"\n', lambda found: expand(found[1], seen), text, flags=re.MULTILINE)

    return expand(name, set())


def parse_parameters(source: str, constants: Mapping[str, Any]) -> dict[str, tuple[Parameter, ...]]:
    """Every `extern "C" __global__` function of the text and its parameters, one a line, each with its comment."""
    kernels = {}
    for found in re.finditer(
        r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(\n(.*?)\)\s*\{', source, re.DOTALL
    ):
        parameters = []
        for line in found[2].splitlines():
            declaration, _, comment = line.partition("//")
            declaration = declaration.strip().rstrip(",")
            if not declaration:
                continue
            parsed = re.fullmatch(r"(?:const )?([\w ]+?)(\*)?(?: __restrict__)? (\w+)", declaration)
            if parsed is None:
                raise ValueError(f"{found[1]}: expected one parameter a line, got {line.strip()!r}")
            c_type = str(constants.get(parsed[1], parsed[1]))
            parameters.append(Parameter(parsed[3], c_type, bool(parsed[2]), "or null" in comment))
        kernels[found[1]] = tuple(parameters)
    return kernels


class Kernel:
    """One entry point of a kernel text, specialised by constants; compiled on first use, for the device it is used on.

    Args:
        source: a file of `kernels/`.
        name: the entry point.
        constants: `-D` values. A dtype name ("float16", "bfloat16", "float32") stands for its C type.
    """

    def __init__(self, source: str, name: str, constants: Mapping[str, Any]) -> None:
        self.source, self.name = source, name
        self.constants = {key: C_TYPES.get(value, value) for key, value in constants.items()}
        self.defines = tuple(f"-D{key}={value}" for key, value in sorted(self.constants.items()))
        self.patches: Patches = _settings["patches"]
        text = read_source(source, patches=self.patches)
        self.kernels = parse_parameters(text, self.constants)
        # Only a kernel that waits by itself may be launched before the one in front of it has ended.
        self.waits = "wait_for_previous_launch();" in text
        self.parameters = self.kernels[name]
        self._device_kernels: dict[int, tuple[Any, int]] = {}  # and the dynamic shared memory it may use

    def check(self, xp: ModuleType, arguments: Mapping[str, Any]) -> list[Any]:
        """Arguments in the kernel's order, arrays as they are, scalars as ctypes or NumPy scalars of the declared type.

        Raises:
            TypeError: a missing or unknown argument, an array of another module or dtype, a scalar of another kind.
            ValueError: an integer out of its type's range.
        """
        names = [parameter.name for parameter in self.parameters]
        if set(arguments) != set(names):
            odd = sorted(set(arguments) ^ set(names))
            raise TypeError(f"{self.name}: expected arguments {', '.join(names)}, got a difference in {', '.join(odd)}")
        return [self._check_one(parameter, arguments[parameter.name], xp) for parameter in self.parameters]

    def _check_one(self, parameter: Parameter, value: Any, xp: ModuleType) -> Any:
        where, dtype = f"{self.name}.{parameter.name}", DTYPES[parameter.c_type]
        if parameter.pointer:
            if value is None and parameter.nullable:
                return None
            if not isinstance(value, xp.ndarray):
                raise TypeError(f"{where}: expected a {xp.__name__} array, got {type(value).__name__}")
            if value.dtype != dtype:
                raise TypeError(f"{where}: expected dtype {dtype}, got {value.dtype}")
            return value
        if dtype.kind == "f":
            return np.float32(value)
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"{where}: expected an integer, got {type(value).__name__}")
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise ValueError(f"{where}: expected {limits.min} to {limits.max}, got {value}")
        return dtype.type(value)

    def __call__(self, xp: ModuleType, grid: tuple[int, int, int], threads: int, shared_bytes: int, **arguments: Any) -> None:
        """Launches once: `bind`, then the launch."""
        self.bind(xp, grid, threads, shared_bytes, **arguments)()

    def bind(self, xp: ModuleType, grid: tuple[int, int, int], threads: int, shared_bytes: int, **arguments: Any) -> Launch:
        """A launch with its arguments checked, to be made any number of times on the current device."""
        return Launch(self, xp, grid, threads, shared_bytes, self.check(xp, arguments))

    def on_cpu(self, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Any) -> Callable[[], None]:
        """A launch on the CPU, of an array of the arguments' addresses."""
        source = read_source(self.source, for_cpu=True, patches=self.patches)
        library = build.load(source, tuple(self.kernels), self.defines, _settings["sanitize"])
        function = library[f"launch_{self.name}"]
        sizes = (ctypes.c_uint * 3)(*grid), ctypes.c_uint(threads), ctypes.c_uint(shared_bytes)

        def run() -> None:
            if function(*sizes, arguments, ctypes.c_uint64(_settings["seed"])) != 0:
                raise RuntimeError(f"{self.name}: a block deadlocked: some of its threads wait for others that never come")

        return run

    def on_gpu(self, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Any) -> Callable[[], None]:
        """A launch on the current device, of an array of the arguments' addresses."""
        function = self._compiled(shared_bytes).kernel.ptr
        return driver.bind_launch(self.name, function, grid, threads, shared_bytes, arguments, self.waits)

    def _compiled(self, shared_bytes: int) -> Any:
        import cupy

        device = cupy.cuda.Device().id
        kernel, granted = self._device_kernels.get(device, (None, 0))
        if kernel is None:
            kernel = cupy.RawKernel(read_source(self.source, patches=self.patches), self.name, OPTIONS + self.defines)
            granted = UNASKED_SHARED_BYTES - kernel.shared_size_bytes
        if shared_bytes > granted:
            kernel.max_dynamic_shared_size_bytes = granted = shared_bytes
        self._device_kernels[device] = kernel, granted
        return kernel


class Launch:
    """A kernel with its grid and arguments, ready to go. Arrays may be exchanged for others like them between launches."""

    def __init__(
        self, kernel: Kernel, xp: ModuleType, grid: tuple[int, int, int], threads: int, shared_bytes: int, values: list[Any]
    ) -> None:
        # The arrays live at least as long as their addresses here.
        self._kept = {
            parameter.name: value for parameter, value in zip(kernel.parameters, values, strict=True) if parameter.pointer
        }
        self._held: dict[str, Any] = {}
        for parameter, value in zip(kernel.parameters, values, strict=True):
            if parameter.pointer:
                held: Any = ctypes.c_void_p(None if value is None else data_pointer(value))
            else:
                held = _SCALARS[parameter.c_type](value.item())
            self._held[parameter.name] = held
        self._arguments = (ctypes.c_void_p * len(self._held))(*map(ctypes.addressof, self._held.values()))
        bind = kernel.on_cpu if xp is np else kernel.on_gpu
        # A grid without blocks launches nothing.
        self._run = (lambda: None) if 0 in grid else bind(grid, threads, shared_bytes, self._arguments)

    def release(self, name: str, holder: ctypes.c_void_p) -> None:
        """Lets go of an array. Before a further launch, the value of `holder` has to be the address of another one, of the same
        dtype and strides, which the caller keeps alive."""
        self._kept.pop(name)
        self._arguments[list(self._held).index(name)] = ctypes.addressof(holder)
        self._held[name] = holder

    def __call__(self) -> None:
        """On the current stream of CuPy, or the CPU."""
        self._run()


def data_pointer(array: Any) -> int:
    """The address of the first element of a NumPy or CuPy array."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


_settings: dict[str, Any] = {"seed": 0, "sanitize": False, "readable": False, "patches": ()}


@contextlib.contextmanager
def settings(**changes: Any) -> Iterator[None]:
    """For tests and the harness: these settings within the block, the others as they are.

    Args:
        seed: on the CPU, shuffles the order in which threads and blocks take turns; 0 keeps the natural order.
        sanitize: on the CPU, builds with AddressSanitizer and UBSan.
        readable: takes the readable kernels also where tensor cores could: a second opinion.
        patches: faults planted in the kernels' text, (file, old text, new text) each; the old text must stand there exactly once.
    """
    if unknown := set(changes) - set(_settings):
        raise TypeError(f"settings: expected {', '.join(_settings)}, got {', '.join(sorted(unknown))}")
    if "patches" in changes:
        changes["patches"] = tuple(changes["patches"])
    previous = dict(_settings)
    _settings.update(changes)
    try:
        yield
    finally:
        _settings.update(previous)


def wants_readable() -> bool:
    """Whether `settings(readable=True)` holds."""
    return bool(_settings["readable"])


def kernel(source: str, name: str, **constants: Any) -> Kernel:
    """The `Kernel` of these constants, made once."""
    return _kernel(source, name, tuple(sorted(constants.items())), _settings["patches"])


@functools.cache
def _kernel(source: str, name: str, constants: tuple[tuple[str, Any], ...], patches: Patches) -> Kernel:
    return Kernel(source, name, dict(constants))
