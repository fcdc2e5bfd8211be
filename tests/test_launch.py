"""Launches that may begin before the one in front of them has ended: what the driver is told, and that no bit depends on it."""

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import assert_same_bits, on, paged, to_numpy
from test_compile import SPECIALISATIONS, TENSOR_CORES

from cupy_kernels import DecodePlan, driver, jit, merge_state_in_place, merge_states, paged_decode, split_decode
from cupy_kernels.host import build

WAIT = "    wait_for_previous_launch();\n"
# One specialisation of every kernel: name -> file and constants.
KERNELS = {name: (source, constants) for source, names, constants in SPECIALISATIONS for name in names}
KERNELS |= {name: (source, constants) for source, name, constants, _ in TENSOR_CORES}


def ptx(name, patches=()):
    """The instructions of a kernel for sm_90, as NVRTC orders them, all functions inlined."""
    import nvidia
    from cuda.bindings import nvrtc

    source, constants = KERNELS[name]
    with jit.settings(patches=patches):
        kernel = jit.kernel(source, name, **constants)
    text = jit.read_source(source, patches=kernel.patches).encode()
    headers = [f"-I{path}" for root in nvidia.__path__ for path in Path(root).glob("*/include")]
    options = [x.encode() for x in (*jit.OPTIONS, "-arch=compute_90", "-ftz=true", *headers, *kernel.defines)]
    _, program = nvrtc.nvrtcCreateProgram(text, b"", 0, [], [])
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    code = bytearray(size)
    nvrtc.nvrtcGetPTX(program, code)
    code = code.decode()
    return [line.strip() for line in re.search(rf"\.entry {name}\(.*?^\}}", code, re.DOTALL | re.MULTILINE)[0].splitlines()]


# What a kernel may do with others' memory before it waits for the launch in front of it: look, past L1, and ask for it into L2.
LOOKS = {"balanced": (r"ld\.relaxed\.gpu\.global\.s32", r"prefetch\.global\.L2")}
MEMORY = r"(ld|st|atom|red|cp|prefetch)\.(?!param|shared)\S+"


def flow(instructions):
    """The control flow: for each instruction, those that may come next; None is the end."""
    labels = {line[:-1]: i for i, line in enumerate(instructions) if line.startswith("$L") and line.endswith(":")}
    for i, line in enumerate(instructions):
        following = i + 1 if i + 1 < len(instructions) else None
        if branch := re.match(r"(@\S+\s+)?bra(\.uni)?\s+(\$\w+);", line):
            yield [labels[branch[3]], *([following] if branch[1] else [])]
        elif leaves := re.match(r"(@\S+\s+)?(ret|exit);", line):
            yield [None, *([following] if leaves[1] else [])]
        else:
            yield [following]


def touched_before_waiting(instructions, looks=()):
    """What a kernel may do before it has waited for the launch in front of it that has to come afterwards, or None.

    That is memory of others, but for `looks`, and its end: a thread that came there would never wait.
    """
    following, seen, ways = list(flow(instructions)), set(), [0]
    while ways:
        i = ways.pop()
        if i is None:
            return "the end"
        if i in seen or instructions[i] == "griddepcontrol.wait;":
            continue
        seen.add(i)
        touched = re.match(rf"(@\S+\s+)?({MEMORY})", instructions[i])
        if touched and not any(re.fullmatch(look, touched[2]) for look in looks):
            return instructions[i]
        ways += following[i]
    return None


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_wait_before_they_touch_memory(name):
    assert touched_before_waiting(ptx(name), LOOKS.get(name, ())) is None


LATE = [("partial_mma.cu", WAIT, ""), ("partial_mma.cu", "    DYNAMIC_SHARED", WAIT + "    DYNAMIC_SHARED")]
IN_LOOP, K_AND_V = "    " + WAIT, "        feed.load_first();\n"
PLANTED = [
    ("partial", [("partial.cu", WAIT, "")]),
    ("partial", [("partial.cu", WAIT, "    if (threadIdx.x == 0) wait_for_previous_launch();\n")]),
    ("partial", [("partial.cu", WAIT, "    if (num_splits == 0) return;\n" + WAIT)]),
    ("partial_mma", LATE),
    ("merge", [("ptx.cuh", '    asm volatile("griddepcontrol.wait;" ::: "memory");\n', "")]),
    ("balanced", [("balanced.cu", IN_LOOP, ""), ("balanced.cu", K_AND_V, K_AND_V + IN_LOOP)]),
    ("balanced", [("balanced.cu", IN_LOOP, "        if (!kept_all) wait_for_previous_launch();\n")]),
    # A look that L1 may keep.
    ("balanced", [("cut.cuh", "load_relaxed(context_lens + request * stride)", "context_lens[request * stride]")]),
    ("balanced", [("copy.cuh", "load_relaxed(page_table + page)", "page_table[page]")]),
]


