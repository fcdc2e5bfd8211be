"""The CUDA driver's functions that CuPy has no call for, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

PROGRAMMATIC_STREAM_SERIALIZATION = 6
INVALID_CONTEXT = 201


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(name: str, code: int) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_ubyte * 64))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),  # of the grid x, y, z, of a block x, y, z, of dynamic shared memory in bytes
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def bind_launch(
    name: str, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Any, begins_early: bool
) -> Callable[[], None]:
    """A launch by cuLaunchKernelEx on the current device, whenever it is called, on CuPy's current stream there.

    Args:
        name: of the kernel, for errors.
        function: its CUfunction, of the current device.
        grid, threads, shared_bytes: sizes of the grid, of a block, of dynamic shared memory.
        arguments: a ctypes array of the addresses of the arguments.
        begins_early: the kernel waits by itself for what was launched before it, and so may begin before that has ended
            (programmatic dependent launch). A device that can't do this, below compute capability 9.0, takes no notice.

    Raises:
        RuntimeError: on the launch, with the driver's name of the error.
    """
    import cupy

    device = cupy.cuda.Device()
    config = Config(sizes=(*grid, threads, 1, 1, shared_bytes))
    if begins_early and int(device.compute_capability) >= 90:
        config.attributes = ctypes.pointer(Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,)))
        config.num_attributes = 1
    launch, current_stream, device_id = _library().cuLaunchKernelEx, cupy.cuda.get_current_stream, device.id
    call = ctypes.byref(config), ctypes.c_void_p(function), arguments, None

    def run() -> None:
        config.stream = current_stream(device_id).ptr
        code = launch(*call)
        if code == INVALID_CONTEXT:
            # The first use of CUDA in a thread. The runtime makes its device's context current.
            device.use()
            code = launch(*call)
        _check(name, code)

    return run
