"""`python -m verify`: exit codes, refusals, planted faults, the ratchet, and commands that can be typed again."""

import json
import shlex
import sys
import types

import numpy as np
import pytest

import reference
from cupy_kernels import jit
from verify import Case, build, kernels, ratchet, run
from verify import __main__ as command
from verify import environment as kept
from verify.environment import choose_device, environment, no_gpu_reason
from verify.lists import LISTS, default_lists

# One state's weight a hundredth too large.
FAULT = (("merge.cu", "add(weight, o_x);", "add(weight * 1.01f, o_x);"),)


@pytest.fixture
def verify(tmp_path, capsys):
    """Runs the command on the CPU; returns its exit code, the report and the printed lines."""

    def call(arguments):
        code = command.main([*shlex.split(arguments), "--device", "cpu", "--out", str(tmp_path)])
        path = tmp_path / "report.json"
        return code, json.loads(path.read_text()) if path.exists() else None, capsys.readouterr().out.splitlines()

    return call


@pytest.fixture(autouse=True)
def own_ratchet(tmp_path, monkeypatch):
    monkeypatch.setattr(ratchet, "RATCHET", tmp_path / "ratchet.json")


def test_keep(verify, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "results")
    code, made, _ = verify("--case smoke-gqa --keep")
    assert code == 0
    ending = f"-{made['environment']['date'][:10]}"
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert [name.partition("-cpu-stand-in-")[0] for name in names] == ["report"] * len(names)
    assert all(path.stem.endswith(ending) for path in (tmp_path / "results").iterdir())


def test_default_lists():
    assert default_lists("cpu", "quick") == ["smoke", "edge", "sweep", "regressions"]
    assert default_lists("cpu", "full") == default_lists("gpu", "quick") == ["smoke", "edge", "sweep", "long", "regressions"]
    assert default_lists("gpu", "full") == list(LISTS)
    # What a full run on a GPU promises.
    outputs = sum(len(case.context_lens) * case.num_q_heads * case.head_dim for name in LISTS for case in LISTS[name])
    assert outputs * run.SEEDS["full"] >= 10**7


def test_smoke_in_two_processes(verify, tmp_path):
    code, made, lines = verify("--cases smoke --workers 2")
    assert code == 0
    assert lines[-1].startswith(f"PASS: {len(LISTS['smoke'])} cases, ")
    assert list(made)[:5] == ["verdict", "environment", "cases", "mutants", "experiments"]
    assert {"device", "driver", "cuda", "cupy", "numpy", "python", "commit", "date"} <= set(made["environment"])
    assert [row["name"] for row in made["cases"]] == [case.name for case in LISTS["smoke"]]
    assert all(any(row["name"] in line and line.split()[-1] == "pass" for line in lines) for row in made["cases"])
    for row in made["cases"]:
        assert {"name", "family", "seed", "device", "schedule", "dtype", "verdict", "tiers", "worst"} <= set(row)
        # Equal shares leave no partial states to look at, or to merge by hand.
        two_launches = row["schedule"] != "balanced"
        assert {"T0", "T0b", "T1", "T2", "T3", "T3b", "T4", "T5", "T7"} | ({"T6"} if two_launches else set()) == set(row["tiers"])
        assert row["errors"]["non_finite"] == 0
        assert set(row.get("merge", ())) == ({"max_first", "online"} if two_launches else set())
    assert {(row["kernel"], row["schedule"]) for row in made["cases"]} >= {
        (kernel, schedule) for kernel in ("tensor cores", "readable") for schedule in ("uniform", "fixed", "balanced")
    }
    assert "smoke-ragged" in (tmp_path / "report.html").read_text()


def test_planted_fault(verify):
    with jit.settings(patches=FAULT):
        code, made, lines = verify("--case smoke-ragged --case smoke-unsplit")
    assert code == 1
    assert made["verdict"] == "fail"
    assert lines[-1].startswith("FAIL: ")
    assert "smoke-ragged" in lines[-1]
    tiers = made["cases"][0]["tiers"]
    assert (tiers["T1"]["verdict"], tiers["T6"]["verdict"]) == ("fail", "pass")
    # One split: no state is merged, but by hand one is.
    assert made["cases"][1]["tiers"]["T1"]["verdict"] == "pass"
    assert any("python -m verify --case smoke-ragged --seed 0" in line for line in lines)


def test_planted_fault_reaches_other_processes(verify):
    with jit.settings(patches=FAULT):
        code, made, _ = verify("--cases smoke --workers 2")
    assert code == 1
    assert sum(row["tiers"]["T1"]["verdict"] == "fail" for row in made["cases"]) >= len(made["cases"]) // 2


def test_case_that_raises(verify, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a block deadlocked")

    monkeypatch.setattr(kernels, "outputs", broken)
    code, made, lines = verify("--case smoke-ragged")
    assert code == 1
    assert made["cases"][0]["errors"] == {"exception": "RuntimeError: a block deadlocked"}
    assert "a block deadlocked" in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "known"),
    [("--cases smoke,nonsense", "edge"), ("--case nonsense", "smoke-ragged"), ("--device gpu", "a GPU")],
)
def test_refusals(capsys, tmp_path, arguments, known):
    if "gpu" in arguments and no_gpu_reason() is None:
        pytest.skip("there is a GPU")
    assert command.main([*arguments.split(), "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert known in told
    assert "expected" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["--depth shallow", "--device tpu", "--seed x", "nonsense", "--skip cases"])
def test_parser_refuses(arguments):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments.split())
    assert refused.value.code == 2


