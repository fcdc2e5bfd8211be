"""Times: device events around replays of a CUDA graph on a cold cache, the host's share of a call, and what lines say of them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

REPEATS = 20
# A replay should take so long that what an event costs does not show, and hold as many calls as a model has layers: its first one
# finds no launch to begin behind. Not more nodes than that, nor so long that the device takes back its clock.
REPLAY_US, LAYERS, MAX_NODES, LONGEST_US = 1000, 32, 256, 4000
# Before each measurement: a device that has been reading at full rate for long is near its limit of power, and lowers its clock.
REST_S = 0.04
# All replays of one measurement; slower calls get fewer of them, but at least three.
BUDGET_US = 2e6
HOST_CALLS = 100


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over replays, and half the distance of its quartiles relative to it."""

    us: float
    spread: float


def summary(samples: Sequence[float]) -> Timing:
    """The Timing of one number a replay."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(middle, (high - low) / 2 / middle)


def nodes(num_sets: int, one_turn_us: float) -> int:
    """Calls in one graph: whole turns through the page sets, of REPLAY_US or LAYERS calls, the more of both within the limits."""
    turn = max(one_turn_us, 1.0)
    turns = max(round(REPLAY_US / turn), round(LAYERS / num_sets))
    return num_sets * max(1, min(turns, MAX_NODES // num_sets, int(LONGEST_US / turn)))


def measure(call: Callable[[int], Any], num_sets: int, repeats: int = REPEATS) -> Timing:
    """Captures `call(0) ... call(num_sets - 1)`, in turn, as one CUDA graph and times its replays.

    `call(i)` enqueues one call on page set i on CuPy's current stream. It is run twice on each set before the capture.
    """
    import cupy

    cupy.cuda.Device().synchronize()
    stream, pool = _stream_and_pool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        for i in range(num_sets):
            call(i)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for i in range(num_sets):
            call(i)
        stop.record(stream)
        stop.synchronize()
        count = nodes(num_sets, 1e3 * cupy.cuda.get_elapsed_time(start, stop))
        stream.begin_capture()
        try:
            for n in range(count):
                call(n % num_sets)
        finally:
            graph = stream.end_capture()
        measured = measure_replays(functools.partial(graph.launch, stream), count, repeats, stream)
    pool.free_all_blocks()
    return measured


def measure_apart(call: Callable[[int], Any], num_sets: int, repeats: int = REPEATS) -> float:
    """Microseconds a call behind and before another launch, less what that one takes by itself.

    In a chain as of `measure` a call may begin while the one in front still runs. Here it can't: an ordinary launch, which does
    nothing, is between them.
    """
    nothing = _nothing()
    return apart(lambda call: measure(call, num_sets, repeats).us, call, lambda i: nothing((1,), (32,), ()))


def apart(us: Callable[[Callable[[int], Any]], float], call: Callable[[int], Any], between: Callable[[int], Any]) -> float:
    """What `call` takes by `us` with a launch `between` its calls, less what that one takes."""

    def both(i: int) -> Any:
        call(i)
        between(i)

    return us(both) - us(between)


@functools.cache
def _nothing() -> Any:
    import cupy

    return cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing", ("--std=c++17",))


@functools.cache
def _stream_and_pool() -> tuple[Any, Any]:
    """One stream for all measurements, and a pool of their own: what a call allocates and frees must not be given to others
    while a graph writes there. Both live on, for a callee may keep what it allocated.
    """
    import cupy

    return cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()


def measure_replays(replay: Callable[[], Any], calls: int, repeats: int = REPEATS, stream: Any = None) -> Timing:
    """Times `replay()`, which enqueues `calls` calls on the stream (None: the legacy default stream)."""
    import cupy

    stream = cupy.cuda.Stream.null if stream is None else stream
    events = [[cupy.cuda.Event(), cupy.cuda.Event()] for _ in range(repeats + 1)]

    def run(pairs: list[list[Any]]) -> list[float]:
        # All enqueued before the first wait: launching a graph takes the host longer than the device takes to start it.
        for start, stop in pairs:
            start.record(stream)
            replay()
            stop.record(stream)
        pairs[-1][1].synchronize()
        return [1e3 * cupy.cuda.get_elapsed_time(start, stop) for start, stop in pairs]

    time.sleep(REST_S)
    replay()
    (one,) = run(events[:1])
    return summary([us / calls for us in run(events[1 : 1 + max(3, min(repeats, int(BUDGET_US / one)))])])


def host_us(call: Callable[[int], Any], num_sets: int, calls: int | None = None) -> float:
    """Microseconds that the host spends in one eager call, the device working behind it.

    A median of calls, settled: a host has neighbours that come and go.
    """
    import cupy

    def sample() -> float:
        times = []
        cupy.cuda.Device().synchronize()
        for n in range(calls or HOST_CALLS):
            start = time.perf_counter()
            call(n % num_sets)
            times.append(time.perf_counter() - start)
        cupy.cuda.Device().synchronize()
        return 1e6 * statistics.median(times)

    return settled(sample, agree=0.05)


@dataclass(frozen=True)
class Line:
    """`us = start + slope * x`, and the largest relative distance of a point from it."""

    start: float
    slope: float
    off: float


def affine_fit(x: Sequence[float], us: Sequence[float]) -> Line:
    """The straight line whose relative distances to the points are least in the sum of squares."""
    # Least squares of ((a + b x) - t) / t: with weights w = 1 / t^2, b = cov(x, t) / var(x).
    weights = [t**-2 for t in us]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, us, strict=True)) / total
    cov = sum(w * (a - mean_x) * (t - mean_t) for w, a, t in zip(weights, x, us, strict=True))
    slope = cov / sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    start = mean_t - slope * mean_x
    return Line(start, slope, max(abs(start + slope * a - t) / t for a, t in zip(x, us, strict=True)))


def settled(sample: Callable[[], float], agree: float = 0.01, most: int = 8) -> float:
    """The least of samples, drawn until the two least agree within `agree`, at most `most` of them."""
    least: list[float] = []
    while len(least) < most:
        least = sorted([*least, sample()])
        if len(least) > 1 and least[1] <= least[0] * (1 + agree):
            break
    return least[0]
