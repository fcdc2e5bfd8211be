"""`python -m verify hardware`: the errors of a device's functions, casts and tensor cores, measured instead of believed.

On a GPU all 2^32 inputs are tried. Without one, it is a sample of inputs to the CPU stand-in's functions, and the results say so.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from cupy_kernels import jit

from . import mma
from .environment import RESULTS, ROOT, environment, keep

# jit resolves names below its own kernels; an absolute path stays what it is, and its includes are the kernels' own.
SOURCE = str(ROOT / "verify" / "hardware.cu")
EVERY = 2**32
SAMPLE = 2**20
U32 = 2.0**-24
# name in the text -> what it is, the float64 function to compare with, and whether errors are relative to max(1, |exact|)
FUNCTIONS = {"ex2": ("ex2.approx.ftz.f32", "exp2", 0), "log2f": ("log2f", "log2", 1), "lg2": ("lg2.approx.f32", "log2", 1)}
# One binade of inputs: in it the fractions that range reduction leaves are all equally frequent.
BINADE = {"ex2": (0xBF800000, 2**23), "log2f": (0x40000000, 2**23), "lg2": (0x40000000, 2**23)}
HALVES = ("float16", "bfloat16")


class Device:
    """Where it is measured: array module, size of a grid that fills it, and how many of the 2^32 inputs to try."""

    def __init__(self, kind: str, inputs: int | None = None) -> None:
        self.stand_in = kind == "cpu"
        self.xp: Any = np
        self.threads, self.blocks = 32, 1
        if not self.stand_in:
            import cupy

            self.xp, self.threads = cupy, 256
            self.blocks = 16 * cupy.cuda.Device().attributes["MultiProcessorCount"]
        self.inputs = min(EVERY, inputs or (SAMPLE if self.stand_in else EVERY))
        # Odd, so that no input comes twice.
        self.step = EVERY // self.inputs | 1

    def launch(self, name: str, outputs: dict[str, Any], constants: dict[str, Any], **arguments: Any) -> dict[str, np.ndarray]:
        """One launch over the whole grid; `outputs` are dtypes of arrays with an element per thread."""
        arrays = {key: self.xp.zeros(self.blocks * self.threads, dtype) for key, dtype in outputs.items()}
        kernel = jit.kernel(SOURCE, name, THREADS=self.threads, **constants)
        kernel(self.xp, (self.blocks, 1, 1), self.threads, 0, **arguments, **arrays)
        return {key: self.to_host(array) for key, array in arrays.items()}

    def to_host(self, array: Any) -> np.ndarray:
        """A NumPy array of the same values."""
        return array if self.xp is np else self.xp.asnumpy(array)

    def multiply(self, dtype: str) -> mma.Multiply:
        """The device's `c + a b`, see `mma.Multiply`."""

        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
            pairs = lambda x: self.xp.asarray(np.ascontiguousarray(x).view(np.uint32))
            d = self.xp.zeros(c.shape, np.float32)
            kernel = jit.kernel(SOURCE, "multiply", THREADS=32, HALF=dtype)
            columns = pairs(np.swapaxes(b, 1, 2))
            kernel(self.xp, (len(a), 1, 1), 32, 0, a=pairs(a), b=columns, c=self.xp.asarray(c), d=d)
            return self.to_host(d)

        return run


