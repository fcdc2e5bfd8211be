"""bench: sizes, inputs, checks and reports; its timing over a stand-in for CuPy whose clock is made up."""

import io
import itertools
import json
import lzma
import subprocess
import sys
import types

import numpy as np
import pytest

from bench import __main__ as command_line
from bench import accuracy, cases, floor, loading, merge, report, timing, tune
from bench.decode import Bench, Options, context_fit, prepare
from cupy_kernels import jit

SMALL = cases.BenchCase("small", (37, 64), num_q_heads=4, num_kv_heads=2, head_dim=64)
COLD = 1000


class FakeKernel:
    def __init__(self, source, name, options):
        assert name in source
        self.reads = name == "read_floor"
        if self.reads:
            assert all(f"-D{word}=" in " ".join(options) for word in ("RESIDENT", "IN_FLIGHT"))

    def __call__(self, grid, block, arguments):
        if self.reads:
            assert (grid[0] % 132, block) == (0, (256,))
            assert arguments[0].nbytes == 16 * arguments[1]


@pytest.fixture
def fake_cupy(monkeypatch):
    """Streams that run at once, graphs that count their launches, events that are 400 us apart, and `drift` ms each.

    Rests take no time, and are noted with the launches before them.
    """
    cupy, ticks = types.ModuleType("cupy"), itertools.count()
    cupy.launches, cupy.rests, cupy.drift = [], [], 0.0
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: cupy.rests.append((seconds, len(cupy.launches))))

    class Stream:
        def __init__(self, non_blocking=False):
            self.capturing = False

        def __enter__(self):
            return self

        def __exit__(self, *error):
            assert not self.capturing

        def begin_capture(self):
            self.capturing = True

        def end_capture(self):
            self.capturing = False
            return types.SimpleNamespace(launch=cupy.launches.append)

    class Event:
        def record(self, stream=None):
            self.tick = next(ticks)

        def synchronize(self):
            assert self.tick >= 0

    class Pool:
        def malloc(self, size):
            raise AssertionError

        def free_all_blocks(self):
            pass

    class Allocator:
        def __init__(self, allocator):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    device = types.SimpleNamespace(synchronize=lambda: None, attributes={"MultiProcessorCount": 132}, compute_capability="90")
    Stream.null = Stream()
    cupy.ndarray = type("ndarray", (), {})
    cupy.RawKernel, cupy.zeros = FakeKernel, np.zeros
    cupy.cuda = types.SimpleNamespace(
        Device=lambda: device,
        Stream=Stream,
        Event=Event,
        MemoryPool=Pool,
        using_allocator=Allocator,
        get_elapsed_time=lambda start, stop: 0.4 * (stop.tick - start.tick) + cupy.drift * stop.tick,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    caches = floor.kernel, timing._stream_and_pool, timing._nothing
    for cache in caches:
        cache.cache_clear()
    yield cupy
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("1x1024", 4), ("1x32768", 134), ("8x4096", 134), ("64x1024", 268), ("1x131072", 537), ("64-ragged", 445),
     ("32x8192", 1074), ("16x8192-g8", 537), ("8x8192-g16", 268), ("16x2048-mha", 537), ("16x8192-d64", 268)],
)  # fmt: skip
def test_case_sizes(name, megabytes):
    case = cases.CASES[name]
    assert round(case.kv_bytes / 1e6) == megabytes
    sets = case.num_sets()
    assert sets % 2 == 0
    assert sets * case.kv_bytes >= 256 << 20