def test_names_are_unique():
    names = [case.name for cases in LISTS.values() for case in cases]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", LISTS)
def test_reproduce_commands_say_the_same_case(name):
    for list_name, case in run.choose([name], [], 7, "quick"):
        row = run.describe(run.Task(case, list_name, "cpu", "x"))
        python, module, package, *arguments = shlex.split(row["reproduce"])
        assert (python, module, package) == ("python", "-m", "verify")
        given = command.parser().parse_args(arguments)
        assert run.choose(list(LISTS), given.case, given.seed, given.depth) == [(name, case)]
        assert given.device == "cpu"


def test_seeds():
    quick, full = (run.choose(["smoke"], [], None, depth) for depth in ("quick", "full"))
    assert len(full) == run.SEEDS["full"] * len(quick)
    assert len({(case.name, case.seed) for _, case in full}) == len(full)
    assert {case.seed for _, case in run.choose(["smoke"], [], 3, "full")} == {3}


def test_same_row_every_time():
    task = run.Task(LISTS["smoke"][0], "smoke", "cpu", "x")
    first, second = ({**run.judge(task)[0], "seconds": 0} for _ in range(2))
    assert first == second


def test_permuted_pages_hold_the_same_tokens():
    inputs = build(Case("permuted", context_lens=(70, 0, 33), pages="shared", layout="HND", memory="padded"))
    moved = kernels.permuted(inputs)
    assert not np.array_equal(moved.page_table, inputs.page_table)
    for a, b in zip(reference.paged_decode(**inputs.call()), reference.paged_decode(**moved.call()), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["contiguous", "interleaved", "stacked", "padded"])
def test_arrays_keep_their_strides_on_the_device(memory):
    import cupy

    inputs = build(Case("moved", context_lens=(20, 7), memory=memory, dtype="bfloat16"))
    for one in (inputs, kernels.permuted(inputs)):
        for name, moved in kernels.on_device(one, cupy).items():
            if isinstance(moved, cupy.ndarray):
                given = getattr(one, name)
                assert one is not inputs or moved.strides == given.strides
                assert np.array_equal(cupy.asnumpy(moved).view(np.uint8), np.ascontiguousarray(given).view(np.uint8))


@pytest.mark.gpu
def test_smoke_on_the_gpu(tmp_path):
    assert command.main(["--cases", "smoke", "--device", "gpu", "--out", str(tmp_path)]) == 0


def test_ratchet(verify, capsys):
    pick = "--cases smoke"
    assert command.main(["ratchet", "--device", "cpu", *pick.split()]) == 0
    assert capsys.readouterr().out == ""
    assert command.main(["ratchet", "--renew", "--device", "cpu", *pick.split()]) == 0
    records = json.loads(ratchet.RATCHET.read_text())
    (device,) = records
    assert device == run.ratchet_device(environment("cpu")["device"])
    code, made, _ = verify(pick)
    assert code == 0
    assert {row["tiers"]["T8"]["verdict"] for row in made["pools"]} == {"pass"}
    # As if the kernels had once been twice as good in one configuration.
    name = next(name for name, measures in records[device].items() if measures["ratio"] > 0.1)
    records[device][name]["ratio"] /= 2
    ratchet.RATCHET.write_text(json.dumps(records))
    code, made, lines = verify(pick)
    assert code == 1
    assert name.partition(": ")[2] in lines[-1]
    # Other seeds are other cases.
    assert verify(f"{pick} --seed 5")[0] == 0


def test_ratchet_records_no_failure(capsys):
    with jit.settings(patches=FAULT):
        assert command.main(["ratchet", "--renew", "--device", "cpu", "--cases", "smoke"]) == 1
    assert "FAIL: nothing recorded" in capsys.readouterr().out
    assert not ratchet.RATCHET.exists()


def test_parts(verify, monkeypatch):
    asked = []
    module = types.ModuleType("verify.fake")

    def matrix(depth, device, *, workers, progress):
        asked.append((depth, device))
        progress("one")
        return [{"name": "m", "killed_by": [["T1", "normal"]], "allclose_1e2_on_randn": "missed"}]

    def broken(depth, device, *, workers, progress):
        raise RuntimeError("no picture")

    module.matrix, module.broken, module.__spec__ = matrix, broken, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "verify.fake", module)
    monkeypatch.setattr(command, "default_lists", lambda device, depth: ["smoke"])
    monkeypatch.setattr(run, "LISTS", {"smoke": LISTS["smoke"][:1]})
    monkeypatch.setattr(command, "PARTS", {"mutants": ("fake", "matrix"), "experiments": ("fake", "broken")})
    code, made, _ = verify("")
    assert code == 1
    assert asked == [("quick", "cpu")]
    assert made["failed"] == ["mutant m", "experiments"]
    assert "no picture" in made["experiments"][0]["summary"]
    code, made, lines = verify("--skip mutants --skip experiments")
    assert (code, made["mutants"], made["experiments"]) == (0, [], [])
    assert lines[-1].endswith("not run: mutants, experiments")


def test_device():
    assert choose_device("cpu") == "cpu"
    assert choose_device("auto") == ("cpu" if no_gpu_reason() else "gpu")
    with pytest.raises(ValueError, match=r"device: expected one of auto, cpu, gpu, got 'tpu'"):
        choose_device("tpu")
