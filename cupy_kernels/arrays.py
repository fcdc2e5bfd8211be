"""Arrays as they come in (NumPy, CuPy, or what speaks DLPack or `__cuda_array_interface__`), and the checks all calls share."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from .jit import C_TYPES, data_pointer

FLOAT_DTYPES = tuple(C_TYPES)
_CPU, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLPack device types


def require_cupy() -> ModuleType:
    """CuPy, or an ImportError that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "arrays on a GPU need CuPy: pip install 'cupy-kernels[cuda13x]' (CUDA 13) or 'cupy-kernels[cuda12x]' (CUDA 12)"
        ) from error
    return cupy


def array_module(array: Any) -> ModuleType:
    """`numpy` or `cupy`, whose array this is."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def on_device(array: Any) -> AbstractContextManager[Any]:
    """Makes the array's device the current one: what is allocated and launched within goes there."""
    return nullcontext() if isinstance(array, np.ndarray) else array.device


def as_array(name: str, value: Any) -> Any:
    """The value as a NumPy or CuPy array that shares its memory.

    Raises:
        TypeError: it is no array, or lies on a device that is neither CPU nor CUDA.
        ImportError: it lies on a GPU, and CuPy is missing.
    """
    if isinstance(value, np.ndarray):
        return value
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return value
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        kind = int(value.__dlpack_device__()[0])
        if kind == _CPU:
            return np.from_dlpack(value)
        if kind in (_CUDA, _CUDA_MANAGED):
            return require_cupy().from_dlpack(value)
        raise TypeError(f"{name}: expected an array on a CPU or a CUDA device, got DLPack device type {kind}")
    if hasattr(value, "__cuda_array_interface__"):
        return require_cupy().asarray(value)
    raise TypeError(f"{name}: expected a NumPy, CuPy or DLPack array, got {type(value).__name__}")


def check_array(name: str, array: Any, like: Any, dtypes: tuple[str, ...], shape: tuple[int | str, ...]) -> None:
    """Checks one array: on the device of `like`, of one of these dtypes, of this shape (a string names a size that is free).

    Raises:
        TypeError: another array module or dtype.
        ValueError: another device, shape, an axis whose stride is no whole number of elements, or misaligned memory.
    """
    xp, here = array_module(like), array_module(array)
    if here is not xp:
        raise TypeError(f"{name}: expected a {xp.__name__} array as the first argument is, got a {here.__name__} array")
    if xp is not np and array.device != like.device:
        raise ValueError(f"{name}: expected device {like.device.id}, got device {array.device.id}")
    if str(array.dtype) not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {array.dtype}")
    if array.ndim != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, array.shape, strict=False)):
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(array.shape)}")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"{name}: expected strides in whole elements, got {array.strides} bytes")
    if data_pointer(array) % array.itemsize:
        raise ValueError(f"{name}: expected memory aligned to {array.itemsize} bytes, got an odd address")


def check_unit_stride(name: str, array: Any) -> None:
    """The last axis must be contiguous: kernels walk it by one."""
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ValueError(f"{name}: expected unit stride on the last axis, got {array.strides[-1] // array.itemsize}")


def check_output(name: str, array: Any) -> None:
    """An output must be writeable, and no element of it may stand for another."""
    if array_module(array) is np and not array.flags.writeable:
        raise ValueError(f"{name}: expected a writeable array, got a read-only one")
    # From the smallest stride up, each axis has to step over all that the smaller ones reach.
    reach = array.itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(array.shape, array.strides, strict=True) if n > 1):
        if array.size and stride < reach:
            raise ValueError(f"{name}: expected every element in a place of its own, got strides {array.strides} bytes")
        reach += stride * (n - 1)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """A keyword that takes one of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def check_int(name: str, value: Any, least: int, most: int) -> int:
    """An integer in [least, most]; a bool is none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}")
    return int(value)


def dtype_name(name: str, value: Any, choices: tuple[str, ...] = FLOAT_DTYPES) -> str:
    """A dtype given as a name, a NumPy dtype or a scalar type, as its name."""
    try:
        found = value if isinstance(value, str) else str(np.dtype(value))
    except TypeError:
        raise TypeError(f"{name}: expected a dtype, got {value!r}") from None
    if found not in choices:
        raise TypeError(f"{name}: expected {' or '.join(choices)}, got {found}")
    return found


def element_strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


def strides(name: str, array: Any, *axes: str) -> dict[str, int]:
    """Strides in elements under a kernel's names for them: `<name>_<axis>_stride`, or `<name>_stride` for an axis of no name."""
    parts = ("_".join(filter(None, (name, axis, "stride"))) for axis in axes)
    return dict(zip(parts, element_strides(array), strict=False))