def test_case_names():
    assert " ".join(cases.CASES) == (
        "1x1024 1x32768 8x4096 64x1024 1x131072 64-ragged 32x8192 16x8192-g8 8x8192-g16 16x2048-mha 16x8192-d64"
    )
    assert [case.kv_bytes for case in cases.CONTEXT_CASES][:: len(cases.CONTEXT_CASES) - 1] == [2**27, 2**32]
    assert [case.name for case in cases.select("64-ragged,1x1024")] == ["64-ragged", "1x1024"]
    assert len(cases.select("all")) == len(cases.CASES)
    with pytest.raises(ValueError, match="cases: expected all or some of 1x1024"):
        cases.select("1x1025")
    lens = cases.ragged_lens()
    assert (min(lens) >= 16, max(lens) <= 16384, len(lens)) == (True, True, 64)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_are_permuted_and_poison_is_placed(layout):
    case = cases.BenchCase("two", (37, 64, 5), num_q_heads=2, num_kv_heads=1, head_dim=8, layout=layout)
    sets = cases.build(case, np, 5, 10 * case.kv_bytes)
    assert len(sets) == 10
    used = [sets.page_tables[i, b, : case.pages[b]] for i in range(10) for b in range(3)]
    ids = np.concatenate(used)
    assert len(set(ids)) == len(ids)
    assert (np.diff(ids) == 1).mean() < 0.1
    past = np.concatenate([sets.page_tables[:, b, case.pages[b] :].ravel() for b in range(3)])
    assert set(past) == {-1, 2**31 - 1}
    seen = np.zeros(sets.k_cache.shape, bool)
    nhd = seen if layout == "NHD" else seen.swapaxes(1, 2)
    for i, b in itertools.product(range(10), range(3)):
        for token in range(case.context_lens[b]):
            nhd[sets.page_tables[i, b, token // 16], token % 16] = True
    for cache in sets.pools:
        assert np.array_equal(np.isnan(cache), ~seen)
        assert abs(np.nanstd(cache.astype(np.float64)) - 1) < 0.05
    assert not np.array_equal(sets.q[0], sets.q[1])
    assert not np.array_equal(sets.k_cache[seen], cases.build(case, np, 6, 10 * case.kv_bytes).k_cache[seen])


@pytest.mark.parametrize(("layout", "dtype"), [("NHD", "float16"), ("HND", "bfloat16"), ("NHD", "float32")])
def test_check_accepts_the_kernel_and_rejects_faults(layout, dtype):
    case = cases.BenchCase("small", (37, 64), num_q_heads=4, num_kv_heads=2, head_dim=64, layout=layout, dtype=dtype)
    sets = cases.build(case, np, 1, COLD)
    call = prepare(sets, {"num_splits": 2} if layout == "NHD" else {})
    accuracy.check(sets, call)

    def wrong(i):
        return call(i) * np.array(1.03, sets.out.dtype)

    with pytest.raises(ValueError, match=r"small: set 0: expected .*, got .* at request"):
        accuracy.check(sets, wrong)
    with pytest.raises(accuracy.NotFiniteError, match="expected finite outputs, got nan"):
        accuracy.check(sets, lambda i: sets.out[i])


def test_accuracy():
    sets = cases.build(SMALL, np, 1, COLD)
    reference = accuracy.reference(sets, 9, 2000)
    assert reference.exact.shape == (4, 2, 4, 64)
    call = prepare(sets, {})
    exact_fraction, rho = reference.measure(sets, call)
    assert exact_fraction > 0.99
    assert 1 <= rho < 1.01
    assert accuracy.score(reference.exact.astype(np.float16), reference.exact) == (1, 1)
    up = np.nextafter(reference.exact.astype(np.float16), np.float16(np.inf))
    fraction, rho = accuracy.score(up, reference.exact)
    assert fraction == 0
    assert rho > 2


def test_chunks_of_the_reference_do_not_matter(monkeypatch):
    sets = cases.build(SMALL, np, 1, COLD)
    whole = accuracy.exact_outputs(sets, sets.q)
    monkeypatch.setattr(accuracy, "SCORES", 1)
    assert np.allclose(accuracy.exact_outputs(sets, sets.q), whole, rtol=1e-13)


def test_summary_and_fit():
    timing_of = timing.summary([3.0, 1.0, 2.0, 100.0, 2.0])
    assert timing_of.us == 2
    assert timing_of.spread == pytest.approx(0.25)
    line = timing.affine_fit([1, 2, 4, 32], [12, 14, 18, 74])
    assert (line.start, line.slope) == (pytest.approx(10), pytest.approx(2))
    assert line.off < 1e-12
    bent = timing.affine_fit([1, 2, 4, 32], [12, 14, 18, 100])
    assert bent.off > 0.02
    points = [{"tokens": 1024 * n, "us": 5 + 1.05 * n, "read_us": 2 + n} for n in (1, 2, 8)]
    assert context_fit(points)["slope_ratio"] == pytest.approx(1.05)


def test_settled_and_nodes():
    draws = iter([5.0, 4.0, 3.0, 3.02, 1.0])
    assert timing.settled(lambda: next(draws)) == 3.0
    draws = iter([float(2**-n) for n in range(20)])
    assert timing.settled(lambda: next(draws), most=8) == 2.0**-7
    # Whole turns; 1 ms or 32 calls, the more of both, where 256 nodes allow and 4 ms; never less than one turn.
    cases = {(2, 100): 32, (2, 50): 40, (64, 100): 256, (2, 500): 16, (2, 5000): 2, (1024, 1): 1024, (2, 0): 256}
    assert {case: timing.nodes(*case) for case in cases} == cases


def test_measure(fake_cupy):
    calls = []
    timed = timing.measure(calls.append, 4, repeats=5)
    # Twice eagerly; then 8 turns of 4: 32 calls are more than 1 ms, of 400 us a turn, holds.
    assert calls == [0, 1, 2, 3] * (2 + 8)
    assert len(fake_cupy.launches) == 1 + 1 + 5
    assert fake_cupy.rests == [(timing.REST_S, 0)]
    assert timed == timing.Timing(12.5, 0.0)
    with pytest.raises(ZeroDivisionError):
        timing.measure(lambda i: 1 // 0, 2)


def test_measure_apart(fake_cupy, monkeypatch):
    # Calls of 9 us and a launch of 2 us between them.
    spent, calls = [], []

    def measure(call, num_sets, repeats):
        spent.clear()
        for i in range(num_sets):
            call(i)
        return timing.Timing(sum(spent) / num_sets, 0.0)

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "_nothing", lambda: lambda grid, block, arguments: spent.append(2.0))

    def call(i):
        calls.append(i)
        spent.append(9.0)

    assert timing.measure_apart(call, 4) == 9.0
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize("patches", tune.STAGES.values(), ids=tune.STAGES)
def test_stages_that_are_left_out_stand_in_the_kernel(patches):
    text = jit.read_source("balanced.cu", patches=patches)
    assert (text == jit.read_source("balanced.cu")) == (not patches)


def test_read_floor(fake_cupy):
    sets = cases.build(SMALL, np, 1, 10**6)
    assert floor.read_floor(sets.pools, SMALL.kv_bytes, len(sets), 3) > 0
    places = floor.ranges((100 * 16, 120 * 16), 32 * 16, 6)
    assert places == [(0, 0), (1, 0), (0, 512), (1, 512), (0, 1024), (1, 1024)]
    with pytest.raises(ValueError, match="num_bytes: expected at most 16"):
        floor.ranges((16, 16), 32, 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("_", "resident", "in_flight"), floor.VARIANTS)
def test_floor_kernel_compiles_without_spills(arch, _, resident, in_flight):
    core = pytest.importorskip("cuda.core")
    log = io.StringIO()
    options = core.ProgramOptions(
        std="c++17", arch=arch, ptxas_options=["-v"], define_macro=[("RESIDENT", str(resident)), ("IN_FLIGHT", str(in_flight))]
    )
    core.Program(floor.SOURCE, "c++", options).compile("cubin", logs=log)
    assert "0 bytes spill stores" in log.getvalue()


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    case = cases.BenchCase("small", (1000, 512), num_q_heads=8, num_kv_heads=2)
    sets = cases.build(case, cupy, 1, 4 << 20)
    k = accuracy.on_host(accuracy.tokens(sets, sets.k_cache, 0, 0)).astype(np.float64)
    assert abs(k.mean()) < 0.01
    assert abs(k.std() - 1) < 0.01
    assert 4 < abs(k).max() < 6
    assert abs(np.corrcoef(k.reshape(len(k), -1)[:, :32].T) - np.eye(32)).max() < 0.2
    call = prepare(sets, {})
    accuracy.check(sets, call)
    fraction, rho = accuracy.reference(sets, 2, 10**5).measure(sets, call)
    assert fraction > 0.99
    assert rho < 1.01
    timed = timing.measure(call, len(sets), 3)
    read_us = floor.read_floor(sets.pools, case.kv_bytes, len(sets), 3)
    assert 0 < read_us < timed.us < 10**5
    assert timing.host_us(call, len(sets), 20) > 0
    assert merge.run(merge.MergeCase(64, 4), cupy, 3, 3, 1 << 20)["us"] > 0


def run(capsys, *words, xp=np):
    status = command_line.main(words, xp=xp, cold_bytes=COLD)
    return status, *capsys.readouterr()


SIZES = ("--batch-size", "2", "--context-len", "37", "64", "--num-q-heads", "4", "--num-kv-heads", "2", "--head-dim", "64")


def test_decode_end_to_end(fake_cupy, capsys, tmp_path, monkeypatch):
    fake_cupy.drift = 1e-3
    monkeypatch.setattr(accuracy, "OUTPUTS", 2000)
    monkeypatch.delitem(sys.modules, "bench.peers", raising=False)
    monkeypatch.setattr(timing, "HOST_CALLS", 3)
    monkeypatch.setattr(timing, "LAYERS", 1)
    monkeypatch.setattr("bench.decode.SWEEP_SPLITS", (1, 4))
    status, out, err = run(capsys, "decode", *SIZES, "--accuracy", "--sweep", "--repeats", "3", "--out", str(tmp_path))
    assert status == 0, out + err
    result = json.loads((tmp_path / "bench.json").read_text())
    assert {"device", "commit", "date", "seed", "seconds", "numpy", "command"} <= set(result["environment"])
    (row,) = result["rows"]
    assert {"case", "us", "read_us", "host_us", "exact_fraction", "rho", "peers"} <= set(row)
    assert row["case"] == "2-lengths-q4-kv2-d64"
    assert row["peers"] == {}
    assert {"1", "4"} <= set(row["sweep_us"])
    assert "bench.peers" not in sys.modules
    assert row["case"] in (tmp_path / "bench.csv").read_text()
    assert "plan_splits" not in err
    assert "check" in result["environment"]["seconds"]


def test_a_wrong_kernel_fails_the_run(fake_cupy, capsys, tmp_path, monkeypatch):
    def broken(sets, schedule):
        return lambda i: sets.out[i] * 0 + 1

    monkeypatch.setattr("bench.decode.prepare", broken)
    status, out, err = run(capsys, "decode", *SIZES, "--out", str(tmp_path))
    assert status == 1
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["us"] is None
    assert "NotFiniteError" in row["error"]
    assert "FAILED" in err
    assert "NotFiniteError" in out


def test_merge_end_to_end(fake_cupy, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "HOST_CALLS", 3)
    status, out, err = run(capsys, "merge", "--rows", "9", "--num-states", "3", "--head-dim", "8", "--out", str(tmp_path))
    assert status == 0, out + err
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["case"] == "9x3x8"
    case = merge.MergeCase(1, 2, 2)
    o, lse = np.array([[[1.0, 2], [3, 4]]]), np.zeros((1, 2))
    merge.check(case, o, lse, np.array([[2.0, 3]]), np.log([2.0]))
    with pytest.raises(ValueError, match="merged o"):
        merge.check(case, o, lse, np.array([[2.0, 3.1]]), np.log([2.0]))
    with pytest.raises(ValueError, match="merged lse"):
        merge.check(case, o, lse, np.array([[2.0, 3]]), np.log([2.1]))


def test_context(fake_cupy, monkeypatch):
    fake_cupy.drift = 1e-3
    # The calls of a captured graph run on the CPU.
    monkeypatch.setattr(timing, "LAYERS", 1)
    shorter = [cases.BenchCase(f"1x{n}", (n,), num_q_heads=2, num_kv_heads=1, head_dim=64) for n in (32, 64, 96)]
    context = Bench(Options(xp=np, cold_bytes=COLD, repeats=3, say=lambda text: None)).context(shorter)
    assert [point["tokens"] for point in context["points"]] == [32, 64, 96]
    assert "per 1024 tokens" in report.context_table(context)


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], {}),
        (["--schedule", "balanced"], {"schedule": "balanced"}),
        (["--num-splits", "8"], {"schedule": "uniform", "num_splits": 8}),
        (["--pages-per-split", "4"], {"schedule": "fixed", "pages_per_split": 4}),
        (["--schedule", "fixed"], {"schedule": "fixed"}),
    ],
)
def test_schedule_flags(words, want):
    assert command_line.schedule_of(command_line.parser().parse_args(["decode", *words])) == want


