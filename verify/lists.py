"""The named lists of cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cupy_kernels.tensor_core import HEAD_DIMS

from .build import POISON
from .cases import FINITE, NON_FINITE, Case
from .regressions import REGRESSIONS


def readable(cases: Iterable[Case]) -> list[Case]:
    """Those that tensor cores take, again for the readable kernels."""
    return [replace(case, name=f"{case.name}-readable", kernel="readable") for case in cases if case.on_tensor_cores]


def balanced(name: str, **fields: Any) -> Case:
    """A case without stated cuts."""
    return Case(name, schedule="balanced", num_splits=None, **fields)


# Seconds on the CPU stand-in: one case of each kind.
smoke = [
    Case("smoke-ragged", context_lens=(0, 37, 1000), page_size=16),
    Case("smoke-unsplit", context_lens=(200, 33), num_splits=1),
    Case("smoke-fixed", context_lens=(130, 5), schedule="fixed", pages_per_split=3),
    Case("smoke-bf16", dtype="bfloat16", context_lens=(90, 17), head_dim=128),
    Case("smoke-fp32", dtype="float32", context_lens=(90, 17), layout="HND"),
    Case("smoke-g7", num_q_heads=14, context_lens=(77,), page_size=4),
    Case("smoke-large", family="large", context_lens=(150, 64)),
    Case("smoke-offset", family="offset_minus", context_lens=(150, 64), head_dim=128),
    Case("smoke-flip", family="split_flip", context_lens=(256, 128), head_dim=128),
    Case("smoke-gqa", family="gqa_id", num_q_heads=8, num_kv_heads=4, context_lens=(60, 1)),
    Case("smoke-needle", family="needle_last", context_lens=(127, 129)),
    Case("smoke-nan", family="nan_k", context_lens=(48, 20)),
    balanced("smoke-balanced", context_lens=(200, 0, 33)),
    balanced("smoke-balanced-bf16", dtype="bfloat16", context_lens=(90, 17), head_dim=128),
    balanced("smoke-balanced-flip", family="split_flip", context_lens=(256, 128), head_dim=128),
    balanced("smoke-balanced-nan", family="nan_k", context_lens=(48, 20)),
    # To the readable kernels, in the cut that is planned for them.
    balanced("smoke-balanced-fp32", dtype="float32", context_lens=(90, 17)),
]
smoke += readable(smoke)


def _edge() -> list[Case]:
    """Shapes and values that gave a wrong answer somewhere, each kind by a few of its members, all small."""
    cases = [
        # Empty requests and splits, in every place of a batch.
        *(Case(f"empty-{'-'.join(map(str, lens))}", context_lens=lens) for lens in [(0,), (0, 9), (9, 0), (1, 3), (0, 0)]),
        Case("empty-batch", context_lens=()),
        Case("empty-hidden-max", family="neg_1e5", context_lens=(5, 0, 40)),
        Case("empty-neighbours", family="offset_minus", context_lens=(0, 70, 0)),
        # Around a page, and around the page that all splits have in common.
        Case("lengths-page-16", context_lens=(15, 16, 17, 63, 64, 65)),
        Case("lengths-page-4", context_lens=(3, 4, 5, 11, 12, 13), page_size=4, num_splits=3),
        Case("lengths-fixed", context_lens=(0, 1, 31, 32, 33, 96), schedule="fixed", pages_per_split=2),
        Case("lengths-mixed", context_lens=(32, 64, 96, 48), page_size=32, family="ramp_up"),
    ]
    # Everything that must not be read, by what it holds.
    for poison in ("nan", "inf", "large", "zero"):
        cases += [
            Case(f"poison-{poison}", context_lens=(13, 1, 0, 3), page_size=4, poison=poison),
            Case(f"poison-{poison}-fp32", context_lens=(13, 50), poison=poison, dtype="float32", num_splits=1),
        ]
    for page_size in (1, 2, 4, 8, 32, 48, 64, 96, 256):
        cases.append(Case(f"page-{page_size}", page_size=page_size, context_lens=(page_size, 97, page_size + 1), num_splits=3))
    for pages in ("ordered", "reversed", "shared"):
        cases.append(Case(f"pages-{pages}", pages=pages, context_lens=(70, 64, 100)))
    # More splits than pages, and numbers that divide nothing.
    for num_splits in (1, 2, 3, 7, 33, 200):
        cases.append(Case(f"splits-{num_splits}", num_splits=num_splits, context_lens=(100, 5, 0)))
    for num_q_heads, num_kv_heads in [
        (1, 1), (2, 2), (4, 2), (3, 1), (8, 2), (5, 1), (6, 1), (28, 4), (8, 1), (12, 1), (24, 24), (16, 1), (17, 1),
        (32, 1), (128, 2),
    ]:  # fmt: skip
        cases.append(
            Case(
                f"heads-{num_q_heads}-{num_kv_heads}", num_q_heads=num_q_heads, num_kv_heads=num_kv_heads,
                context_lens=(40, 7), head_dim=32, num_splits=2,
            )
        )  # fmt: skip
    for head_dim in (8, 32, 80, 96, 128, 192, 256):
        cases.append(Case(f"dim-{head_dim}", head_dim=head_dim, context_lens=(50, 33), num_splits=2))
    for memory in ("interleaved", "stacked", "padded"):
        for layout in ("NHD", "HND"):
            cases.append(Case(f"memory-{memory}-{layout}", memory=memory, layout=layout, context_lens=(45, 20)))
    for dtype in ("float16", "bfloat16", "float32"):
        cases.append(Case(f"dtype-{dtype}-HND", dtype=dtype, layout="HND", context_lens=(75, 16), head_dim=128))
        for partial_dtype in ("float16", "bfloat16"):
            cases.append(
                Case(f"partial-{dtype}-{partial_dtype}", dtype=dtype, partial_dtype=partial_dtype, context_lens=(75, 16))
            )
    for out_dtype in ("float32", "bfloat16"):
        cases.append(Case(f"out-{out_dtype}", out_dtype=out_dtype, context_lens=(75, 16)))
    for sm_scale in (1.0, 1e-4, 2.0):
        cases.append(Case(f"scale-{sm_scale:g}", sm_scale=sm_scale, context_lens=(75, 16), head_dim=128))
    cases += [Case(f"edge-{name}", family=name, context_lens=(45, 96, 0), head_dim=128) for name in [*FINITE, *NON_FINITE]]
    cases += [Case(f"edge-{name}-fp32", family=name, context_lens=(45, 0), dtype="float32") for name in NON_FINITE]
    cases += [Case(f"subnormal-{t}", family="subnormal_inputs", context_lens=(45, 96), dtype=t) for t in ("bfloat16", "float32")]
    seen_twice = ("empty-", "lengths-", "poison-", "page-", "heads-", "dim-", "memory-", "scale-", "edge-", "subnormal-")
    return [*cases, *readable(case for case in cases if case.name.startswith(seen_twice)), *_edge_balanced()]


def _edge_balanced() -> list[Case]:
    """The same kinds in equal shares: on 132 multiprocessors such short contexts are cut at every unit of 16 tokens or more."""
    named = {"empty": (0,), "neighbours": (0, 70, 0), "short": (1, 3), "ragged": (15, 16, 17, 63, 64, 65), "none": ()}
    cases = [balanced(f"balanced-{name}", context_lens=lens) for name, lens in named.items()]
    cases += [balanced(f"balanced-poison-{poison}", context_lens=(13, 1, 0, 40), page_size=4, poison=poison) for poison in POISON]
    cases += [balanced(f"balanced-page-{n}", page_size=n, context_lens=(n, 97, n + 1)) for n in (1, 3, 48, 64, 256)]
    cases += [
        balanced(f"balanced-heads-{q}-{kv}", num_q_heads=q, num_kv_heads=kv, context_lens=(40, 7), head_dim=128)
        for q, kv in [(1, 1), (7, 1), (16, 1), (17, 1), (128, 2), (66, 66)]
    ]
    cases += [balanced(f"balanced-dim-{d}", head_dim=d, context_lens=(50, 33)) for d in HEAD_DIMS]
    cases += [
        balanced(f"balanced-{memory}", memory=memory, layout="HND", context_lens=(45, 20)) for memory in ("stacked", "padded")
    ]
    cases += [balanced(f"balanced-{t}", dtype="bfloat16", out_dtype=t, context_lens=(75, 16)) for t in ("float32", "float16")]
    cases += [balanced(f"balanced-{name}", family=name, context_lens=(45, 96, 0), dtype=t)
              for name, t in zip([*FINITE, *NON_FINITE], itertools.cycle(["float16", "bfloat16"]), strict=False)]  # fmt: skip
    return cases


def _sweep() -> list[Case]:
    """Splits x family."""
    return [
        Case(f"sweep-{name}-256-{num_splits}", family=name, context_lens=(256,), num_splits=num_splits, head_dim=128)
        for name in FINITE
        for num_splits in (1, 8)
    ]


def _long() -> list[Case]:
    """The sweep's longer half: sums that are long enough to drift, and several tiles of a warp in each share."""
    long = ("normal", "offset_plus", "ramp_up", "sink_first", "pos_v", "split_flip", "split_flip_off", "cancel")
    cases = [
        Case(f"sweep-{name}-4096-{num_splits}", family=name, context_lens=(4096,), num_splits=num_splits, dtype=dtype)
        for name, dtype in zip(long, ["float16", "bfloat16"] * 4, strict=True)
        for num_splits in (1, 4, 16, 64)
    ]
    cases += readable(case for case in list(cases) if case.num_splits == 16)
    cases += readable(_sweep())
    cases += [
        Case(f"sweep-{name}-1024-{num_splits}", family=name, context_lens=(1024,), num_splits=num_splits, head_dim=128)
        for name in FINITE
        for num_splits in (1, 8)
    ]
    # Many KV heads leave few shares to each: several tiles a warp, and shares that end in the middle of a request.
    heads: dict[str, Any] = {"context_lens": (700, 300), "num_q_heads": 24, "num_kv_heads": 24, "head_dim": 128}
    for name, dtype in zip(long, ["float16", "bfloat16"] * 4, strict=True):
        cases.append(balanced(f"sweep-balanced-{name}", family=name, dtype=dtype, **heads))
    cases += [balanced(f"sweep-balanced-4096-{t}", context_lens=(4096,), dtype=t) for t in ("float16", "bfloat16")]
    return cases