def sweep_function(device: Device, name: str) -> dict[str, Any]:
    """Errors of one of `FUNCTIONS`, in units of 2^-24 where they are relative."""
    outputs = {
        "largest_ulp": np.float32, "largest": np.float32, "worst": np.uint32, "sum_relative": np.float32, "used": np.int64,
        "wrong_kind": np.int64, "wrong_input": np.uint32,
    }  # fmt: skip
    what, exact, scaled = FUNCTIONS[name]
    constants = {"FUNCTION": name, "EXACT": exact, "SCALED": scaled}
    run = lambda **inputs: device.launch("sweep_function", outputs, constants, **inputs)
    found = run(first=0, step=device.step, count=device.inputs)
    first, size = BINADE[name]
    binade = run(first=first, step=1, count=size)
    worst = max((found, binade), key=lambda x: x["largest"].max())
    wrong = found["wrong_kind"] > 0
    return {
        "what": what,
        "inputs": device.inputs,
        "counted": int(found["used"].sum()),
        "max_ulp": float(max(x["largest_ulp"].max() for x in (found, binade))),
        "error": "relative to max(1, |exact|)" if scaled else "relative",
        "max_error_u32": float(worst["largest"].max() / U32),
        "worst_input": float(worst["worst"][np.argmax(worst["largest"])].view(np.float32)),
        "mean_signed_u32": float(binade["sum_relative"].sum(dtype=np.float64) / binade["used"].sum() / U32),
        "wrong_kind": int(found["wrong_kind"].sum()),
        "wrong_input": float(found["wrong_input"][wrong][0].view(np.float32)).hex() if wrong.any() else None,
    }


def sweep_cast(device: Device, dtype: str) -> dict[str, Any]:
    """float32 to a 16-bit type, bit by bit against integer arithmetic."""
    outputs = {"mismatches": np.int64, "mismatch": np.uint32}
    found = device.launch("sweep_cast", outputs, {"HALF": dtype}, step=device.step, count=device.inputs)
    wrong = found["mismatches"] > 0
    first = f"0x{found['mismatch'][wrong][0]:08x}" if wrong.any() else None
    return {"inputs": device.inputs, "mismatches": int(found["mismatches"].sum()), "first": first}


def tensor_cores(device: Device, dtype: str, blocks: int) -> dict[str, Any]:
    """What the probes say, which model fits, and whether the stand-in gives the device's bits."""
    run, vectors = device.multiply(dtype), mma.vectors(dtype, blocks)
    got, stand_in = run(*vectors), Device("cpu").multiply(dtype)(*vectors)
    return {
        "probes": mma.read_off(run, dtype),
        "models": mma.fit(run, dtype),
        "stand_in": {"sums": got.size, "mismatches": mma.bit_mismatches(got, stand_in)},
    }


def arithmetic(functions: dict[str, Any], tensor: dict[str, Any]) -> dict[str, float]:
    """The measured fields of `verify.arithmetic.Arithmetic`, errors rounded up."""
    up = lambda x: math.ceil(x * 1000) / 1000
    fields: dict[str, float] = {
        "ex2": up(functions["ex2"]["max_error_u32"]),
        "lg2": up(functions["log2f"]["max_error_u32"]),
    }
    best = [entry["models"][0] for entry in tensor.values()]
    if all(model["mismatches"] == 0 for model in best):
        # Fewer products a step, or fewer bits, mean more error: the worse of the two types.
        fields["mma_products"] = min(model["products"] for model in best)
        fields["mma_extra_bits"] = min(model["extra"] for model in best)
    return fields


def measure(kind: str, inputs: int | None = None, blocks: int = 256) -> dict[str, Any]:
    """Everything, as `hardware.json` holds it. `kind` is "cpu" or "gpu", `inputs` of each sweep 2^32 or fewer."""
    device = Device(kind, inputs)
    names = [name for name in FUNCTIONS if name != "lg2" or not device.stand_in]
    functions = {name: sweep_function(device, name) for name in names}
    tensor = {dtype: tensor_cores(device, dtype, blocks) for dtype in HALVES}
    return {
        **environment(kind),
        "stand_in": device.stand_in,
        "functions": functions,
        "casts": {dtype: sweep_cast(device, dtype) for dtype in HALVES},
        "tensor_cores": tensor,
        "arithmetic": arithmetic(functions, tensor),
    }


