"""The experiments: predictions against the kernels and against the budget's formula, and the map of NaN against its rules."""

import numpy as np
import pytest

from verify import empties, experiments, precision
from verify.budget import decode_budget, predict_rho
from verify.kernels import arithmetic
from verify.precision import INSIDE, PARTIALS, TOLERANCE, Storage


@pytest.fixture
def device(xp):
    return "cpu" if xp is np else "gpu"


@pytest.mark.parametrize("storage", PARTIALS, ids=str)
def test_the_formula_is_the_budgets(storage):
    case = precision.case("split_flip", 128, 8)
    names = {"o": "partial_dtype", "lse": "lse_dtype"}
    how = arithmetic(case).__class__(out_dtype="float16", tile=32, **{names[part]: storage.dtype for part in storage.parts})
    inputs, _ = precision.drawn(case)
    assert precision.Exact(case).formula(storage) == pytest.approx(
        predict_rho(decode_budget(inputs, how, num_splits=8), how), rel=1e-9
    )


def test_storages():
    assert len({str(s) for s in precision.STORAGES}) == len(precision.STORAGES) == 1 + len(PARTIALS) + len(INSIDE)
    assert Storage(()).patches == ()
    # The two dtypes differ in the kernel text's types and in nothing else.
    fp16, bf16 = (Storage(("lse", "p", "acc"), dtype).patches for dtype in ("float16", "bfloat16"))
    assert len(fp16) == 3
    assert [(f, o, n.replace("__half", "__nv_bfloat16")) for f, o, n in fp16] == list(bf16)
    assert all("__nv_bfloat16" in new for _, _, new in bf16)


@pytest.mark.parametrize(("family", "num_splits"), [("normal", 8), ("split_flip", 8), ("cancel", 8), ("pos_v", 32)])
def test_partial_states_cost_what_is_predicted(device, family, num_splits):
    each = precision.case(family, 1024, num_splits)
    exact = precision.Exact(each)
    cells = [exact.cell(each, s, precision.measure(each, s, device)) for s in PARTIALS]
    assert all(cell.claimed for cell in cells)
    assert [str(c.storage) for c in cells if c.off > TOLERANCE] == []
    # An fp16 partial o: as much again as the output's rounding, unless V has one sign or splits cancel.
    by_name = {str(cell.storage): cell.measured for cell in cells}
    low, high = {"normal": (1.35, 1.5), "split_flip": (2.5, 4), "cancel": (100, 500), "pos_v": (1, 1.05)}[family]
    assert low <= by_name["o fp16"] <= high
    assert 5 * (by_name["o fp16"] - 1) <= by_name["o bf16"]
    # Where rounding is as good as random, the formula says the same: always for o, and where lse differ for them too.
    drawn = {str(cell.storage) for cell in cells if cell.drawn}
    assert drawn >= {"o fp16", "o bf16"} | ({"lse fp16", "lse bf16"} if family in ("normal", "pos_v") else set())


def test_a_wrong_measurement_has_no_place_in_the_claims():
    each = precision.case("normal", 128, 4)
    exact, storage = precision.Exact(each), PARTIALS[0]
    good = exact.cell(each, storage, exact.ideal * exact.known(storage))
    assert good.off < TOLERANCE
    bad = exact.cell(each, storage, exact.ideal * exact.known(storage) * 1.2)
    assert bad.off > TOLERANCE
    # No claim at all is no success either.
    assert not experiments.partial_section([exact.cell(each, INSIDE[0], exact.ideal)]).passed
    assert not experiments.partial_section([good, bad]).passed
    assert experiments.partial_section([good]).passed


def test_outputs_without_a_rounding_error_are_refused():
    with pytest.raises(ValueError, match="equal"):
        precision.cells(precision.case("equal", 64, 2))


def rule(pattern, schedule, guards):
    """Which `[request, query head]` is NaN, from the lengths alone."""
    expected = np.zeros((4, 4), bool)
    for b, (length, hidden) in enumerate(zip(pattern.lens, pattern.hidden, strict=True)):
        pages = -(-length // 16)
        # The table has two columns more than the longest request has pages.
        per_split, num_splits = {
            "unsplit": (pages, 1), "4 splits": (-(-pages // 4), 4), "a page each": (1, -(-max(pattern.lens) // 16) + 2),
        }[schedule]  # fmt: skip
        splits = [range(min(i * per_split * 16, length), min((i + 1) * per_split * 16, length)) for i in range(num_splits)]
        for h in range(4):
            first_seen = hidden if h >= 2 else 0
            empty = [tokens.stop <= max(first_seen, tokens.start) for tokens in splits]
            # (-inf) - (-inf) in the first tile of 32 tokens if they are hidden all, and NaN from there on.
            poisoned = [len(tokens) > 0 and min(tokens.start + 32, tokens.stop) <= first_seen for tokens in splits]
            partial, merge = guards
            if num_splits == 1:
                expected[b, h] = not partial and (empty[0] or poisoned[0])
            elif partial:
                expected[b, h] = not merge and all(empty)
            else:
                # An empty split has lse = -inf and is selected away by a guarded merge; a poisoned one has lse = NaN.
                expected[b, h] = any(poisoned) or (not merge and any(empty))
    return expected


@pytest.mark.parametrize("guards", empties.GUARDS, ids=empties.words)
def test_the_map_of_nan_is_that_of_the_rules(device, guards):
    for pattern in empties.PATTERNS:
        inputs = empties.inputs_of(pattern)
        for schedule in empties.SCHEDULES:
            found = empties.non_finite(inputs, schedule, guards, device)
            np.testing.assert_array_equal(found, rule(pattern, schedule, guards), f"{pattern.name}, {schedule}")


def test_sections_are_whole(device):
    each = precision.case("normal", 1024, 8)
    cells = precision.cells(each, device)
    found = [experiments.partial_section(cells), experiments.inside_section(cells), experiments.cancellation_section(cells)]
    found.append(experiments.empties_section(empties.maps(device)))
    for section in found:
        assert section.passed
        assert section.figure_svg.startswith("<svg")
        assert "currentColor" in section.figure_svg
        assert section.rows
        assert all(len(row) == len(section.columns) and all(isinstance(cell, str) for cell in row) for row in section.rows)


def test_an_unguarded_kernel_fails_the_section():
    clean = {
        guards: {p.name: {s: np.zeros((4, 4), bool) for s in empties.SCHEDULES} for p in empties.PATTERNS}
        for guards in empties.GUARDS
    }
    assert experiments.empties_section(clean).passed
    clean[True, True]["only empty"]["unsplit"][2, 1] = True
    assert not experiments.empties_section(clean).passed


def test_an_unknown_depth_is_an_error():
    with pytest.raises(ValueError, match="depth"):
        experiments.sections("deep")
