"""The tensor-core kernel of schedule="balanced", launched by itself: few shares, small blocks, and so short contexts."""

import io
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from decode_cases import VIEWS
from helpers import DTYPES, U32, assert_empty, assert_same_bits, assert_within, launch, on, paged, slot_of, stored, to_numpy

import reference
from cupy_kernels import jit, tensor_core
from cupy_kernels.problem import NOT_YET, check_problem
from cupy_kernels.tensor_core import Config, Workspace, bind_balanced, plan_grid, refusal
from reference import gather


@dataclass(frozen=True)
class Case:
    lens: tuple = (37, 0, 100)  # tokens of each request
    dtype: str = "float16"  # of q, K and V
    out_dtype: str = "float32"  # so that the rounding of the store hides nothing
    heads: tuple = (4, 2)  # num_q_heads, num_kv_heads
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    shares: int = 3  # equal parts the batch is cut into, at most
    config: Config = Config(warps=2)  # noqa: RUF009
    lse_base: str = "e"
    sm_scale: float | None = None
    view: str = "plain"  # how the inputs lie in memory, see VIEWS

    def inputs(self, **options):
        sizes = {"num_q_heads": self.heads[0], "num_kv_heads": self.heads[1], "head_dim": self.head_dim}
        sizes |= {"page_size": self.page_size, "dtype": self.dtype, "layout": self.layout}
        return VIEWS[self.view](paged(self.lens, **sizes, **options))


# Every group size that fills its MMA columns in another way, every head_dim, pages below, at, above and across the tile's 16.
CASES = [
    Case(),
    Case(heads=(1, 1), head_dim=128, page_size=1, lens=(33,)),
    Case(heads=(6, 2), head_dim=80, page_size=3, dtype="bfloat16", lens=(40, 70)),
    Case(heads=(5, 1), head_dim=96, page_size=48, layout="HND", lens=(96, 97)),
    Case(heads=(7, 1), head_dim=192, page_size=20, lens=(41,), lse_base="2"),
    Case(heads=(8, 1), head_dim=256, page_size=32, lens=(60,), dtype="bfloat16", out_dtype="bfloat16"),
    Case(heads=(2, 1), head_dim=192, lens=(90, 200), shares=5, config=Config(warps=4)),
    Case(heads=(12, 1), head_dim=128, page_size=4, layout="HND", lens=(50, 3)),
    Case(heads=(16, 1), head_dim=64, page_size=16, dtype="bfloat16", lens=(1, 16, 17)),
    Case(heads=(24, 1), head_dim=96, page_size=16, lens=(35,), shares=2),
    Case(heads=(9, 1), head_dim=256, page_size=16, lens=(40,), shares=1),
    Case(heads=(35, 1), head_dim=64, page_size=64, lens=(20,)),
    Case(heads=(8, 4), config=Config(warps=4), lens=(90, 20, 0, 17)),
    Case(heads=(4, 4), config=Config(warps=1), page_size=1, shares=5),
    Case(config=Config(warps=2, min_tiles=2), lens=(30, 33, 31, 64)),
    Case(sm_scale=-0.3),
    Case(sm_scale=0.0, shares=2),
    # Scores by the hundred, of either sign: maxima rise often and by much.
    Case(sm_scale=8.0, shares=7),
    Case(sm_scale=8.0, dtype="bfloat16"),
    Case(lens=(0, 0, 0)),
    Case(lens=()),
    # More requests than a block has threads.
    Case(lens=(3, 0, 20) * 30, heads=(2, 1), shares=5),
    # Shares begin within any of the three requests of a thread, and of either thread of a lane.
    Case(lens=(5, 20, 40) * 50, heads=(2, 1), shares=7),
    # The only one without tokens is the second that its thread sees to.
    Case(lens=(3, 0) + (20,) * 88, heads=(2, 1), shares=5),
    *(Case(view=view, lens=(37, 20)) for view in VIEWS if view not in ("plain", "unlike strides")),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.heads}-{case.head_dim}-{case.view}")


