"""The hardware probes: they compile for every architecture, find what is planted, and agree with the CPU stand-in."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cupy_kernels import jit
from verify import Arithmetic, hardware, mma
from verify.__main__ import main


@pytest.mark.parametrize("half", hardware.HALVES)
@pytest.mark.parametrize("function", hardware.FUNCTIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles(arch, function, half):
    core = pytest.importorskip("cuda.core")
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(folder, "cu13", "include") for folder in nvidia.submodule_search_locations] if nvidia else []
    if not any(folder.exists() for folder in folders):
        pytest.skip("no CUDA headers: the wheel nvidia-cuda-runtime of the extra test")
    _, exact, scaled = hardware.FUNCTIONS[function]
    constants = {"FUNCTION": function, "EXACT": exact, "SCALED": scaled, "HALF": jit.C_TYPES[half], "THREADS": 32}
    options = core.ProgramOptions(
        std="c++17",
        arch=arch,
        include_path=[str(folder) for folder in folders],
        define_macro=[(name, str(value)) for name, value in constants.items()],
    )
    assert core.Program(jit.read_source(hardware.SOURCE), "c++", options).compile("cubin").code


@pytest.fixture(scope="module")
def found():
    return hardware.measure("cpu", inputs=2**12, blocks=16)


def test_stand_in_is_as_documented(found):
    assert found["stand_in"]
    assert hardware.failures(found) == []
    assert set(found["functions"]) == {"ex2", "log2f"}
    # A sample of 2^12 and a whole binade: the C library's functions are good to less than an ulp.
    assert 0.5 <= found["functions"]["ex2"]["max_ulp"] < 1
    assert abs(found["functions"]["ex2"]["mean_signed_u32"]) < 0.1
    assert all(cast["mismatches"] == 0 for cast in found["casts"].values())
    for tensor in found["tensor_cores"].values():
        assert (tensor["probes"]["products_per_step"], tensor["probes"]["extra_bits"]) == (16, 2)
        assert (tensor["probes"]["alignment"], tensor["probes"]["final_rounding"]) == ("toward zero", "toward zero")
        assert tensor["models"][0]["mismatches"] == 0 < tensor["models"][1]["mismatches"]
        assert tensor["stand_in"] == {"sums": 16 * 128, "mismatches": 0}
    json.dumps(found, allow_nan=False)


def test_budget_takes_what_was_measured(found):
    measured = replace(Arithmetic(), **found["arithmetic"])
    assert 1 <= measured.ex2 < Arithmetic().ex2
    assert (measured.mma_products, measured.mma_extra_bits) == (16, 2)


@pytest.mark.parametrize("model", [m for m in mma.MODELS if m.products != 16 or m.extra != 2][::5], ids=str)
def test_a_model_is_recognised(model):
    best = mma.fit(model.multiply, "float16", count=16)[0]
    assert best == {**vars(model), "sums": 16 * 128, "mismatches": 0}
    if model.final_rounding == "zero":
        probes = mma.read_off(model.multiply, "float16")
        assert (probes["products_per_step"], probes["extra_bits"]) == (model.products, model.extra)


def test_final_rounding_is_recognised():
    assert mma.read_off(mma.Model(final_rounding="nearest").multiply, "bfloat16")["final_rounding"] == "to nearest"


def test_planted_cast():
    faults = (("types.cuh", "return __float2half_rn(x);", "return __float2half_rn(x * 1.0001f);"),)
    with jit.settings(patches=faults):
        found = hardware.sweep_cast(hardware.Device("cpu", 2**12), "float16")
    assert found["mismatches"] > 0
    assert found["first"].startswith("0x")


def test_planted_function():
    fault = ((hardware.SOURCE, "got = FUNCTION(x);", "got = FUNCTION(x) * 1.000001f;"),)
    with jit.settings(patches=fault):
        found = hardware.sweep_function(hardware.Device("cpu", 2**12), "ex2")
    assert found["max_ulp"] > 5
    # 1e-6 in units of 2^-24
    assert found["mean_signed_u32"] == pytest.approx(16.8, rel=0.1)


def test_planted_infinity():
    fault = ((hardware.SOURCE, "got = FUNCTION(x);", "got = FUNCTION(x) * 1e30f;"),)
    with jit.settings(patches=fault):
        found = hardware.sweep_function(hardware.Device("cpu", 2**12), "ex2")
    assert found["wrong_kind"] > 0
    assert found["wrong_input"] is not None


def test_measured(tmp_path):
    def keep(name, **entry):
        entry = {"device": "NVIDIA H200", "stand_in": False, "date": "2026-01-01", **entry}
        (tmp_path / f"hardware-{name}.json").write_text(json.dumps(entry))

    assert hardware.measured("NVIDIA H200", tmp_path) == {}
    keep("old", arithmetic={"ex2": 3.0})
    keep("new", date="2026-02-01", arithmetic={"ex2": 2.0})
    keep("other", device="NVIDIA A100", date="2026-03-01", arithmetic={"ex2": 1.0})
    keep("stand-in", stand_in=True, date="2026-03-01", arithmetic={"ex2": 1.0})
    assert hardware.measured("NVIDIA H200", tmp_path) == {"ex2": 2.0}


def test_command(tmp_path, capsys):
    assert main(["hardware", "--device", "cpu", "--inputs", "4096", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "the CPU stand-in's own functions" in text
    assert text.splitlines()[-1].startswith("PASS")
    assert json.loads((tmp_path / "hardware.json").read_text())["stand_in"] is True
    assert main(["hardware", "--device", "cpu", "--inputs", "0", "--out", str(tmp_path)]) == 2
    assert "inputs: expected 1 to" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_sample(tmp_path):
    found = hardware.measure("gpu", inputs=2**20, blocks=64)
    assert hardware.failures(found) == []
