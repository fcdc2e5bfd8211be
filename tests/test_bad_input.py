"""Each argument of each public function, wrong in one way: the exception, its text, and outputs left alone."""

import re

import numpy as np
import pytest
from bad_input_cases import BAD, BAD_ON_NUMPY, OUTPUTS, TOGETHER, VALID, decode_arguments, states_arguments
from helpers import CANARY, bits, on

from cupy_kernels import merge_state_in_place, merge_states, paged_decode


def refuse(xp, function, changes, error, text):
    """Calls with the changed arguments; the exception begins with the text, and no output has changed a bit."""
    arguments = VALID[function]()
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    arguments = on(xp, arguments)
    outputs = [arguments[name] for name in OUTPUTS.get(function, ()) if isinstance(arguments[name], xp.ndarray)]
    before = [bits(array).copy() for array in outputs]
    with pytest.raises(error, match="^" + re.escape(text)):
        function(**arguments)
    for array, old in zip(outputs, before, strict=True):
        np.testing.assert_array_equal(bits(array), old)


def flat(rows):
    """A row a function."""
    return [
        pytest.param(function, *row[1:], id=f"{function.__name__}-{row[1]}-{getattr(row[2], '__qualname__', repr(row[2]))[:12]}")
        for row in rows
        for function in row[0]
    ]


@pytest.mark.parametrize(("function", "argument", "change", "error", "text"), flat(BAD))
def test_argument(xp, function, argument, change, error, text):
    refuse(xp, function, {argument: change}, error, f"{argument}: {text}")


@pytest.mark.parametrize(("function", "argument", "change", "error", "text"), flat(BAD_ON_NUMPY))
def test_memory(function, argument, change, error, text):
    refuse(np, function, {argument: change}, error, f"{argument}: {text}")


@pytest.mark.parametrize(("functions", "changes", "error", "text"), TOGETHER)
def test_together(xp, functions, changes, error, text):
    for function in functions:
        refuse(xp, function, changes, error, text)


@pytest.mark.parametrize("function", VALID)
def test_the_arguments_are_valid_but_for_the_change(xp, function):
    arguments = on(xp, VALID[function]())
    function(**arguments)
    for name in OUTPUTS.get(function, ()):
        if function is not merge_state_in_place or name == "lse":
            assert np.all(bits(arguments[name]) != bits(np.full((), CANARY, arguments[name].dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["k_cache", "v_cache", "page_table", "context_lens", "out", "lse_out"])
def test_arrays_of_two_kinds(argument):
    import cupy

    arguments = on(cupy, decode_arguments())
    arguments[argument] = decode_arguments()[argument]
    text = f"{argument}: expected a cupy array as the first argument is, got a numpy array"
    with pytest.raises(TypeError, match="^" + re.escape(text)):
        paged_decode(**arguments)


def test_positional_options_are_refused():
    args = decode_arguments()
    with pytest.raises(TypeError, match="positional"):
        paged_decode(*(args[name] for name in ("q", "k_cache", "v_cache", "page_table", "context_lens")), 0.5)
    with pytest.raises(TypeError, match="positional"):
        merge_states(*states_arguments().values(), "float32")
