"""The checker is tested: planted faults are killed, what is healthy is not, and a harness that checks nothing says so."""

from dataclasses import replace

import numpy as np
import pytest

from verify import mutation
from verify.mutants import MUTANTS, Mutant
from verify.probes import PROBES

CLASSICS = {
    "o without lse", "NaN from empty splits", "merge without the maximum", "16-bit partials",
    "a token cut that counts the border page twice",
}  # fmt: skip
# Each classic mistake by the variant that is hardest to see, a healthy change, and one seen in non-finite elements alone.
FEW = ("merge_without_max", "average_of_o", "zero_over_zero", "partial_fp16", "border_page_twice", "token_cut", "nan_laundered")


@pytest.fixture
def device(xp):
    return "cpu" if xp is np else "gpu"


def probe(kind):
    return next(p for p in PROBES if p.kind == kind)


def mutant(name):
    return next(m for m in MUTANTS if m.name == name)


def test_names_rows_and_classics():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert {m.row for m in MUTANTS} == set(range(1, 41))
    assert {m.classic for m in MUTANTS if m.classic} == CLASSICS
    assert [m.name for m in MUTANTS if m.healthy] == ["token_cut"]
    assert len({p.kind for p in PROBES}) == len(PROBES)
    assert set(mutation.QUICK_KINDS) <= {p.kind for p in PROBES}
    assert set(mutation.QUICK_MUTANTS) <= {m.name for m in MUTANTS}


@pytest.mark.parametrize("each", MUTANTS, ids=lambda m: m.name)
def test_every_patch_applies(each):
    mutation.check_applies(each)


@pytest.mark.parametrize(
    "patches",
    [
        (),
        (("partial.cu", "no such text", "x"),),
        (("partial.cu", "acc[i] = 0.f;", "acc[i] = 0.f;"),),
        (("no_such_file.cuh", "acc", "x"),),
        (("ptx.cuh", "ex2.approx.ftz.f32", "ex2.approx.f32"),),
    ],
    ids=["none", "stale", "no change", "no file", "not on the CPU"],
)
def test_a_mutant_that_mutates_nothing_is_an_error(patches):
    with pytest.raises(ValueError, match="expected"):
        mutation.matrix(mutants=[Mutant(1, "idle", "none", patches)], probes=[probe("normal")], workers=1)


def test_nothing_to_check_is_an_error():
    with pytest.raises(ValueError, match="probes: expected at least one"):
        mutation.matrix(mutants=[mutant("no_max")], probes=[])
    with pytest.raises(ValueError, match="mutants: expected at least one"):
        mutation.matrix(mutants=[], probes=[probe("normal")])
    with pytest.raises(ValueError, match="depth"):
        mutation.matrix("deep")
    assert not mutation.passed([])


def test_text_that_does_not_compile_is_no_kill():
    broken = Mutant(1, "broken", "no C++", (("merge.cu", "float top = own_x;", "float top = ;"),))
    with pytest.raises(RuntimeError, match="compile"):
        mutation.matrix(mutants=[broken], probes=[probe("tail_nan")], workers=1)


def test_survivors_and_false_alarms_are_named():
    # Another text for the same zero: a change, and no fault that any input could show.
    harmless = Mutant(1, "harmless", "none", (("merge.cu", "a *= alpha;", "a = a * alpha;"),))
    fault = replace(mutant("sum_of_o"), healthy=True)
    rows = mutation.matrix(mutants=[harmless, fault], probes=[probe("tail_nan")], workers=1)
    assert [row["verdict"] for row in rows] == ["survived", "false alarm"]
    assert not any(mutation.passed([row]) for row in rows)


def test_few(device):
    chosen = [mutation.HEALTHY, *map(mutant, FEW)]
    rows = {row["name"]: row for row in mutation.matrix("quick", device, mutants=chosen, workers=1)}
    assert mutation.passed(list(rows.values()))
    assert [name for name, row in rows.items() if row["verdict"] == "clean"] == ["healthy", "token_cut"]
    # What cancels in the output is in the partial states; NaN has a tier of its own.
    assert "T6" in rows["partial_fp16"]["tiers"]
    assert "T7" in rows["zero_over_zero"]["tiers"]
    assert rows["nan_laundered"]["families"] == ["inf_q"]
    assert rows["partial_fp16"]["allclose_1e2_on_randn"] == rows["merge_without_max"]["allclose_1e2_on_randn"] == "missed"
    assert rows["average_of_o"]["allclose_1e2_on_randn"] == "killed"
    assert rows["token_cut"]["pages"]["tokens"] > rows["token_cut"]["pages"]["pages"]


@pytest.mark.slow
@pytest.mark.parametrize("each", [m for m in MUTANTS if m.name not in FEW], ids=lambda m: m.name)
def test_every_mutant_is_killed_by_the_fewest_kinds(device, each):
    (row,) = mutation.matrix("quick", device, mutants=[each], workers=1)
    assert row["verdict"] == "killed", row


@pytest.mark.slow
def test_nothing_healthy_is_killed_by_any_kind(device):
    rows = mutation.matrix("full", device, mutants=[mutation.HEALTHY, mutant("token_cut")], workers=1)
    assert [(row["verdict"], row["killed_by"]) for row in rows] == [("clean", [])] * 2


def test_processes_give_the_same_rows(device):
    chosen = {"mutants": [mutation.HEALTHY, mutant("average_of_o")], "probes": [probe("tail_nan"), probe("randn_mqa")]}
    assert mutation.matrix(device=device, workers=2, **chosen) == mutation.matrix(device=device, workers=1, **chosen)
