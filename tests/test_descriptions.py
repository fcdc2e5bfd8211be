"""The descriptions of our kernels: which of them takes a case, the cut into equal shares, and errors that only they explain."""

import numpy as np
import pytest

from cupy_kernels import jit, merge_states
from cupy_kernels.merge import ALGORITHMS, BATCH, WARPS
from cupy_kernels.tensor_core import Config, plan_grid
from verify import SOURCES, Arithmetic, Case, build, decode_budget, head_budget, kernels, merge_budget
from verify.accumulation import Layout
from verify.budget import merge_order
from verify.descriptions import balanced_orders
from verify.lists import LISTS
from verify.states import build_states, states


@pytest.mark.parametrize("list_name", ["smoke", "edge"])
def test_cases_take_the_kernels_that_they_say(list_name):
    for case in LISTS[list_name]:
        if case.name.startswith(("smoke", "memory", "dim", "balanced-heads")):
            # RuntimeError otherwise.
            with jit.settings(readable=case.kernel == "readable"):
                kernels.plan(case, build(case).call())
    assert {case.on_tensor_cores for case in LISTS[list_name]} == {False, True}


def test_equal_shares_by_hand():
    grid = plan_grid(batch_size=4, num_kv_heads=1, group_size=1, head_dim=64, num_sms=5, config=Config(warps=2))
    # 13, 0, 3 and 1 units of 16 tokens: 17 in all, 4 a share, cut from the end, so that shares begin at units 0, 1, 5, 9 and 13.
    orders = balanced_orders([200, 0, 33, 5], 16, grid)
    cuts = [[(share[0][0].start, max(state[-1].stop for state in share)) for share in order] for order in orders]
    assert cuts == [[(0, 16), (16, 80), (80, 144), (144, 200)], [], [(0, 33)], [(0, 5)]]
    # Two warps take the tiles of a share in turn.
    assert orders[0][1] == [[range(16, 32), range(48, 64)], [range(32, 48), range(64, 80)]]
    # Units are whole pages, and a share has a tile for each of 4 warps: 2 pages of 32 tokens, however many shares there could be.
    grid = plan_grid(batch_size=1, num_kv_heads=1, group_size=1, head_dim=64, num_sms=50, config=Config(warps=4))
    (order,) = balanced_orders([250], 32, grid)
    assert [share[0][0].start for share in order] == [0, 64, 128, 192]


def test_exponentials_and_roundings_of_a_merge_by_hand():
    a = Arithmetic(share_ways=(2,))
    assert a.merging(1, 1) == (0, 0)
    # 8 warps at once, 16 in four batches.
    assert a.merging(8, 1) == (1, 8)
    assert a.merging(16, 1) == (4, 19)
    # 20 shares by 2 threads: 10 each in three batches, then their two sums.
    assert a.merging(8, 20) == (1 + 1 + 2 + 1, 8 + 10 + 2 + 2)


MERGE = {"merge_ways": WARPS, "merge_batch": BATCH}


def test_states_are_dealt_to_warps():
    a = Arithmetic(**MERGE)
    assert Case("c").arithmetic().merge_ways == Case("c", kernel="readable").arithmetic().merge_ways == WARPS
    assert [a.merge_way(i) for i in (0, 7, 8, 63, 64)] == [0, 0, 1, 7, 0]
    assert merge_order(70, a) == [[range(8), range(64, 70)], *([range(i, i + 8)] for i in range(8, 64, 8))]
    assert merge_order(9, Arithmetic(merge="online", **MERGE))[1] == [range(8, 9)]
    assert merge_order(70, Arithmetic()) == [[range(70)]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", states, ids=lambda case: case.name)
def test_the_merge_kernel_does_what_its_description_says(case, algorithm):
    o, lse = build_states(case)
    budget = merge_budget(o, lse, Arithmetic(merge=algorithm, out_dtype=case.dtype, **MERGE))
    with np.errstate(invalid="ignore"):
        for got, want, bound in zip(
            merge_states(o, lse, algorithm=algorithm), (budget.out, budget.lse), (budget.total, budget.lse_total), strict=True
        ):
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            assert np.all((np.abs(got.astype(np.float64) - want) <= bound) | ~np.isfinite(want))


def test_a_lazy_maximum_is_an_interval():
    scores = np.array([[0.0, 1.0, 5.0, 4.0], [0.0, 0.0, 0.0, 9.0]])
    layout = Layout.of([[[range(i, i + 1) for i in range(4)]]], 4)
    at_once, lazy = (layout.running_maximum(scores, np.full(2, 1e-6), lazy=x) for x in (0.0, 3.0))
    assert at_once.tokens.tolist() == at_once.low.tolist() == [[0, 1, 5, 5], [0, 0, 0, 9]]
    # Head 0 is raised at 5; head 1 may be raised with it, to what it has seen, and must be at 9.
    assert lazy.low.tolist() == [[0, 0, 5, 5], [0, 0, 0, 9]]
    assert lazy.tokens.tolist() == [[0, 0, 5, 5], [0, 0, 0, 9]]
    assert lazy.later_changes[0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flushed_subnormals_need_their_term(dtype):
    case = next(case for case in LISTS["edge"] if case.name == f"subnormal-{dtype}")
    inputs = build(case)
    made, how = kernels.outputs(case, inputs, "cpu"), case.arithmetic()
    budget = decode_budget(inputs, how, kernels.orders(case, inputs, made, how))
    error = np.abs(made.decode[0].astype(np.float64) - budget.out)
    assert (error <= budget.total).all()
    assert (error > budget.total - budget.terms[..., list(SOURCES).index("flush")]).mean() > 0.5


def test_tensor_cores_pay_for_what_they_do():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 64)) for n in (2, 200, 200))
    order = [[[range(i, min(i + 16, 200)) for i in range(w * 16, 200, 32)] for w in range(2)]]

    def total(source, **fields):
        a = Arithmetic(tile=16, dot="mma", pv="mma_tile", p="float16x2", l_from_p=True, out_dtype="float32", **fields)
        return head_budget(q, k, v, 0.125, a, order).terms[..., list(SOURCES).index(source)].max()

    assert total("qk_dot", dot_chains=2) < 0.6 * total("qk_dot")
    # A bare score is rounded where it is small: beside the maximum.
    assert total("score_mul", score="bare") != total("score_mul")
    assert total("p_round", p_shift=10) <= total("p_round")
    assert total("state_merge", score="bare") > total("state_merge")
    assert Case("c").arithmetic().dot == "mma"
    assert Case("c", kernel="readable").arithmetic().dot == "fma"
