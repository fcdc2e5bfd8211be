"""The probe for the GPU, the array modules under test, and a header that says what a run could not cover."""

import functools
import importlib
import os
import platform
import shutil
import subprocess

import hypothesis
import numpy as np
import pytest

# Found examples belong into the tests, not into a database beside them.
hypothesis.settings.register_profile(
    "cupy_kernels", deadline=None, database=None, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("cupy_kernels")


@functools.cache
def no_gpu_reason():
    """Why nothing can run on a GPU here; None if it can."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {error}"
    return None if count else "no GPU: CuPy sees no device"


def describe_gpu():
    """Device, driver, CUDA and CuPy in one line."""
    if no_gpu_reason():
        return no_gpu_reason()
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (
        subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which(query[0]) else []
    )
    return (
        f"gpu: {properties['name'].decode()} (sm_{properties['major']}{properties['minor']}, "
        f"{properties['multiProcessorCount']} SMs), driver {driver[0] if driver else 'unknown'}, "
        f"CUDA {cupy.cuda.runtime.runtimeGetVersion()} of {cupy.cuda.runtime.driverGetVersion()}, "
        f"CuPy {cupy.__version__}"
    )


def describe_compiler():
    """The first line of the C++ compiler's --version."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        return "none"
    return subprocess.run([found, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="a GPU test without a GPU fails instead of being skipped"
    )


def pytest_report_header():
    versions = f"python {platform.python_version()}, numpy {np.__version__}"
    return [describe_gpu(), f"{versions}, compiler {describe_compiler()}"]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and no_gpu_reason():
        if item.config.getoption("--require-gpu"):
            pytest.fail(no_gpu_reason(), pytrace=False)
        pytest.skip(no_gpu_reason())


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array module: the kernels run where its arrays are."""
    return importlib.import_module(request.param)