def measured(device_name: str, results: Path = RESULTS) -> dict[str, float]:
    """Fields of `Arithmetic` as last measured on a device of this name (the report's "device"); none if it never was."""
    kept = [json.loads(path.read_text()) for path in results.glob("hardware-*.json")]
    kept = [entry for entry in kept if entry["device"] == device_name and not entry["stand_in"]]
    return max(kept, key=lambda entry: entry["date"])["arithmetic"] if kept else {}


def failures(found: dict[str, Any]) -> list[str]:
    """What contradicts the documentation, or the stand-in."""
    wrong = [f"{name}: {f['wrong_kind']} results of the wrong kind" for name, f in found["functions"].items() if f["wrong_kind"]]
    # Documented: 2 ulp from the correctly rounded result; 2^-22.
    limits = {"ex2": ("max_ulp", 2.5), "log2f": ("max_error_u32", 4.0), "lg2": ("max_error_u32", 4.0)}
    for name, function in found["functions"].items():
        key, limit = limits[name]
        if function[key] > limit:
            wrong.append(f"{name}: {key} {function[key]:.4g}, documented {limit}")
    wrong += [f"cast to {name}: {cast['mismatches']} mismatches" for name, cast in found["casts"].items() if cast["mismatches"]]
    for name, tensor in found["tensor_cores"].items():
        if missed := tensor["stand_in"]["mismatches"]:
            wrong.append(f"tensor cores, {name}: {missed} of {tensor['stand_in']['sums']} sums differ from the CPU stand-in's")
    return wrong


def write(console: Console, found: dict[str, Any]) -> None:
    """The figures, a line each."""
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    say(f"{found['device']}, driver {found['driver']}, CUDA {found['cuda']}, {found['date']}")
    if found["stand_in"]:
        say("No GPU: these are the CPU stand-in's own functions, on a sample of the inputs.")
    for function in found["functions"].values():
        say(
            f"{function['what']:<20} {function['inputs']:>13,} inputs  max {function['max_ulp']:.4f} ulp, "
            f"{function['max_error_u32']:.4f} u {function['error']}, at {function['worst_input']:.9g}; "
            f"mean {function['mean_signed_u32']:+.4f} u; {function['wrong_kind']} of the wrong kind"
        )
    for name, cast in found["casts"].items():
        say(f"cast to {name:<12} {cast['inputs']:>13,} inputs  {cast['mismatches']} mismatches")
    for name, tensor in found["tensor_cores"].items():
        probes, best = tensor["probes"], tensor["models"][0]
        say(
            f"mma {name:<16} {probes['products_per_step']} products a step, {probes['extra_bits']} extra bits, aligned "
            f"{probes['alignment']}, rounded {probes['final_rounding']}"
        )
        setting = f"{best['products']} products, {best['extra']} bits, {best['final_rounding']}, exponent of {best['exponent']}"
        say(f"{'':<20} best model ({setting}) misses {best['mismatches']} of {best['sums']} sums")
        say(f"{'':<20} the CPU stand-in misses {tensor['stand_in']['mismatches']} of {tensor['stand_in']['sums']}")
    say(f"for the budget, in units of 2^-24: {found['arithmetic']}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m verify hardware`."""
    parser.add_argument("--inputs", type=int, metavar="N", help=f"of each sweep; {EVERY} on a GPU, {SAMPLE} of the stand-in")
    parser.add_argument("--keep", action="store_true", help="also into verify/results/, where the error budget finds it")


def run(arguments: argparse.Namespace, device: str) -> list[str]:
    """`python -m verify hardware`: writes hardware.json, returns what is wrong. ValueError for a bad number of inputs."""
    if arguments.inputs is not None and not 1 <= arguments.inputs <= EVERY:
        raise ValueError(f"inputs: expected 1 to {EVERY}, got {arguments.inputs}")
    found = measure(device, arguments.inputs)
    write(Console(), found)
    path = arguments.out / "hardware.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    if arguments.keep:
        keep([path], found)
    return failures(found)