@pytest.mark.parametrize(
    ("name", "patches"), PLANTED,
    ids=["never", "one thread", "not all blocks", "late", "nothing", "K and V first", "sometimes", "kept length", "kept page"],
)  # fmt: skip
def test_planted_kernels_that_do_not_are_found(name, patches):
    assert touched_before_waiting(ptx(name, patches), LOOKS.get(name, ())) is not None


def test_only_kernels_that_wait_may_begin_early():
    kernel = lambda name: jit.kernel(KERNELS[name][0], name, **KERNELS[name][1])
    assert all(kernel(name).waits for name in KERNELS)
    with jit.settings(patches=[("partial.cu", WAIT, "")]):
        assert not kernel("partial").waits


def test_structures_are_those_of_the_driver(tmp_path):
    import nvidia

    places = {"gridDimX": "sizes", "hStream": "stream", "attrs": "attributes", "numAttrs": "num_attributes"}
    facts = [f"offsetof(CUlaunchConfig, {c}) == {getattr(driver.Config, ours).offset}" for c, ours in places.items()]
    facts += [f"sizeof(CUlaunchConfig) == {ctypes.sizeof(driver.Config)}"]
    facts += [f"sizeof(CUlaunchAttribute) == {ctypes.sizeof(driver.Attribute)}"]
    facts += [f"offsetof(CUlaunchAttribute, value) == {driver.Attribute.value.offset}"]
    facts += [f"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == {driver.PROGRAMMATIC_STREAM_SERIALIZATION}"]
    facts += [f"CUDA_ERROR_INVALID_CONTEXT == {driver.INVALID_CONTEXT}"]
    text = "#include <cuda.h>\n#include <cstddef>\n" + "".join(f'static_assert({fact}, "{fact}");\n' for fact in facts)
    (tmp_path / "facts.cpp").write_text(text)
    include = [f"-I{path}" for root in nvidia.__path__ for path in Path(root).glob("*/include")]
    command = [*build.find_compiler(), "-std=c++17", "-fsyntax-only", *include, str(tmp_path / "facts.cpp")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


class FakeDriver:
    """Keeps what each launch was told, and answers with the statuses it was given."""

    def __init__(self, *statuses):
        self.statuses, self.told = list(statuses), []

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        config = config._obj
        attributes = [(config.attributes[i].id, config.attributes[i].value[0]) for i in range(config.num_attributes)]
        self.told.append((list(config.sizes), config.stream, attributes, function.value))
        return self.statuses.pop(0) if self.statuses else 0

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_OF_A_TEST"


@pytest.fixture
def bind(monkeypatch):
    """`bind(capability, fake_driver, waits)`, a launch on a device that is not there."""

    def bind(capability, fake, waits=True):
        used = []
        device = SimpleNamespace(id=3, compute_capability=capability, use=lambda: used.append(3))
        stream = lambda device_id: SimpleNamespace(ptr=70 + device_id)
        cuda = SimpleNamespace(Device=lambda: device, get_current_stream=stream)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(driver, "_library", lambda: fake)
        return driver.bind_launch("k", 1234, (5, 6, 7), 128, 4096, (ctypes.c_void_p * 1)(), waits), used

    return bind


@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
@pytest.mark.parametrize("waits", [True, False])
def test_what_the_driver_is_told(bind, capability, waits):
    fake = FakeDriver()
    launch, _ = bind(capability, fake, waits)
    launch()
    launch()
    early = [(6, 1)] if waits and capability not in ("80", "89") else []
    assert fake.told == 2 * [([5, 6, 7, 128, 1, 1, 4096], 73, early, 1234)]


def test_a_thread_without_a_context_gets_one(bind):
    fake = FakeDriver(driver.INVALID_CONTEXT)
    launch, used = bind("90", fake)
    launch()
    assert (len(fake.told), used) == (2, [3])


def test_a_failed_launch_raises(bind):
    launch, _ = bind("90", FakeDriver(1))
    with pytest.raises(RuntimeError, match=r"^k: CUDA_ERROR_OF_A_TEST \(1\)$"):
        launch()


# A sharp softmax: each step's output depends on all of its input, so that nothing settles down and stale input shows.
STEPS, SHARP = 6, {"sm_scale": 1.0}
FEW, MANY = (40, 0, 23), tuple(range(100, 900, 8))


def caches(xp, lens):
    """Arguments of every step: each has a cache of its own."""
    return [on(xp, paged(lens, num_q_heads=8, head_dim=64, poison=1.0, seed=seed)) for seed in range(STEPS)]


def chain(calls, pause=lambda: None):
    """Launches that each read what the one before wrote; the memory of all that any of them wrote, in order.

    `pause()` is called after each.
    """
    import cupy

    written, q = [], cupy.array(calls[0]["q"])
    splits = {"num_splits": 5, **SHARP}
    parts = split_decode(**calls[0] | {"q": q}, **splits)
    for call in calls:
        call = call | {"q": q}
        split_decode(**call, **splits, out=parts[0], lse_out=parts[1])
        pause()
        o, lse = merge_states(*parts, out_dtype="float16")
        pause()
        # Over the input of the launch before the last.
        paged_decode(**call | {"q": o}, **SHARP, out=q)
        pause()
        merge_state_in_place(q, lse, o, cupy.array(lse))
        pause()
        # A kernel of CuPy's, which waits for all and which all wait for.
        cupy.negative(q, out=q)
        pause()
        o, lse = merge_states(*parts)
        written += [o, lse, cupy.array(q)]
    return [*written, *parts]


def host(arrays):
    return tuple(map(to_numpy, arrays))


def captured(call):
    """`replay()`, which runs a captured `call()` and gives what that wrote."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        written = call()
        graph = stream.end_capture()

    def replay():
        for array in written:
            array.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        return host(written)

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize("readable", [False, True])
@pytest.mark.parametrize("lens", [FEW, MANY], ids=["few", "many"])
def test_a_chain_of_launches_has_the_bits_of_its_steps(lens, readable):
    import cupy

    calls = caches(cupy, lens)
    with jit.settings(readable=readable):
        want = host(chain(calls, pause=cupy.cuda.Device().synchronize))
        assert all(len({array.tobytes() for array in want[i:-2:3]}) == STEPS for i in range(3)), "a step without an effect"
        for _ in range(20):
            assert_same_bits(host(chain(calls)), want)
        replay = captured(lambda: chain(calls))
        for _ in range(20):
            assert_same_bits(replay(), want)


# The launch that follows begins as soon as all blocks of this one have.
EARLY = [("partial.cu", WAIT, "    let_next_launch_begin();\n" + WAIT)]
NO_WAIT = [("ptx.cuh", '    asm volatile("griddepcontrol.wait;" ::: "memory");\n', "")]


@pytest.mark.gpu
@pytest.mark.parametrize(("patches", "same"), [(EARLY, True), (EARLY + NO_WAIT, False)], ids=["waits", "does not"])
def test_the_chain_sees_a_kernel_that_does_not_wait(patches, same):
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("needs compute capability 9.0")
    calls = caches(cupy, FEW)
    with jit.settings(readable=True):
        want = host(chain(calls, pause=cupy.cuda.Device().synchronize))
    with jit.settings(readable=True, patches=patches):
        runs = [host(chain(calls)) for _ in range(20)]
        replay = captured(lambda: chain(calls))
        runs += [replay() for _ in range(20)]
    equal = [all(a.tobytes() == b.tobytes() for a, b in zip(run, want, strict=True)) for run in runs]
    assert all(equal) == same


# A launch that lets the next one begin at once and writes, late, what that one looks at.
SLOW_WRITER = """
extern "C" __global__ void slow_writer(
    int* context_lens, const int* lens, int requests, int* page_table, const int* pages, int ids, long long clocks) {
    asm volatile("griddepcontrol.launch_dependents;");
    const long long start = clock64();
    while (clock64() - start < clocks) {}
    for (int i = threadIdx.x; i < requests; i += blockDim.x) context_lens[i] = lens[i];
    for (int i = threadIdx.x; i < ids; i += blockDim.x) page_table[i] = pages[i];
}
"""
UNCHECKED = [("balanced.cu", "__syncthreads_and(same && batch.others_are_kept());", "true;")]


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [(40, 5, 230), MANY, (30,) * 700], ids=["few", "many", "more than a block keeps"])
def test_tables_that_the_launch_in_front_writes(lens):
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("needs compute capability 9.0")
    call = on(cupy, paged(lens, num_q_heads=8, num_kv_heads=8, head_dim=64, poison=1.0))
    writer = cupy.RawKernel(SLOW_WRITER, "slow_writer", ("--std=c++17",))
    want = host(DecodePlan(**call, **SHARP).run(**call))
    rng, (requests, max_pages) = np.random.default_rng(0), call["page_table"].shape

    def run(patches=(), **stale):
        """One call behind a launch that puts `stale` tables right while the blocks of the call wait for it already."""
        tables = {name: cupy.array(call[name]) for name in ("context_lens", "page_table")}
        with jit.settings(patches=patches):
            plan = DecodePlan(**call, **SHARP)
        out, lse = cupy.full(want[0].shape, 7, np.float16), cupy.full(want[1].shape, 7, np.float32)
        for name, value in stale.items():
            tables[name][...] = cupy.asarray(value)
        cupy.cuda.Device().synchronize()
        arguments = [x for name, table in tables.items() for x in (table, call[name], np.int32(table.size))]
        # A millisecond: the host should have enqueued the call by then, however busy it is.
        writer((1,), (256,), (*arguments, np.int64(2_000_000)))
        plan.run(**call | tables, out=out, lse_out=lse)
        return host((out, lse))

    for _ in range(10):
        # Nonsense of every kind, within what the table can hold and beyond.
        stale_lens = rng.integers(-9, 16 * max_pages + 99, requests).astype(np.int32)
        stale_pages = rng.integers(-(2**31), 2**31 - 1, (requests, max_pages)).astype(np.int32)
        for stale in ({"context_lens": stale_lens}, {"page_table": stale_pages}):
            assert_same_bits(run(**stale), want)
        assert_same_bits(run(context_lens=stale_lens, page_table=stale_pages), want)
    if requests <= 128:
        # Blocks do begin before the tables are right: without the second look they take the pages that stood there. (Of more
        # requests than they keep they look twice in any case.)
        other_pages = rng.integers(0, call["k_cache"].shape[0], (requests, max_pages)).astype(np.int32)
        runs = (run(UNCHECKED, page_table=other_pages) for _ in range(20))
        assert any(a.tobytes() != b.tobytes() for got in runs for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_branches_of_a_graph_that_join():
    import cupy

    calls = caches(cupy, MANY)[:2]
    states = [paged_decode(**call, **SHARP) for call in calls]
    want = host(merge_states(*(cupy.stack(x, 2 if x[0].ndim == 3 else -1) for x in zip(*states, strict=True))))
    plans = [DecodePlan(**call, **SHARP) for call in calls]
    parts = cupy.empty((len(MANY), 8, 2, 64), np.float16), cupy.empty((len(MANY), 8, 2), np.float32)
    plans = [DecodePlan(**call, **SHARP, out=parts[0][:, :, i], lse_out=parts[1][:, :, i]) for i, call in enumerate(calls)]
    first, second = streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]

    def run():
        second.wait_event(first.record())
        for i, (plan, stream, call) in enumerate(zip(plans, streams, calls, strict=True)):
            with stream:
                plan.run(**call, out=parts[0][:, :, i], lse_out=parts[1][:, :, i])
        first.wait_event(second.record())
        with first:
            return merge_states(*parts)

    cupy.cuda.Device().synchronize()
    run()
    first.begin_capture()
    got = run()
    graph = first.end_capture()
    for _ in range(20):
        for array in (*parts, *got):
            array.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(first)
        first.synchronize()
        assert_same_bits(host(got), want)


@pytest.mark.gpu
def test_a_thread_whose_first_use_of_cuda_is_a_launch():
    import cupy

    call = caches(cupy, FEW)[0]
    want, plan, failed = host(paged_decode(**call)), DecodePlan(**call), []
    outs = cupy.empty((3, 8, 64), np.float16), cupy.empty((3, 8), np.float32)

    def run():
        try:
            plan.run(**call, out=outs[0], lse_out=outs[1])
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    cupy.cuda.Device().synchronize()
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert failed == []
    assert_same_bits(host(outs), want)
