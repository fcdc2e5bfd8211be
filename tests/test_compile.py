"""Every specialisation through NVRTC and ptxas for four architectures: no spill, no local memory. Needs no driver, no GPU.

With a GPU, once more by the compiler that is there: another release may spill where this one does not.
"""

import io
import itertools
import re
from pathlib import Path

import pytest

from cupy_kernels import jit, tensor_core
from cupy_kernels.arrays import FLOAT_DTYPES
from cupy_kernels.decode import THREADS as PARTIAL_THREADS
from cupy_kernels.merge import BATCH
from cupy_kernels.merge import THREADS as MERGE_THREADS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# (file, entry points, constants). Another kernel joins by adding its own here.
SPECIALISATIONS = [
    *(
        ("partial.cu", ("partial",), {"KV": kv, "OUT": out, "THREADS": PARTIAL_THREADS})
        for kv, out in itertools.product(FLOAT_DTYPES, FLOAT_DTYPES)
    ),
    *(
        (
            "merge.cu",
            ("merge", "merge_pair"),
            {"IN": of_states, "OUT": out, "WIDTH": width, "BATCH": BATCH, "THREADS": MERGE_THREADS},
        )
        for of_states, out, width in itertools.product(FLOAT_DTYPES, FLOAT_DTYPES, (1, 4))
    ),
]
# Those for tensor cores are too many for a minute: 80 of each of two files, half a second an architecture. Each is compiled for
# one of these in turn, the two files for different ones; test_tensor_core.py has all of balanced.cu for sm_90.
TENSOR_CORES = [
    (source, entry_point, dict(constants), ARCHITECTURES[(i + shift) % 4])
    for source, entry_point, shift in (("balanced.cu", "balanced", 0), ("partial_mma.cu", "partial_mma", 2))
    for i, constants in enumerate(sorted({tuple(values.items()) for values in tensor_core.specialisations()}, key=str))
]
name = lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else None


def ptxas_log(text, architecture, defines=()):
    """What ptxas says about the text, compiled with the options of the product."""
    # Not importorskip: where these are missing, the test extra is not installed, and nothing was tested.
    import nvidia
    from cuda.core import Program, ProgramOptions

    headers = [str(path) for root in nvidia.__path__ for path in Path(root).glob("*/include")]
    assert headers, "the headers of the nvidia-cuda-runtime wheel"
    # CuPy adds -ftz=true to the options of every RawKernel.
    assert jit.OPTIONS == ("--std=c++17",)
    macros = [tuple(define.removeprefix("-D").split("=", 1)) for define in defines] or None
    options = ProgramOptions(
        std="c++17", arch=architecture, include_path=headers, define_macro=macros, ptxas_options=["-v"], ftz=True
    )  # fmt: skip
    log = io.StringIO()
    Program(text, "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def memory_use(log):
    """Entry point -> (stack frame, spill stores, spill loads, registers), bytes each but the last."""
    function = r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    registers = r"\n.*?Used (\d+) registers"
    return {name: tuple(map(int, numbers)) for name, *numbers in re.findall(function + registers, log)}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "entry_point", "constants", "architecture"), TENSOR_CORES, ids=name)
def test_tensor_core_kernels(source, entry_point, constants, architecture):
    kernel = jit.kernel(source, entry_point, **constants)
    log = ptxas_log(jit.read_source(source), architecture, kernel.defines)
    assert memory_use(log)[entry_point][:3] == (0, 0, 0), log
    assert "warning" not in log.lower()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("source", "entry_points", "constants"), SPECIALISATIONS, ids=name)
def test_no_spill_and_no_local_memory(source, entry_points, constants, architecture):
    kernel = jit.kernel(source, entry_points[0], **constants)
    log = ptxas_log(jit.read_source(source), architecture, kernel.defines)
    use = memory_use(log)
    assert set(use) == set(entry_points) == set(kernel.kernels), log
    for name, (stack, spill_stores, spill_loads, registers) in use.items():
        assert (stack, spill_stores, spill_loads) == (0, 0, 0), f"{name}: {log}"
        assert 0 < registers <= 255
    assert "warning" not in log.lower()


# An array indexed at run time has no registers.
LOCAL_ARRAY = """extern "C" __global__ void f(float* x, int n) {
    float y[64];
    for (int i = 0; i < n; i++) y[i] = x[i];
    for (int i = 0; i < n; i++) x[i] = y[n - 1 - i];
}"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source", "entry_point", "constants"),
    [
        *(case[:3] for case in TENSOR_CORES),
        *((source, entry, constants) for source, entries, constants in SPECIALISATIONS for entry in entries),
    ],
    ids=name,
)
def test_no_local_memory_on_the_gpu(source, entry_point, constants):
    import cupy

    if int(cupy.cuda.Device().compute_capability) >= 100 and cupy.cuda.nvrtc.getVersion() < (13, 5):
        pytest.skip("NVRTC 13.0 spills 4 to 40 bytes of some kernels on sm_100 and sm_120")
    assert jit.kernel(source, entry_point, **constants)._compiled(0).local_size_bytes == 0


@pytest.mark.gpu
def test_local_memory_is_seen_on_the_gpu():
    import cupy

    assert cupy.RawKernel(LOCAL_ARRAY, "f", jit.OPTIONS).local_size_bytes == 256


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_local_memory_and_spills_are_seen(architecture):
    assert memory_use(ptxas_log(LOCAL_ARRAY, architecture))["f"][0] == 256
    # 64 numbers at once in 16 or 24 registers a thread
    spill = """extern "C" __global__ void __maxnreg__(24) f(float* x) {
        float y[64];
        #pragma unroll
        for (int i = 0; i < 64; i++) y[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = y[63 - i] * y[(i * 7) % 64];
    }"""
    assert all(memory_use(ptxas_log(spill, architecture))["f"][:3])