def problem_of(xp, case, args):
    return check_problem(
        **on(xp, args),
        sm_scale=case.sm_scale,
        layout=case.layout,
        lse_base=case.lse_base,
        check_values=True,
        not_yet=dict(NOT_YET),
    )


def grid_of(case):
    group_size, head_dim = case.heads[0] // case.heads[1], case.head_dim
    columns = case.heads[1] * tensor_core.chunks(head_dim, group_size)
    return plan_grid(
        batch_size=len(case.lens), num_kv_heads=case.heads[1], group_size=group_size, head_dim=head_dim,
        num_sms=case.shares * columns, config=case.config,
    )  # fmt: skip


def run(xp, case, args, workspace=None):
    """(out, lse) in NumPy; both are NaN before the launch, and every mailbox is empty after it."""
    problem, grid = problem_of(xp, case, args), grid_of(case)
    assert refusal(problem) is None
    workspace = workspace or Workspace.of(xp, grid)
    out = xp.full(problem.q.shape, np.nan, DTYPES[case.out_dtype])
    lse = xp.full(problem.q.shape[:2], np.nan, np.float32)
    bind_balanced(problem, out, lse, grid, workspace)()
    for pieces in (workspace.o_pieces, workspace.sum_pieces):
        assert np.all(to_numpy(pieces).view(np.uint32) == tensor_core.NOT_THERE)
    return to_numpy(out), to_numpy(lse)


def expected(case, args):
    return reference.paged_decode(**args, sm_scale=case.sm_scale, layout=case.layout)


