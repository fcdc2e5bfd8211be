"""The launch site: parameters read off the text, arguments checked against them."""

import re

import numpy as np
import pytest

from cupy_kernels import jit
from cupy_kernels.host import build

TEXT = """
extern "C" __global__ void __launch_bounds__(THREADS, 2) first(
    const KV* __restrict__ x,   // [n, head_dim], a comment with (brackets), commas
    float* out,                 // [n] or null: not wanted
    // a line of its own
    const bool* mask,
    long long stride,
    unsigned count,
    float scale) {
}

extern "C" __global__ void second(
    int* y) {
}
"""


class TestParameters:
    def test_every_kind(self):
        found = jit.parse_parameters(TEXT, {"KV": "__half", "THREADS": 128})
        assert list(found) == ["first", "second"]
        assert found["first"] == (
            jit.Parameter("x", "__half", True, False),
            jit.Parameter("out", "float", True, True),
            jit.Parameter("mask", "bool", True, False),
            jit.Parameter("stride", "long long", False, False),
            jit.Parameter("count", "unsigned", False, False),
            jit.Parameter("scale", "float", False, False),
        )
        assert found["second"] == (jit.Parameter("y", "int", True, False),)

    def test_two_on_a_line_are_refused(self):
        text = 'extern "C" __global__ void bad(\n    int a, int b) {\n}'
        with pytest.raises(ValueError, match=re.escape("bad: expected one parameter a line, got 'int a, int b'")):
            jit.parse_parameters(text, {})

    @pytest.mark.parametrize("file", sorted(path.name for path in jit.KERNELS.glob("*.cu")))
    def test_all_of_the_product(self, file):
        text = jit.read_source(file)
        kernels = jit.parse_parameters(text, {})
        # none was missed, and every parameter has a type that the launch site can pass
        assert len(kernels) == len(re.findall(r"__global__", text)) > 0
        constants = {"KV": "float", "IN": "float", "OUT": "float", "T": "float", "LSE": "float"}
        for parameters in jit.parse_parameters(text, constants).values():
            assert parameters
            assert {p.c_type for p in parameters} <= set(jit.DTYPES), file


MERGE = {"WIDTH": 1, "BATCH": 8, "THREADS": 128}


def merge_arguments():
    kernel = jit.kernel("merge.cu", "merge", IN="float16", OUT="float32", **MERGE)
    arguments = {p.name: 1 for p in kernel.parameters}
    o_part = np.array([[[[1, 2, 3, 4]]]], np.float16)
    arrays = {"o_part": o_part, "lse_part": np.zeros((1, 1, 1), np.float32)}
    arrays |= {"o": np.zeros((1, 1, 4), np.float32), "lse": np.full((1, 1), 7, np.float32)}
    return kernel, arguments | arrays | {"head_dim": 4}


class TestArguments:
    def test_valid(self):
        kernel, arguments = merge_arguments()
        kernel(np, (1, 1, 1), 128, 0, **arguments)
        assert arguments["o"].tolist() == [[[1, 2, 3, 4]]]
        assert arguments["lse"].tolist() == [[0]]

    @pytest.mark.parametrize(
        ("change", "error", "text"),
        [
            ({"inner": None}, TypeError, "merge.inner: expected an integer, got NoneType"),
            ({"inner": 1.0}, TypeError, "merge.inner: expected an integer, got float"),
            ({"inner": 2**31}, ValueError, "merge.inner: expected -2147483648 to 2147483647, got 2147483648"),
            (
                {"o_outer_stride": 2**63},
                ValueError,
                "merge.o_outer_stride: expected -9223372036854775808 to 9223372036854775807, ",
            ),
            ({"o": None}, TypeError, "merge.o: expected a numpy array, got NoneType"),
            ({"o": [1.0]}, TypeError, "merge.o: expected a numpy array, got list"),
            ({"o": np.zeros(4)}, TypeError, "merge.o: expected dtype float32, got float64"),
            ({"o_part": np.zeros(4, np.float32)}, TypeError, "merge.o_part: expected dtype float16, got float32"),
            ({"o_part": np.zeros(4, np.uint16)}, TypeError, "merge.o_part: expected dtype float16, got uint16"),
            ({"more": 1}, TypeError, "merge: expected arguments o_part, lse_part, o, lse, rows, inner, num_states, "),
        ],
    )
    def test_wrong(self, change, error, text):
        kernel, arguments = merge_arguments()
        with pytest.raises(error, match="^" + re.escape(text)):
            kernel(np, (1, 1, 1), 128, 0, **arguments | change)
        assert arguments["lse"].tolist() == [[7]]

    @pytest.mark.parametrize("name", [p.name for p in jit.kernel("merge.cu", "merge", IN="float32", OUT="float32").parameters])
    def test_missing(self, name):
        kernel, arguments = merge_arguments()
        del arguments[name]
        with pytest.raises(TypeError, match=f"^merge: expected arguments .*, got a difference in {name}$"):
            kernel(np, (1, 1, 1), 128, 0, **arguments)

    def test_scalars_take_the_declared_type(self):
        kernel, arguments = merge_arguments()
        values = dict(zip((p.name for p in kernel.parameters), kernel.check(np, arguments), strict=True))
        # a Python float would travel as a double
        assert type(values["log2_per_unit"]) is np.float32
        assert type(values["inner"]) is np.int32
        assert type(values["o_outer_stride"]) is np.int64

    def test_null_only_where_the_text_says_so(self):
        pair = jit.kernel("merge.cu", "merge_pair", IN="float32", OUT="float32", **MERGE)
        assert [p.name for p in pair.parameters if p.nullable] == ["mask"]

    def test_a_grid_without_blocks_launches_nothing(self):
        kernel, arguments = merge_arguments()
        kernel(np, (0, 1, 1), 128, 0, **arguments)
        assert arguments["lse"].tolist() == [[7]]


class TestSource:
    def test_includes_are_expanded_once(self):
        text = jit.read_source("partial.cu")
        assert '#include "' not in text
        assert text.count("struct Softmax {") == 1
        assert "#include <cuda_fp16.h>" in text

    def test_the_cpu_gets_its_own_instructions(self):
        assert "asm(" in jit.read_source("merge.cu")
        assert "asm(" not in jit.read_source("merge.cu", for_cpu=True)

    @pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("float", None)])
    def test_a_patch_has_to_match_once(self, old, count):
        with (
            jit.settings(patches=[("state.cuh", old, "x")]),
            pytest.raises(ValueError, match=r"^state\.cuh: expected .* once, got"),
        ):
            jit.kernel("merge.cu", "merge", IN="float32", OUT="float32", **MERGE)

    def test_a_patched_kernel_is_another_kernel(self):
        options = {"IN": "float32", "OUT": "float32", **MERGE}
        plain = jit.kernel("merge.cu", "merge", **options)
        with jit.settings(patches=[("state.cuh", "l == 0.f; }", "l <= 0.f; }")]):
            assert jit.kernel("merge.cu", "merge", **options) is not plain
        assert jit.kernel("merge.cu", "merge", **options) is plain

    def test_settings_come_back_after_an_error(self):
        with pytest.raises(KeyError), jit.settings(seed=5, sanitize=True):
            raise KeyError
        assert jit._settings == {"seed": 0, "sanitize": False, "readable": False, "patches": ()}

    def test_no_fast_math(self):
        # it would replace exp2, log2 and division, flush subnormals, and drop NaN
        for option in (*jit.OPTIONS, *build.FLAGS):
            assert "fast" not in option
            assert not re.search(r"ftz|prec-div|prec-sqrt|finite|unsafe", option)
