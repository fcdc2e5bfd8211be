"""DecodePlan: the engine's path. Everything that depends on shapes is done once; a call checks, points and launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import as_array, dtype_name, on_device
from .decode import choose_cut, launches, outputs, takes_tensor_cores
from .jit import data_pointer
from .problem import check_problem

INPUTS = ("q", "k_cache", "v_cache", "page_table", "context_lens")


@dataclass(frozen=True)
class _Slot:
    """One array of the calls to come: what it has to be like, and where its address goes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    holder: ctypes.c_void_p

    def refuse(self, array: Any) -> None:
        """Raises for what differs from the plan."""
        if array.dtype != self.dtype:
            raise TypeError(f"{self.name}: expected dtype {self.dtype} as planned, got {array.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"{self.name}: expected shape {list(self.shape)} as planned, got {list(array.shape)}")
        if array.strides != self.strides:
            raise ValueError(f"{self.name}: expected strides of {self.strides} bytes as planned, got {array.strides}")


class DecodePlan:
    """`paged_decode` for many calls alike: same shapes, strides, dtypes and options, other arrays and contents.

    The plan owns the workspace. `run` allocates nothing if it is given outputs, does not wait for the device, and can be captured
    in a CUDA graph and replayed with changed `context_lens` and `page_table` contents; lengths that the table can't hold count as
    the most it can. Calls that may overlap, on two streams say, need a plan each.

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
        self._xp, self._ndarray = problem.xp, problem.xp.ndarray
        self._device = None if problem.xp is np else problem.q.device
        self._empty = (out.shape, out.dtype), (lse_out.shape, lse_out.dtype)
        # The tensor-core kernels read 16 bytes at a time.
        wide = 16 if takes_tensor_cores(problem) else 1
        self._slots = []
        for name, array in [*given.items(), ("out", out), ("lse_out", lse_out)]:
            if self._launches:
                launch = self._launches[0 if name in given else -1]
                holder = launch.release({"out": "o", "lse_out": "lse"}.get(name, name))
            else:
                holder = ctypes.c_void_p()
            alignment = max(array.itemsize, wide if name in INPUTS[:3] else 1)
            self._slots.append(_Slot(name, array.dtype, array.shape, array.strides, alignment, holder))

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
        xp, ndarray = self._xp, self._ndarray
        if self._device is not None and xp.cuda.runtime.getDevice() != self._device.id:
            with self._device:
                return self.run(q, k_cache, v_cache, page_table, context_lens, out=out, lse_out=lse_out)
        if out is None:
            out = xp.empty(*self._empty[0])
        if lse_out is None:
            lse_out = xp.empty(*self._empty[1])
        addresses = []
        for slot, array in zip(self._slots, (q, k_cache, v_cache, page_table, context_lens, out, lse_out), strict=True):
            if type(array) is not ndarray:
                array = as_array(slot.name, array)
                if not isinstance(array, ndarray):
                    raise TypeError(f"{slot.name}: expected a {xp.__name__} array as planned, got {type(array).__module__}'s")
            if array.shape != slot.shape or array.strides != slot.strides or array.dtype != slot.dtype:
                slot.refuse(array)
            address = data_pointer(array)
            if address % slot.alignment:
                raise ValueError(f"{slot.name}: expected memory aligned to {slot.alignment} bytes as planned, got {address:#x}")
            addresses.append(address)
        for slot, address in zip(self._slots, addresses, strict=True):
            slot.holder.value = address
        for launch in self._launches:
            launch()
        return out, lse_out