def bound(case, args, out, lse):
    """What the kernel may miss by: [B, Hq, D] for o, [B, Hq] for the natural lse.

    A score: D / 32 + 1 MMA steps of 10.5 u each (they truncate), 3 roundings of the difference. Its weight: ex2's 5 u, 6 u a
    rescale, and p in parts: two float16 hold 22 bits above 2^-46, n bfloat16 hold 8 n. Numerator and denominator move
    together, so an error delta_j costs pi_j delta_j |v_j - out|. The sums: 10.5 u for each part of a tile, a rounding a tile and
    a piece.
    """
    e_o, e_lse = np.zeros(out.shape), np.zeros(lse.shape)
    scale = 1 / math.sqrt(case.head_dim) if case.sm_scale is None else case.sm_scale
    parts = tensor_core.p_parts(case.dtype, case.out_dtype)
    rounded, least = (2.0**-22, 2.0**-46) if case.dtype == "float16" else (2.0 ** (-8 * parts), 0.0)
    for b, n in enumerate(args["context_lens"].tolist()):
        k, v = (gather(args[name], args["page_table"][b], 0, n, case.layout) for name in ("k_cache", "v_cache"))
        for h in range(case.heads[0] if n else 0):
            group = case.heads[0] // case.heads[1]
            k_h, v_h, q_h = k[:, h // group], v[:, h // group], args["q"][b, h].astype(np.float64)
            s = scale * (k_h @ q_h)
            pi, steps = np.exp(s - lse[b, h]), n / 16 + case.shares + 8
            delta = U32 * (10.5 * (case.head_dim / 32 + 1) * abs(scale) * (np.abs(k_h) @ np.abs(q_h)))
            delta += U32 * (3 * (s.max() - s) / math.log(2) + 5 + 6 * steps) + rounded
            sums = (10.5 * parts + 2 * steps) * U32
            e_o[b, h] = 1.01 * (pi * delta + least) @ np.abs(v_h - out[b, h]) + sums * (pi @ np.abs(v_h))
            e_lse[b, h] = 1.01 * pi @ delta + n * least + steps * U32 + 3 * U32 * (abs(lse[b, h]) + np.abs(s).max())
    return e_o + stored(out, case.out_dtype), e_lse


@every_case
def test_against_the_reference(xp, case):
    args = case.inputs()
    want_o, want_lse = expected(case, args)
    e_o, e_lse = bound(case, args, want_o, want_lse)
    o, lse = run(xp, case, args)
    assert_within(o, want_o, e_o, "o")
    assert_within(lse.astype(np.float64) * (math.log(2) if case.lse_base == "2" else 1), want_lse, e_lse, "lse")
    empty = args["context_lens"] == 0
    assert_empty((o[empty], lse[empty]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_are_correctly_rounded(xp, dtype):
    # p to fp32 accuracy: where 16 bits of p alone would give about 65 % (63 % in simulation), all but a few round the same way.
    case = Case(lens=(100,) * 4, heads=(8, 2), head_dim=128, dtype=dtype, out_dtype=dtype)
    args = case.inputs()
    want, _ = expected(case, args)
    assert np.mean(run(xp, case, args)[0] == want.astype(DTYPES[dtype])) >= 0.995


def test_order_of_threads_and_blocks_is_free():
    for case in (CASES[0], Case(heads=(8, 4), config=Config(warps=4), lens=(90, 20, 0, 17), shares=5)):
        args = case.inputs()
        plain = run(np, case, args)
        for seed in (1, 2, 3):
            with jit.settings(seed=seed):
                assert_same_bits(run(np, case, args), plain)


def test_pages_may_lie_anywhere(xp):
    case = Case(page_size=5)
    pool_pages = case.inputs()["k_cache"].shape[0]
    forward, backward = (case.inputs(order=order) for order in (range(pool_pages), range(pool_pages)[::-1]))
    assert_same_bits(run(xp, case, backward), run(xp, case, forward))


def test_poison_of_any_kind_stays_outside(xp):
    for case in (Case(), Case(page_size=3), Case(dtype="bfloat16", page_size=48)):
        plain = run(xp, case, case.inputs())
        for poison in (np.inf, 3e4, 0.0):
            args = case.inputs(poison=poison)
            args["q"][1] = np.nan
            assert_same_bits(run(xp, case, args), plain)


def test_workspace_is_used_again(xp):
    long, short = Case(lens=(100, 70, 64)), Case(lens=(3, 0, 40))
    workspace = Workspace.of(xp, grid_of(long))
    for case in (long, short, Case(lens=(0, 0, 0)), long, long):
        args = case.inputs()
        assert_same_bits(run(xp, case, args, workspace), run(xp, case, args))


# 128 tiles of one warp, 64 a share: blocks look at each other's progress.
PACED = Case(lens=(2000, 37), head_dim=128, shares=2, config=Config(warps=1))


def paced_run(xp, case, patches=(), words=0):
    """(out, lse), and what is left where blocks count, which held `words`."""
    workspace = Workspace.of(xp, grid_of(case))
    workspace.progress[...] = words
    with jit.settings(patches=patches):
        results = run(xp, case, case.inputs(), workspace)
    return results, to_numpy(workspace.progress)


def test_pacing_changes_no_bits(xp):
    want, _ = paced_run(xp, PACED, [("balanced.cu", "#define PACED (", "#define PACED 0 && (")])
    for words in (0, 7, 2**31, 2**32 - 1):
        got, _ = paced_run(xp, PACED, words=words)
        assert_same_bits(got, want)


@pytest.mark.parametrize(("heads", "blocks"), [((2, 2), 4), ((10, 10), 20), ((9, 1), 2)])
def test_blocks_count_their_rows(monkeypatch, heads, blocks):
    case = replace(PACED, heads=heads)
    # The 64 rows of each block, in 8 words by turns.
    for least, counted in ((64, [8 * blocks] * 8), (65, [7] * 8)):
        # One N tile of query heads, or two.
        monkeypatch.setitem(tensor_core.PACED_ROWS, 1 if heads[0] == heads[1] else 2, least)
        _, progress = paced_run(np, case, words=7)
        np.testing.assert_array_equal(progress[:, 0], counted)
        assert (progress[:, 1:] == 7).all()


# Instead of holding back they add up, beside the words, after which rows they would.
HOLD = ("pace.cuh", "__nanosleep(HOLD_BACK_NANOSECONDS)", "threadIdx.x == 0 ? words[1 + block] += rows : 0")


@pytest.mark.parametrize("columns", [2, 10])
def test_blocks_that_are_ahead_hold_back(columns):
    # On the CPU one block runs after the other. Block k of n, in its row r, adds 1 to a word where the k before it have left 8
    # each and itself (r - 1) // 8. So it takes itself for n (r - 1) - 8 (8 k + (r - 1) // 8 + 1) of n rows ahead, and holds back
    # before the next row while that is more than 0 and at most 4 n.
    n = 2 * columns
    _, progress = paced_run(np, replace(PACED, heads=(columns, columns)), [HOLD])
    for k in range(n):
        lead = {r: n * (r - 1) - 8 * (8 * k + (r - 1) // 8 + 1) for r in range(1, 64)}
        assert progress[0, 1 + k] == sum(r for r in lead if 0 < lead[r] <= 4 * n)
    assert progress[0, 1] > 0
    assert (progress[1:, 1:] == 0).all()


def test_blocks_that_see_nothing_do_not_hold_back():
    never = ("pace.cuh", "copy_async_16_if(counts, const_cast<unsigned*>(seen), word)", "(void)0")
    _, progress = paced_run(np, PACED, [HOLD, never])
    assert (progress[:, 1] == 0).all()


def test_progress_is_as_the_kernel_has_it():
    text = jit.read_source("pace.cuh")
    shape = (int(re.search(rf"#define {name} (\d+)", text)[1]) for name in ("PACED_WORDS", "PACED_STRIDE"))
    assert tensor_core.PROGRESS_SHAPE == tuple(shape)


# On the CPU a copy into shared memory arrives when it is waited for.
TAKE_FIRST = "        if (request >= 0) take_q<THREADS>(exchange.q, scale_log2);\n"
TAKE_NEXT = "        if (looks_ahead) take_q<32>(exchange.q_of_turn(turn ^ 1), scale_log2);\n"
ASK_NEXT = "ask_for_q<32>(exchange.q_of_turn(%s)"
Q_FAULTS = {
    "the first one not waited for": ("balanced.cu", TAKE_FIRST, ""),
    "the next one not waited for": ("balanced.cu", TAKE_NEXT, ""),
    "not committed": ("stream.cuh", "    commit_copies();\n", ""),
    "the next one over the one in use": ("balanced.cu", ASK_NEXT % "turn ^ 1", ASK_NEXT % "turn"),
    "a negative scale forgotten": ("stream.cuh", "if (scale_log2 >= 0.f) return", "if (true) return"),
}  # fmt: skip


@pytest.mark.parametrize("fault", Q_FAULTS)
def test_q_of_the_next_request_comes_in_time(fault):
    # All in one share, so that each block goes from request to request.
    case = Case(lens=(37, 20, 100), shares=1, sm_scale=-0.3)
    args = case.inputs()
    want = run(np, case, args)
    with jit.settings(patches=(Q_FAULTS[fault],)):
        got = run(np, case, args)
    # What is wrong with the first one is wrong with its request, what is wrong with the next ones with the others.
    differ = [got[0][i].tobytes() != want[0][i].tobytes() for i in range(3)]
    assert differ[0] == ("next" not in fault)
    assert differ[1:] == [fault != "the first one not waited for"] * 2


def pieces_text(head_dim, n_tiles):
    constants = {"OUT": "float", "HEAD_DIM": head_dim, "N_TILES": n_tiles, "THREADS": 32}
    defines = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return defines + jit.read_source("pieces.cuh", for_cpu=True)


@pytest.mark.parametrize("head_dim", tensor_core.HEAD_DIMS)
@pytest.mark.parametrize("heads", [1, 8, 9, 16])
def test_pieces_hold_all_columns(head_dim, heads):
    heads = min(heads, tensor_core.max_chunk_heads(head_dim))
    text = pieces_text(head_dim, math.ceil(heads / 8))
    text += 'extern "C" __global__ void sizes(int* to) { to[0] = COLUMNS, to[1] = PIECE_VECTORS; }'
    sizes = np.zeros(2, np.int32)
    assert launch(text, "sizes", 1, sizes) == 0
    assert sizes[1] == tensor_core.piece_vectors(head_dim, heads)
    assert 4 * sizes[0] * sizes[1] == head_dim
    # One piece a thread of 8 warps.
    assert heads * sizes[0] <= 256


def test_nan_of_any_payload_ends(xp):
    case = Case(lens=(100,), shares=4)
    for bits in (0xFFFF, 0x7FFF, 0xFE00, 0x7E01):
        args = case.inputs()
        args["v_cache"].view(np.uint16)[slot_of(args, 0, 90)] = bits
        out, lse = run(xp, case, args)
        assert np.isnan(out).all()
        assert np.isfinite(lse).all()


def test_a_piece_of_nothing_but_ones_is_no_empty_mailbox():
    # All ones is what an empty mailbox holds: a block would wait for ever. Arithmetic gives other NaN, so it is planted.
    state = "block_state(exchange, scale, head, heads, c)"
    ones = "Piece{0.f, 1.f, {make_float4(1.f, __uint_as_float(NOT_THERE), 2.f, 3.f)}}"
    case = Case(lens=(100,), shares=4)
    with jit.settings(patches=(("balanced.cu", state, ones),)):
        out, _ = run(np, case, case.inputs())
    assert np.isnan(out[..., 1::4]).all()
    assert np.isfinite(out[..., ::4]).all()
    unguarded = ("mailboxes.cuh", "without_not_there(any)", "any")
    with (
        jit.settings(patches=(("balanced.cu", state, ones), unguarded)),
        pytest.raises(RuntimeError, match="balanced: a block deadlocked"),
    ):
        run(np, case, case.inputs())


def test_blocks_wait_for_earlier_ones_only(xp):
    # Far more blocks than fit on a device at once, of which the last ones wait for all others.
    many = Case(lens=(16 * 4000,), heads=(1, 1), shares=4000, config=Config(warps=1))
    case = Case(shares=13) if xp is np else many
    args = case.inputs()
    out, lse = run(xp, case, args)
    want = expected(case, args)
    for got, exact, error in zip((out, lse), want, bound(case, args, *want), strict=True):
        assert_within(got, exact, error)


def test_shares_in_the_order_of_blocks_would_deadlock():
    call = "cut_batch(run_units, batch, "
    forward = ("balanced.cu", call + "blockIdx.z,", call + "gridDim.z - 1 - blockIdx.z,")
    case = Case(lens=(100,))
    with jit.settings(patches=[forward]), pytest.raises(RuntimeError, match="balanced: a block deadlocked"):
        run(np, case, case.inputs())


# What a block checks of its first look, each to be left out.
MINE, OTHERS = ("length == seen", "true"), ("same && batch.others_are_kept()", "same")
ALL, PAGE = ("= kept_all &&", "= true &&"), ("inside_pool(place.page, pool_pages) == page", "true")
# The launch in front writes what a block has looked at already, planted where the block waits for it: (what, its index, before,
# after), and the checks that find it. Before the look it is as it was, also for the blocks that run later.
FEW, SOME, MANY = (37, 40, 100), (3,) * 200, (3,) * 600
WRITTEN_MEANWHILE = {
    "one token more": (FEW, "context_lens", 0, 36, 37, [MINE]),
    "a token less, one page less": (FEW, "context_lens", 2, 97, 96, [MINE]),
    "a request that was empty": (FEW, "context_lens", 1, 0, 40, [MINE]),
    "a request that is empty now": (FEW, "context_lens", 2, 100, 0, [MINE]),
    "a length that was nonsense": (FEW, "context_lens", 2, 2**31 - 1, 100, [MINE]),
    "a page id": (FEW, "page_table", 0, None, None, [PAGE]),
    "a page id that was nonsense": (FEW, "page_table", 0, -1, None, [PAGE]),
    "a length that is not its thread's first": (SOME, "context_lens", 151, 0, 3, [OTHERS]),
    "the last length of a large batch": (MANY, "context_lens", 599, 0, 3, [ALL]),
    "a length of a large batch": (MANY, "context_lens", 0, 1, 3, [ALL, MINE]),
}
LOOK, CUT, WAIT = (
    "    int length = batch.read(batch.first_of_run());\n", "        ahead[threadIdx.x / 32] = share;\n",
    "        wait_for_previous_launch();\n",
)  # fmt: skip


def writing(array, index, values):
    """Patches by which thread 0 of each block writes to an input, before any thread goes past these places in the text."""
    write = f"    __syncthreads();\n    if (threadIdx.x == 0) const_cast<int*>({array})[{index}] = %d;\n    __syncthreads();\n"
    return tuple(("balanced.cu", place, write % value + place) for place, value in values.items())


def run_on_copies(case, args, patches):
    with jit.settings(patches=patches):
        return run(np, case, {name: value.copy() for name, value in args.items()})


@pytest.mark.parametrize("name", WRITTEN_MEANWHILE)
def test_a_look_that_was_out_of_date(name):
    lens, array, index, before, after, checks = WRITTEN_MEANWHILE[name]
    case = Case(lens=lens, heads=(2, 2), shares=5)
    args = case.inputs()
    if array == "page_table":
        # Of the pool's pages the last one is what stands for an id that is none: it should not be the right one by chance.
        args = case.inputs(order=range(case.inputs()["k_cache"].shape[0]))
        before, after = args[array][0, 1] if before is None else before, args[array][0, 0]
    args[array].ravel()[index] = after
    want, meanwhile = run(np, case, args), writing(array, index, {LOOK: before, WAIT: after})
    assert_same_bits(run_on_copies(case, args, meanwhile), want)
    # It is the second look that makes it right.
    try:
        got = run_on_copies(case, args, (*meanwhile, *(("balanced.cu", *check) for check in checks)))
    except RuntimeError:
        # Blocks that know of different cuts may wait for pieces that never come.
        return
    assert any(a.tobytes() != b.tobytes() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("lens", "shares"),
    [((200, 0, 33, 5), [(13, 17), (9, 13), (5, 9), (1, 5), (0, 1)]), ((33,), [(1, 3), (0, 1), (0, 0), (0, 0), (0, 0)])],
    ids=["units left over come first", "a share has two units for two warps"],
)
def test_first_blocks_take_the_last_shares(lens, shares):
    # Blocks write down their units instead of computing anything.
    walk = "    if (threadIdx.x == 0) parts[0] = next_part(left, batch);\n"
    note = "    if (threadIdx.x == 0) lse[2 * blockIdx.z] = left.begin, lse[2 * blockIdx.z + 1] = left.end;\n    return;\n"
    case = Case(lens=lens, heads=(16, 1), shares=5)
    with jit.settings(patches=(("balanced.cu", walk, note),)):
        _, lse = run(np, case, case.inputs())
    np.testing.assert_array_equal(lse.ravel()[:10].reshape(5, 2), shares)


def test_lengths_that_are_not_kept_may_shrink_during_a_look():
    # A share then ends before its units do: the way through it must end all the same.
    case = Case(lens=MANY, heads=(2, 2), shares=5)
    args = case.inputs()
    shrinking = writing("context_lens", len(MANY) - 1, {LOOK: 3, CUT: 0, WAIT: 3})
    assert_same_bits(run_on_copies(case, args, shrinking), run(np, case, args))


def test_quotients():
    text = pieces_text(64, 1)
    text += """extern "C" __global__ void divide(const float* x, const float* l, float* q, const int* n) {
        for (int i = threadIdx.x; i < *n; i += THREADS) q[i] = quotient(x[i], l[i], 1.f / l[i]);
    }"""
    rng = np.random.default_rng(0)
    n = 200_000
    l = (rng.uniform(1, 2, n) * 2.0 ** rng.integers(-20, 20, n)).astype(np.float32)
    x = (rng.uniform(-2, 2, n) * 2.0 ** rng.integers(-60, 60, n)).astype(np.float32)
    x[:6] = np.nan, 0, np.inf, -np.inf, np.finfo(np.float32).max, 1
    l[:6] = 3, 3, 3, 0.3, 3, 1
    q = np.full(n, 7, np.float32)
    assert launch(text, "divide", 32, x, l, q, np.array([n], np.int32)) == 0
    assert np.isnan(q[0])
    np.testing.assert_array_equal(q[1:], (x / l)[1:])


def test_dividers():
    rng = np.random.default_rng(0)
    most = 2**31 - 1
    numbers = np.concatenate([rng.integers(0, 2**31, 2000), np.arange(200), most - np.arange(200)])
    for divisor in (1, 2, 3, 7, 16, 48, 641, 2**16, 2**16 + 1, 2**30, 2**30 + 1, most - 1, most, *rng.integers(1, 2**31, 200)):
        packed = tensor_core.divider(int(divisor))
        magic, shift = packed & 0xFFFFFFFF, packed >> 32
        around = np.concatenate([numbers, divisor * rng.integers(0, most // divisor + 1, 50) - rng.integers(0, 2, 50)])
        around = around[(around >= 0) & (around <= most)].astype(np.uint64)
        # As Divider in kernels/pages.cuh, in 64 bits; there the sum has to fit into 32.
        total = (around * np.uint64(magic) >> np.uint64(32)) + around
        assert total.max() < 2**32
        np.testing.assert_array_equal(total >> np.uint64(shift), around // np.uint64(divisor))


@pytest.mark.parametrize("shares", [1, 2, 4, 7, 13])
def test_any_number_of_shares(xp, shares):
    case = Case(lens=(1, 100, 0, 0, 31, 33), shares=shares)
    args = case.inputs()
    want = expected(case, args)
    for got, exact, error in zip(run(xp, case, args), want, bound(case, args, *want), strict=True):
        assert_within(got, exact, error)


def test_more_requests_than_threads(xp):
    lens = tuple(17 * (i % 9 == 4) + 3 * (i % 50 == 7) for i in range(200))
    case = Case(lens=lens, heads=(1, 1), shares=6)
    args = case.inputs()
    want = expected(case, args)
    for got, exact, error in zip(run(xp, case, args), want, bound(case, args, *want), strict=True):
        assert_within(got, exact, error)


@pytest.mark.parametrize("token", [0, 20, 36])
def test_non_finite_inputs_spread_as_in_the_reference(xp, token):
    case = Case(lens=(37, 50), sm_scale=0.1)
    for name, column, value in (("k_cache", 3, np.nan), ("v_cache", 3, np.nan), ("v_cache", 5, np.inf), ("k_cache", 9, np.inf)):
        args = case.inputs()
        args[name][(*slot_of(args, 0, token), 1, column)] = value
        for got, want in zip(run(xp, case, args), expected(case, args), strict=True):
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    args = case.inputs()
    args["q"][1, 2, 7] = np.nan
    for got, want in zip(run(xp, case, args), expected(case, args), strict=True):
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_equal_keys_average_exactly(xp, dtype):
    case = Case(lens=(64, 32), dtype=dtype, out_dtype="float32")
    args = case.inputs()
    rng = np.random.default_rng(0)
    args["k_cache"][...] = 1
    args["v_cache"][...] = rng.integers(-8, 8, args["v_cache"].shape)
    out, _ = run(xp, case, args)
    np.testing.assert_array_equal(out, expected(case, args)[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_token_far_below_the_maximum_counts(xp, dtype):
    # One token of value 0 and weight 1, the rest of weight 1e-7 each: one float16 would round the small weights to nothing much.
    case = Case(lens=(64,), heads=(1, 1), dtype=dtype, sm_scale=1.0)
    args = case.inputs()
    args["q"][...] = 1
    args["k_cache"][...] = -0.25
    args["k_cache"][slot_of(args, 0, 0)] = 0
    args["v_cache"][...] = np.linspace(1, 2, 64)
    args["v_cache"][slot_of(args, 0, 0)] = 0
    want = expected(case, args)
    out, _ = run(xp, case, args)
    np.testing.assert_allclose(out, want[0], rtol=2.0**-20 if dtype == "float16" else 2.0**-15)


def test_what_is_refused():
    for part, case in (
        ("float16 or bfloat16", Case(dtype="float32")),
        ("head_dim", Case(head_dim=72)),
        ("rows of k_cache aligned to 16 bytes", Case(view="unlike strides")),
    ):
        assert part in refusal(problem_of(np, case, case.inputs()))
    args = Case().inputs()
    shifted = np.zeros(args["v_cache"].size + 4, np.float16)[4:].reshape(args["v_cache"].shape)
    assert "rows of v_cache aligned" in refusal(problem_of(np, Case(), args | {"v_cache": shifted}))
    no_page = {name: args[name][:0] for name in ("k_cache", "v_cache")} | {"context_lens": np.zeros(3, np.int32)}
    assert refusal(problem_of(np, Case(), args | no_page)) == "a pool of at least one page"
    # 32,768 KV heads fit a grid of chunks of 16 query heads, not one of chunks of 8.
    many = lambda *shape: np.broadcast_to(np.zeros(256, np.float16), (*shape, 256))
    pool = args["k_cache"].shape[:2]
    for kv_heads, part in ((32767, None), (32768, "at most 65535 chunks of query heads")):
        wide = {"q": many(3, 16 * kv_heads), "k_cache": many(*pool, kv_heads), "v_cache": many(*pool, kv_heads)}
        assert refusal(problem_of(np, Case(), args | wide)) == part


def test_grid_fills_the_device():
    sizes = {"batch_size": 3, "group_size": 4, "head_dim": 128, "num_sms": 132}
    grid = plan_grid(**sizes, num_kv_heads=8, config=Config(warps=4, blocks_per_sm=2))
    assert grid.dims == (1, 8, 33)
    # More columns than places for blocks: one share, and the rest wait.
    assert plan_grid(**sizes, num_kv_heads=500, config=Config()).dims == (1, 500, 1)


SPECIALISATIONS = [
    dict(values) for values in sorted({tuple(values.items()) for values in tensor_core.specialisations()}, key=str)
]


@pytest.mark.slow
@pytest.mark.parametrize("values", SPECIALISATIONS, ids=lambda values: "-".join(map(str, values.values())))
def test_no_register_is_spilled(values):
    core = pytest.importorskip("cuda.core")
    pathfinder = pytest.importorskip("cuda.pathfinder")
    headers = pathfinder.find_nvidia_header_directory("cudart")
    if headers is None:
        pytest.skip("no CUDA headers")
    kernel = jit.kernel("balanced.cu", "balanced", **values)
    options = core.ProgramOptions(
        arch="sm_90", std="c++17", include_path=headers, define_macro=[tuple(one[2:].split("=")) for one in kernel.defines],
        ptxas_options=["-v"],
    )  # fmt: skip
    log = io.StringIO()
    core.Program(jit.read_source("balanced.cu"), "c++", options).compile("cubin", logs=log)
    stack, *spills = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log.getvalue()).groups()
    )
    assert (stack, *spills) == (0, 0, 0)
