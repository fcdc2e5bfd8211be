"""The build of the CPU stand-in: its cache, and what is said when a compiler or CuPy is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_kernels.host import build

ROOT = Path(__file__).parents[1]


class TestCache:
    SOURCE = 'extern "C" __global__ void cached(int* x) { *x = VALUE; }'

    @pytest.fixture(autouse=True)
    def fresh(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CUPY_KERNELS_CACHE_DIR", str(tmp_path))
        yield tmp_path
        build._compiler.cache_clear()
        build._headers.cache_clear()

    def build(self, source=SOURCE, names=("cached",), defines=("-DVALUE=1",)):
        return build.build(source, names, defines)

    def test_same_ingredients_same_file(self, tmp_path):
        library = self.build()
        written = library.stat().st_mtime_ns
        assert library.parent == tmp_path
        assert self.build() == library
        assert library.stat().st_mtime_ns == written
        # nothing is left behind
        assert list(tmp_path.iterdir()) == [library]

    def test_every_ingredient_changes_the_key(self, monkeypatch):
        found = {self.build()}
        found.add(self.build(defines=("-DVALUE=2",)))
        found.add(self.build(source=self.SOURCE + " "))
        with monkeypatch.context() as patch:
            patch.setattr(build, "FLAGS", [*build.FLAGS, "-DANOTHER"])
            found.add(self.build())
        command, version, features = build._compiler()
        for other in ((command, version + "x", features), (command, version, ()), ((*command, "-O1"), version, features)):
            with monkeypatch.context() as patch:
                patch.setattr(build, "_compiler", lambda other=other: other)
                found.add(self.build())
        with monkeypatch.context() as patch:
            patch.setattr(build, "_headers", lambda: {"cuda.h": "changed"})
            found.add(self.build())
        # CPUs without the features share the key of the second of the three
        assert len(found) == (8 if features else 7)

    def test_the_cache_directory(self, monkeypatch, tmp_path):
        assert build.cache_dir() == tmp_path
        monkeypatch.delenv("CUPY_KERNELS_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert build.cache_dir() == tmp_path / "xdg" / "cupy_kernels"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert build.cache_dir() == Path.home() / ".cache" / "cupy_kernels"


CALL = """
import sys
import numpy as np
{before}
from cupy_kernels import merge_states
merge_states({o}, np.zeros((1, 2), np.float32))
"""


def fails(before="", o="np.zeros((1, 2, 8), np.float32)", **environment):
    """The last line of what a process says that merges two states."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "PATH")}
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(before=before, o=o)],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


# No wheel with a compiler, whether there is one or not.
NO_ZIG = "import importlib.util as u; found = u.find_spec; u.find_spec = lambda name: None if name == 'ziglang' else found(name)"


class TestWhatIsMissing:
    def test_no_compiler(self, tmp_path):
        assert fails(NO_ZIG, PATH=str(tmp_path)) == (
            "cupy_kernels.host.build.CompilerNotFoundError: NumPy arrays need a C++ compiler: "
            "expected CXX, c++, g++, clang++ or the ziglang wheel, got none. "
            "Install one (Debian: apt install g++; anywhere: pip install ziglang), or pass CuPy arrays."
        )

    def test_a_compiler_that_is_nowhere(self):
        assert fails(CXX="no-such-compiler -O3", PATH=os.environ["PATH"]) == (
            "cupy_kernels.host.build.CompilerNotFoundError: "
            "CXX: expected a C++ compiler, got 'no-such-compiler -O3', which is not on the PATH"
        )

    @pytest.mark.parametrize("interface", ["__dlpack__", "__cuda_array_interface__"])
    def test_no_cupy(self, interface):
        # something that says it lies on a GPU
        members = {
            "__dlpack__": "__dlpack__ = None; __dlpack_device__ = lambda self: (2, 0)",
            "__cuda_array_interface__": "__cuda_array_interface__ = {}",
        }[interface]
        before = f"sys.modules['cupy'] = None\nclass OnGpu:\n    {members}"
        assert fails(before, o="OnGpu()", PATH=os.environ["PATH"]) == (
            "ImportError: arrays on a GPU need CuPy: pip install 'cupy-kernels[cuda13x]' (CUDA 13) "
            "or 'cupy-kernels[cuda12x]' (CUDA 12)"
        )

    def test_another_device(self):
        before = "class OnMetal:\n    __dlpack__ = None; __dlpack_device__ = lambda self: (8, 0)"
        assert fails(before, o="OnMetal()", PATH=os.environ["PATH"]) == (
            "TypeError: o_part: expected an array on a CPU or a CUDA device, got DLPack device type 8"
        )
