"""Who may import whom, how long a file may get, and what importing the product may ask for."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "cupy_kernels": set(),
    "reference": set(),
    "verify": {"cupy_kernels", "reference"},
    "bench": {"verify", "cupy_kernels"},
    "tests": {"cupy_kernels", "reference", "verify", "bench"},
}
# bench is held to the rules as soon as it is there; the others may never vanish.
REQUIRED = ["cupy_kernels", "reference", "verify"]
TORCH_USERS = {"bench/peers.py"}
# "Not much over 250 and 150", made a number.
MAX_FILE_LINES, MAX_KERNEL_LINES = 300, 180


def imported_modules(tree):
    """(line, module) of every absolute import, import_module("...") and __import__("...") included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def layering_violations(root):
    """Every forbidden import below root, as "file:line: module"."""
    for package, allowed in MAY_IMPORT.items():
        forbidden = MAY_IMPORT.keys() - allowed - {package}
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for line, module in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
                top = module.partition(".")[0]
                if top in forbidden or (top == "torch" and name not in TORCH_USERS):
                    yield f"{name}:{line}: {module}"


def size_violations(root):
    """Every file and every kernel of the packages that has become too long."""
    for package in MAY_IMPORT.keys() - {"tests"}:
        for path in sorted((root / package).rglob("*")):
            if path.suffix not in {".py", ".cu", ".cuh", ".h", ".hpp", ".cpp"}:
                continue
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(root).as_posix()
            if (count := text.count("\n")) > MAX_FILE_LINES:
                yield f"{name}: {count} lines"
            # A kernel ends at the first brace in column 0.
            for kernel in re.finditer(r"__global__.*?^\}", text, re.DOTALL | re.MULTILINE):
                if (count := kernel[0].count("\n") + 1) > MAX_KERNEL_LINES:
                    yield f"{name}: a kernel of {count} lines"


@pytest.mark.parametrize("package", REQUIRED)
def test_package_is_there(package):
    assert (ROOT / package / "__init__.py").is_file()


def test_layering():
    assert list(layering_violations(ROOT)) == []


def test_sizes():
    assert list(size_violations(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "line", "caught"),
    [
        ("cupy_kernels/deep/plan.py", "import reference.dense", True),
        ("cupy_kernels/plan.py", "def f():\n    from verify import cases", True),
        ("reference/dense.py", "from cupy_kernels.plan import split_ranges", True),
        ("reference/dense.py", "__import__('cupy_kernels')", True),
        ("verify/cases.py", "importlib.import_module('bench.decode')", True),
        ("bench/decode.py", "import numpy, reference", True),
        ("cupy_kernels/jit.py", "import torch.cuda", True),
        ("bench/decode.py", "import torch", True),
        ("bench/peers.py", "import torch", False),
        ("verify/cases.py", "from reference import dense\nfrom cupy_kernels import merge_state", False),
        ("cupy_kernels/jit.py", "from . import plan\nimport referenceable", False),
    ],
)
def test_planted_import(tmp_path, file, line, caught):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert bool(list(layering_violations(tmp_path))) == caught


def test_planted_sizes(tmp_path):
    (tmp_path / "verify").mkdir()
    (tmp_path / "verify/long.py").write_text("\n" * (MAX_FILE_LINES + 1))
    (tmp_path / "verify/long.cu").write_text("__global__ void k() {\n" + " ;\n" * MAX_KERNEL_LINES + "}\n")
    assert len(list(size_violations(tmp_path))) == 2


def test_product_imports_with_numpy_and_ml_dtypes_alone():
    program = """
import importlib, pkgutil, sys
for name in ("cupy", "torch", "cuda", "scipy", "mpmath", "rich", "jinja2", "matplotlib", "hypothesis",
             "pytest", "reference", "verify", "bench", "tests"):
    sys.modules[name] = None
import cupy_kernels
for module in pkgutil.walk_packages(cupy_kernels.__path__, "cupy_kernels."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