def test_free_cases():
    parse = lambda *words: command_line.free_case(command_line.parser().parse_args(["decode", *words]))
    assert parse() is None
    case = parse("--batch-size", "3", "--context-len", "100", "--layout", "HND", "--dtype", "bfloat16")
    assert (case.name, case.context_lens, case.layout) == ("3x100-bfloat16-HND", (100,) * 3, "HND")
    assert parse("--context-len", "5", "7").context_lens == (5, 7)
    with pytest.raises(ValueError, match="context-len: expected 1 or 3 lengths, got 2"):
        parse("--batch-size", "3", "--context-len", "5", "7")
    with pytest.raises(ValueError, match="num_q_heads: expected a multiple of 8"):
        parse("--num-q-heads", "12")
    with pytest.raises(SystemExit):
        parse("--batch-size", "0")


def test_without_torch_peers_say_so(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bench.peers", raising=False)
    status, _, err = run(capsys, "decode", "--peers")
    assert status == 2
    assert "--peers needs torch" in err


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(command_line, "no_gpu_reason", lambda: "no GPU: none here")
    status, _, err = run(capsys, "decode", xp=None)
    assert (status, err) == (2, "bench: no GPU: none here\n")


def test_peers_files(tmp_path):
    (tmp_path / "kernel.py").write_text("")
    assert loading.file_of(tmp_path, "kernel.py", "no_such_package") == tmp_path / "kernel.py"
    (tmp_path / "packed.so.xz").write_bytes(lzma.compress(b"binary"))
    assert loading.file_of(tmp_path, "packed.so", "no_such_package").read_bytes() == b"binary"
    with pytest.raises(FileNotFoundError, match=r"other\.py: not in --peers-dir, and no_such_package is not installed"):
        loading.file_of(tmp_path, "other.py", "no_such_package")


def test_compilers_do_not_outlive_their_time():
    start = lambda program: subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert loading.finish_compiling(start("pass")) is None
    assert "could not be compiled: no nvcc" in loading.finish_compiling(start("raise SystemExit('no nvcc')"))
    slow = start("import time; time.sleep(60)")
    assert "more than 0 s" in loading.finish_compiling(slow, 0.1)
    assert slow.returncode is not None


def made_up_result():
    """Numbers of no kernel."""
    rows = []
    for n, case in enumerate(cases.CASES.values()):
        read = 2 + case.kv_bytes / 4.5e6
        peers = {"FlashInfer tensor-core": read * 1.3, "cuDNN SDPA, contiguous": read * 1.1} if n != 5 else {}
        rows.append({
            "case": case.name, "us": read * 1.05, "read_us": read, "host_us": 9.0, "exact_fraction": 0.9981, "rho": 1.0001,
            "peers": peers, "kv_bytes": case.kv_bytes, "floor_share": 1 / 1.05, "spread": 0.01, "path": "none",
            "apart_us": read * 1.15,
            "peers_host_us": dict.fromkeys(peers, 25.0), "peers_errors": {} if peers else {"FlashInfer": "made up"},
            "peers_accuracy": {name: {"exact_fraction": 0.6, "rho": 1.3} for name in peers},
        })  # fmt: skip
        if case.name in cases.SWEEP_CASES:
            rows[-1] |= {
                "sweep_us": {str(2**k): read * (1 + abs(k - 4) / 3) for k in range(8)}, "planned_splits": 16,
                "auto_us": read * 1.02,
            }  # fmt: skip
    points = [{"tokens": 2**n, "us": 5 + 2**n / 900, "read_us": 2 + 2**n / 1000} for n in range(15, 21)]
    environment = {"device": "MADE-UP NUMBERS", "cuda": "-", "cupy": "-", "date": "-"}
    return {"environment": environment, "rows": rows, "context": {"points": points, **context_fit(points)}}


def test_report(tmp_path):
    result = made_up_result()
    text = report.tables(result)
    assert "FlashInfer tensor-core" in text
    assert "| 1 x 32768 |" in text
    assert "16" in text
    assert "*" in text
    assert "64-ragged     FlashInfer: made up" in text
    # The contiguous kernel is no paged peer.
    assert "1.238 x" in report.line(result["rows"][0])
    written = report.write(result, tmp_path)
    header, first, *_ = (tmp_path / "bench.csv").read_text().splitlines()
    assert header.startswith("case,kv_bytes,us,read_us")
    assert first.startswith("1x1024,4194304,")
    if "bench.png" in [path.name for path in written]:
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    report.write({"environment": {}, "rows": []}, tmp_path / "empty")
    result["rows"][0]["rho"] = float("nan")
    report.write(result, tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["rho"] is None
