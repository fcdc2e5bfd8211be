"""What pip installs: all of cupy_kernels, kernel text and headers included, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def can_build():
    """Whether the environment holds the build requirement: building in isolation would download it."""
    try:
        return int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools writes into the tree it builds."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("cupy_kernels", "reference", "verify", "bench", "tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        out,
        tree,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.skipif(not can_build(), reason="needs setuptools>=77, of the extra test")
def test_wheel_is_the_package(wheel):
    installed = {name for name in wheel if ".dist-info/" not in name}
    files = (path for path in (ROOT / "cupy_kernels").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert installed == {path.relative_to(ROOT).as_posix() for path in files}
    assert any(name.startswith("cupy_kernels/kernels/") for name in installed)
    assert any(name.startswith("cupy_kernels/host/") for name in installed)


@pytest.mark.skipif(not can_build(), reason="needs setuptools>=77, of the extra test")
def test_wheel_states_licence_and_dependencies(wheel):
    (text,) = (wheel[name].decode() for name in wheel if name.endswith(".dist-info/METADATA"))
    required = {line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist: ")}
    assert {name.split(">")[0] for name in required if "extra ==" not in name} == {"numpy", "ml_dtypes"}
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("/LICENSE") for name in wheel)
