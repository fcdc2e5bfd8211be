"""The kernels under test: what they do to their numbers, and their outputs for a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_kernels import jit, merge_states, paged_decode, split_decode, tensor_core
from cupy_kernels.decode import choose_cut, plan_grid, takes_tensor_cores
from cupy_kernels.problem import NOT_YET, check_problem

from . import hardware
from .arithmetic import DTYPES, Arithmetic, Order
from .budget import default_orders
from .cases import Case
from .descriptions import balanced_orders
from .inputs import Inputs

State = tuple[np.ndarray, np.ndarray]
# Schedules whose partial states can be looked at, and merged by hand.
TWO_PASSES = ("uniform", "fixed")


def arithmetic(case: Case, device_name: str | None = None) -> Arithmetic:
    """What the kernels do to the numbers of a case, with the device's measured function errors if there are any."""
    measured: dict[str, Any] = hardware.measured(device_name) if device_name else {}
    return replace(case.arithmetic(), **measured)


@dataclass(frozen=True)
class Outputs:
    """What the kernels made of one case, on the host; every output was full of NaN before."""

    # out [batch_size, num_q_heads, head_dim] and lse [batch_size, num_q_heads]
    decode: State
    # o [batch_size, num_q_heads, num_splits, head_dim] and lse, where the schedule has partial states
    partial: State | None
    # the merge of these states by each algorithm
    merged: dict[str, State]
    # the decode again: in other orders of threads on the CPU, and from a pool whose pages lie elsewhere
    again: list[State]
    # splits per request where the cut is one, the grid where it is into shares
    num_splits: int
    grid: tensor_core.Grid | None


def orders(case: Case, inputs: Inputs, made: Outputs, how: Arithmetic) -> list[Order]:
    """The order in which each request's tokens were taken, empty splits included: those that other requests need."""
    if made.grid is not None:
        return balanced_orders(inputs.context_lens.tolist(), inputs.page_size, made.grid)
    splits = case.splits() if case.schedule == "fixed" else {"num_splits": made.num_splits}
    # "fixed" rounds to the partial's dtype and merges even a single split.
    least = 2 if case.schedule == "fixed" and case.partial_dtype != "float32" else 1
    return [order + [[]] * (max(made.num_splits, least) - len(order)) for order in default_orders(inputs, how, **splits)]


def outputs(case: Case, inputs: Inputs, device: str, *, repeats: int = 1, patches: jit.Patches = ()) -> Outputs:
    """Runs the kernels on `device` ("cpu" or "gpu").

    Args:
        repeats: decodes of the same call again, and besides them one of permuted pages.
        patches: faults to plant, see `cupy_kernels.jit.settings`.
    """
    xp: Any = np
    if device == "gpu":
        import cupy as xp  # type: ignore[no-redef]
    to_host = lambda arrays: tuple(x if xp is np else xp.asnumpy(x) for x in arrays)
    arguments = on_device(inputs, xp)
    readable = case.kernel == "readable"
    with jit.settings(patches=patches, readable=readable):
        num_splits, grid = plan(case, arguments)
        first = to_host(_decode(case, arguments, xp))
        again = [to_host(_decode(case, on_device(permuted(inputs), xp), xp))]
        partial, merged = None, {}
        if case.schedule in TWO_PASSES:
            states = _partial(case, arguments, xp)
            partial = to_host(states)
            for algorithm in ("max_first", "online"):
                merged[algorithm] = to_host(merge_states(*states, out_dtype=DTYPES[case.output_dtype], algorithm=algorithm))
    for seed in range(1, repeats + 1):
        with jit.settings(seed=seed, patches=patches, readable=readable):
            again.append(to_host(_decode(case, arguments, xp)))
    return Outputs(first, partial, merged, again, num_splits, grid)


def plan(case: Case, arguments: dict[str, Any]) -> tuple[int, tensor_core.Grid | None]:
    """How the call will be cut. RuntimeError where other kernels will take it than the case says."""
    problem = check_problem(**arguments, lse_base="e", check_values=False, not_yet=NOT_YET)
    if problem.q.size and takes_tensor_cores(problem) != case.on_tensor_cores:
        raise RuntimeError(f"{case.name}: expected tensor cores: {case.on_tensor_cores}; the kernels decide otherwise")
    cut = choose_cut(problem, case.schedule, **case.splits(), partial_dtype=case.partial_dtype)
    return cut.num_splits, plan_grid(problem) if cut.schedule == "balanced" else None


def on_device(inputs: Inputs, xp: Any) -> dict[str, Any]:
    """The arguments of a call with arrays of `xp`, strides kept."""
    move = lambda x: x if xp is np or not isinstance(x, np.ndarray) else _with_strides(x, xp)
    return {name: move(value) for name, value in inputs.call().items()}


def _with_strides(x: np.ndarray, xp: Any) -> Any:
    """x on the device with its gaps: the memory behind a view goes along as a whole."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    if not base.flags.c_contiguous:
        return xp.asarray(np.ascontiguousarray(x))
    moved = xp.asarray(base).ravel()
    offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return xp.ndarray(x.shape, moved.dtype, moved.data + offset, x.strides)


def permuted(inputs: Inputs) -> Inputs:
    """The same tokens on other pages of the pool."""
    pool_pages = len(inputs.k_cache)
    order = np.random.default_rng(pool_pages).permutation(pool_pages)
    place = np.argsort(order).astype(np.int32)
    table = inputs.page_table
    inside = (table >= 0) & (table < pool_pages)
    moved = np.where(inside, place[np.where(inside, table, 0)], table)
    return replace(inputs, k_cache=inputs.k_cache[order], v_cache=inputs.v_cache[order], page_table=moved)


def _decode(case: Case, arguments: dict[str, Any], xp: Any) -> tuple[Any, Any]:
    shape = arguments["q"].shape
    out, lse = _poisoned(shape, case.output_dtype, xp), _poisoned(shape[:2], "float32", xp)
    return paged_decode(**arguments, **case.options(), out=out, lse_out=lse)


def _partial(case: Case, arguments: dict[str, Any], xp: Any) -> tuple[Any, Any]:
    options = {name: value for name, value in case.options().items() if name != "out_dtype"}
    # Only the call knows how many splits a "fixed" schedule makes: learn the shape, then poison.
    shape = split_decode(**arguments, **options)[0].shape
    o, lse = _poisoned(shape, case.partial_dtype, xp), _poisoned(shape[:3], "float32", xp)
    return split_decode(**arguments, **options, out=o, lse_out=lse)


def _poisoned(shape: tuple[int, ...], dtype: str, xp: Any) -> Any:
    return xp.asarray(np.full(shape, np.nan, DTYPES[dtype]))