def _large() -> list[Case]:
    """Batches and contexts as they are served, for a GPU: outputs by the million, and sums that are long."""
    cases, dtypes = [], itertools.cycle([("float16", None), ("bfloat16", None), ("float16", "float32"), ("bfloat16", "float32")])
    # Every family in 131,072 outputs a seed. The widest values stay as they are in the shorter lists.
    for name in FINITE:
        dtype, out_dtype = next(dtypes)
        fields: dict[str, Any] = {"context_lens": (200, 301, 17, 256) * 8, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        cases.append(balanced(f"large-{name}", family=name, dtype=dtype, out_dtype=out_dtype, **fields))
    long = ("normal", "offset_plus", "ramp_up", "staircase", "pos_v", "split_flip", "heavy_tail", "sink_last")
    for name in long:
        dtype, out_dtype = next(dtypes)
        fields = {"family": name, "num_q_heads": 16, "num_kv_heads": 2, "dtype": dtype, "out_dtype": out_dtype}
        cases.append(balanced(f"large-{name}-4096", context_lens=(4096, 1, 3000, 0, 4095), head_dim=128, **fields))
        cases.append(balanced(f"large-{name}-16384", context_lens=(16384, 40), **fields))
        cases.append(Case(f"large-{name}-8192-8", context_lens=(8192, 700), num_splits=8, **fields))
    cases += [
        balanced(
            f"large-{t}-page-{n}", context_lens=(5000, 900), page_size=n, num_q_heads=24, num_kv_heads=3, head_dim=d, dtype=t
        )
        for t, n, d in [("float16", 1, 256), ("bfloat16", 5, 192), ("float16", 64, 96), ("bfloat16", 256, 80)]
    ]
    return [*cases, *readable(case for case in cases if case.name.endswith(("-4096", "-8192-8")))]


edge, sweep, long, large = _edge(), _sweep(), _long(), _large()
LISTS = {
    "smoke": smoke, "edge": edge, "sweep": sweep, "long": long, "large": large,
    # with the seeds they were found with
    "regressions": [frozen.case for frozen in REGRESSIONS],
}  # fmt: skip


def default_lists(device: str, depth: str) -> list[str]:
    """What is run where nobody chose: long cases take a GPU or time, large ones a GPU, and many cores for their budgets."""
    left_out = {("cpu", "quick"): ("long", "large"), ("gpu", "full"): ()}.get((device, depth), ("large",))
    return [name for name in LISTS if name not in left_out]
