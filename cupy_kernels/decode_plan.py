"""DecodePlan: the engine's path. Everything that depends on shapes is done once; a call checks, points and launches."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .arrays import as_array, dtype_name, on_device
from .decode import choose_cut, launches, outputs, takes_tensor_cores
from .problem import check_problem

INPUTS = ("q", "k_cache", "v_cache", "page_table", "context_lens")


@dataclass(frozen=True)
class _Slot:
    """One array of the calls to come: what it has to be like."""

    name: str
    xp: ModuleType
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    def admit(self, value: Any) -> Any:
        """The value as an array of CuPy or NumPy, as planned; raises for what differs from the plan."""
        array = as_array(self.name, value)
        if not isinstance(array, self.xp.ndarray):
            raise TypeError(f"{self.name}: expected a {self.xp.__name__} array as planned, got {type(array).__module__}'s")
        if array.dtype != self.dtype:
            raise TypeError(f"{self.name}: expected dtype {self.dtype} as planned, got {array.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"{self.name}: expected shape {list(self.shape)} as planned, got {list(array.shape)}")
        if array.strides != self.strides:
            raise ValueError(f"{self.name}: expected strides of {self.strides} bytes as planned, got {array.strides}")
        return array

    def check_address(self, address: int) -> None:
        """Raises if vector loads could not begin there."""
        if address % self.alignment:
            raise ValueError(f"{self.name}: expected memory aligned to {self.alignment} bytes as planned, got {address:#x}")


class DecodePlan:
    """`paged_decode` for many calls alike: same shapes, strides, dtypes and options, other arrays and contents.

    The plan owns the workspace. `run` allocates nothing if it is given outputs, does not wait for the device, and can be captured
    in a CUDA graph and replayed with changed `context_lens` and `page_table` contents; lengths that the table can't hold count as
    the most it can. Calls that may overlap, on two streams say, need a plan each. From compute capability 9.0 on a call begins
    before the launch in front of it has ended; it may find all its arrays changed by that one, and goes by what they hold then.

    Args:
        q, k_cache, v_cache, page_table, context_lens: as `paged_decode`: arrays like those of the calls to come. They are
            neither read nor kept.
        sm_scale, layout, schedule, num_splits, pages_per_split, window, softcap, sinks, alibi_slopes, k_scale, v_scale, kv_dtype,
            lse_base, partial_dtype, out_dtype: as `paged_decode`, fixed for all calls.
        out, lse_out: outputs like those of the calls to come, where those are not contiguous.

    Raises:
        TypeError, ValueError, NotImplementedError: as `paged_decode`.
    """

    def __init__(
        self, q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, sm_scale: float | None = None,
        layout: str = "NHD", schedule: str | None = None, num_splits: int | None = None, pages_per_split: int | None = None,
        window: int | None = None, softcap: float | None = None, sinks: Any = None, alibi_slopes: Any = None,
        k_scale: float = 1.0, v_scale: float = 1.0, kv_dtype: str | None = None, lse_base: str = "e",
        partial_dtype: Any = "float32", out: Any = None, lse_out: Any = None, out_dtype: Any = None,
    ) -> None:  # fmt: skip
        arrays = (q, k_cache, v_cache, page_table, context_lens)
        given = {name: as_array(name, array) for name, array in zip(INPUTS, arrays, strict=True)}
        problem = check_problem(
            **given, sm_scale=sm_scale, layout=layout, lse_base=lse_base, check_values=False,
            not_yet={"window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
                     "k_scale": k_scale, "v_scale": v_scale, "kv_dtype": kv_dtype},
        )  # fmt: skip
        cut = choose_cut(problem, schedule, num_splits, pages_per_split, dtype_name("partial_dtype", partial_dtype))
        with on_device(problem.q):
            out, lse_out = outputs(problem, (problem.num_q_heads,), out, lse_out, out_dtype)
            self._launches = launches(problem, cut, out, lse_out)
        self._xp = problem.xp
        self._device: Any = None if problem.xp is np else problem.q.device
        self._device_id = None if self._device is None else self._device.id
        self._current_device = (lambda: None) if self._device is None else self._xp.cuda.runtime.getDevice
        self._empty = (out.shape, out.dtype), (lse_out.shape, lse_out.dtype)
        # The tensor-core kernels read 16 bytes at a time.
        wide = 16 if takes_tensor_cores(problem) else 1
        planned = {**given, "out": out, "lse_out": lse_out}
        self._slots = [
            _Slot(name, self._xp, x.dtype, x.shape, x.strides, max(x.itemsize, wide if name in INPUTS[:3] else 1))
            for name, x in planned.items()
        ]
        self._alignments = [slot.alignment for slot in self._slots]
        self._look = _quick_look(list(planned.values()))
        self._seen = [self._look(array) for array in planned.values()]
        self._address_of = operator.attrgetter("ctypes.data" if self._device is None else "data.ptr")
        self._addresses = (ctypes.c_void_p * len(planned))()
        for i, name in enumerate(planned if self._launches else ()):
            launch = self._launches[0 if name in given else -1]
            holder = ctypes.c_void_p.from_buffer(self._addresses, i * ctypes.sizeof(ctypes.c_void_p))
            launch.release({"out": "o", "lse_out": "lse"}.get(name, name), holder)

    def run(
        self, q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, out: Any = None, lse_out: Any = None
    ) -> tuple[Any, Any]:
        """One call, on the current stream of CuPy; see `paged_decode` for what the arrays are.

        Args:
            q, k_cache, v_cache, page_table, context_lens: as planned in dtype, shape, strides, device.
            out: [batch_size, num_q_heads, head_dim] to write to; None makes a new array.
            lse_out: [batch_size, num_q_heads] float32 to write to; None makes a new array.

        Returns:
            out and lse.

        Raises:
            TypeError, ValueError: an array that the plan was not made for. Nothing has been launched or written then.
        """
        if self._current_device() != self._device_id:
            with self._device:
                return self.run(q, k_cache, v_cache, page_table, context_lens, out=out, lse_out=lse_out)
        if out is None:
            out = self._xp.empty(*self._empty[0])
        if lse_out is None:
            lse_out = self._xp.empty(*self._empty[1])
        arrays: Any = (q, k_cache, v_cache, page_table, context_lens, out, lse_out)
        try:
            as_planned = list(map(self._look, arrays)) == self._seen
        except AttributeError:
            as_planned = False
        if not as_planned:
            arrays = [slot.admit(array) for slot, array in zip(self._slots, arrays, strict=True)]
        addresses = list(map(self._address_of, arrays))
        if any(map(operator.mod, addresses, self._alignments)):
            for slot, address in zip(self._slots, addresses, strict=True):
                slot.check_address(address)
        self._addresses[:] = addresses
        for launch in self._launches:
            launch()
        return out, lse_out


def _quick_look(planned: list[Any]) -> Callable[[Any], Any]:
    """What tells arrays like the planned ones from all others, in a fraction of a microsecond each.

    CuPy (14.2) makes a list and a tuple of it for each look at a shape or at strides; the list alone takes half as long, and of
    contiguous arrays the shape says all. No other class has these attributes.
    """
    if not hasattr(planned[0], "_shape"):
        return operator.attrgetter("__class__", "dtype", "shape", "strides")
    contiguous = all(array.flags.c_contiguous for array in planned)
    return operator.attrgetter("dtype", "_shape", "_c_contiguous" if contiguous else "_strides")
