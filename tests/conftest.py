"""The probe for the GPU, the array modules under test, and a header that says what a run could not cover."""

import importlib
import os

import hypothesis
import pytest

from verify.environment import environment, no_gpu_reason

# Found examples belong into the tests, not into a database beside them.
hypothesis.settings.register_profile("cupy_kernels", deadline=None, database=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("cupy_kernels")


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="a GPU test without a GPU fails instead of being skipped")


def pytest_report_header():
    """Device, driver, CUDA and CuPy, and what the CPU side runs on: a green run can't hide what did not run."""
    found = environment("cpu" if no_gpu_reason() else "gpu")
    device = no_gpu_reason() or f"gpu: {found['device']}, {found['sms']} SMs, driver {found['driver']}, CUDA {found['cuda']}"
    cpu = f"python {found['python']}, numpy {found['numpy']}, cupy {found['cupy']}, compiler {found['compiler']}"
    return [device, cpu]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and no_gpu_reason():
        if item.config.getoption("--require-gpu"):
            pytest.fail(no_gpu_reason(), pytrace=False)
        pytest.skip(no_gpu_reason())


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array module: the kernels run where its arrays are."""
    module = importlib.import_module(request.param)
    yield module
    if request.param == "cupy":
        # Several processes share the device, and some tests take a good part of its memory.
        module.get_default_memory_pool().free_all_blocks()
