"""The cases of the ladder: what a decode can differ in, and the ways its inputs can lie in memory."""

from dataclasses import dataclass

import numpy as np
from helpers import paged

from cupy_kernels import tensor_core


@dataclass(frozen=True)
class Case:
    lens: tuple = (37, 0, 100)  # tokens of each request
    dtype: str = "float16"  # of q, K and V
    heads: tuple = (8, 2)  # num_q_heads, num_kv_heads
    head_dim: int = 64
    page_size: int = 16
    layout: str = "NHD"
    splits: int = 4  # num_splits; below 0: schedule="fixed" with that many pages per split; 0: "balanced"
    out_dtype: str = "float32"  # so that the rounding of the store hides nothing
    partial_dtype: str = "float32"
    lse_base: str = "e"
    sm_scale: float | None = None
    view: str = "plain"  # how the inputs lie in memory, see VIEWS

    @property
    def schedule(self):
        if self.splits == 0:
            return {"schedule": "balanced"}
        if self.splits < 0:
            return {"schedule": "fixed", "pages_per_split": -self.splits}
        return {"schedule": "uniform", "num_splits": self.splits}

    @property
    def kernels(self):
        """Values of `jit.settings(readable=...)` that make a difference."""
        return (False, True) if self.dtype in tensor_core.DTYPES and self.head_dim in tensor_core.HEAD_DIMS else (False,)

    @property
    def options(self):
        return {"sm_scale": self.sm_scale, "layout": self.layout}

    def inputs(self):
        sizes = dict(zip(("num_q_heads", "num_kv_heads"), self.heads, strict=True))
        args = paged(self.lens, head_dim=self.head_dim, page_size=self.page_size, dtype=self.dtype, layout=self.layout, **sizes)
        return VIEWS[self.view](args)


# Every value of every axis, next to different values of the others.
CASES = [
    Case(),
    Case(head_dim=8, heads=(1, 1), page_size=1, splits=1),
    Case(head_dim=80, heads=(6, 2), page_size=4, layout="HND", splits=3, dtype="bfloat16"),
    Case(head_dim=96, heads=(7, 1), page_size=48, splits=2, dtype="float32", lse_base="2"),
    Case(head_dim=128, heads=(16, 2), page_size=16, splits=1, out_dtype="float16"),
    Case(head_dim=192, heads=(3, 3), page_size=64, layout="HND", splits=-1, dtype="float32"),
    Case(head_dim=256, heads=(17, 1), page_size=2, splits=7, dtype="bfloat16", out_dtype="bfloat16"),
    Case(head_dim=128, heads=(5, 1), page_size=3, splits=-3, partial_dtype="float16"),
    Case(head_dim=64, heads=(32, 1), page_size=32, splits=70, layout="HND", partial_dtype="bfloat16", lse_base="2"),
    Case(head_dim=64, heads=(12, 4), page_size=5, splits=-2, partial_dtype="float16", out_dtype="float16"),
    Case(head_dim=72, heads=(4, 2), page_size=256, splits=2, dtype="float32", sm_scale=0.5),
    Case(head_dim=16, heads=(40, 2), page_size=7, splits=5, dtype="bfloat16", sm_scale=-0.3),
    Case(lens=(1000, 37, 100, 0, 1, 15, 16, 17), heads=(2, 1), head_dim=16, splits=4, dtype="float32"),
    Case(lens=(63, 64, 65, 192, 191, 193), page_size=64, heads=(2, 2), head_dim=24, splits=3, lse_base="2"),
    Case(sm_scale=0.0, splits=3),
    Case(view="sliced q", splits=2),
    Case(view="sliced q", splits=1, dtype="bfloat16", layout="HND"),
    Case(view="interleaved", splits=3, page_size=4),
    Case(view="interleaved", layout="HND", splits=-2, dtype="float32"),
    Case(view="five axes", splits=2, dtype="bfloat16"),
    Case(view="five axes", layout="HND", splits=1),
    Case(view="all layers", splits=4),
    Case(view="unlike strides", splits=2, dtype="float32", heads=(3, 3), head_dim=40),
    Case(view="backwards", splits=3, heads=(6, 3)),
    Case(view="strided table", splits=4, page_size=8),
    Case(splits=0),
    Case(head_dim=128, heads=(16, 2), page_size=1, splits=0, out_dtype="float16"),
    Case(head_dim=80, heads=(6, 2), page_size=48, layout="HND", splits=0, dtype="bfloat16", lse_base="2"),
    Case(head_dim=256, heads=(17, 1), page_size=4, splits=0, dtype="bfloat16", out_dtype="bfloat16"),
    Case(head_dim=72, splits=0, dtype="float32"),
    Case(lens=(700, 0, 20), heads=(66, 66), head_dim=96, splits=0, sm_scale=-0.3),
    Case(view="interleaved", splits=0, page_size=4),
]


def as_slice(array, index, *more_shape):
    """The same values as a view `buffer[index]` of a NaN buffer of shape `more_shape`."""
    buffer = np.full(more_shape, np.nan).astype(array.dtype) if array.dtype.kind != "i" else np.full(more_shape, -1, "i4")
    buffer[index] = array
    return buffer[index]


def sliced_q(args):
    # q, k and v of a step in one packed tensor
    batch_size, heads, head_dim = args["q"].shape
    return args | {"q": as_slice(args["q"], np.s_[:, 1 : heads + 1], batch_size, heads + 5, head_dim)}


def pair_of_slices(args, axis):
    """K and V as the two halves of one tensor, side by side at `axis`."""
    both = np.stack([args["k_cache"], args["v_cache"]], axis)
    before = (slice(None),) * axis
    return args | {"k_cache": both[(*before, 0)], "v_cache": both[(*before, 1)]}


def all_layers(args):
    # [pool_pages, layers, ...], ours is layer 1
    return args | {
        name: as_slice(args[name], np.s_[:, 1], args[name].shape[0], 3, *args[name].shape[1:]) for name in ("k_cache", "v_cache")
    }


def unlike_strides(args):
    *shape, head_dim = args["k_cache"].shape
    k = as_slice(args["k_cache"], np.s_[..., 3 : head_dim + 3], *shape, head_dim + 8)
    return args | {"k_cache": k, "v_cache": np.ascontiguousarray(args["v_cache"].transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)}


def backwards(args):
    q, k = args["q"][:, ::-1].copy()[:, ::-1], args["k_cache"][:, ::-1].copy()[:, ::-1]
    return args | {"q": q, "k_cache": k}


def strided_table(args):
    batch_size, max_pages = args["page_table"].shape
    table = as_slice(args["page_table"], np.s_[:, 2 : max_pages + 2], batch_size, max_pages + 3)
    return args | {"page_table": table, "context_lens": as_slice(args["context_lens"], np.s_[:, 1], batch_size, 2)}


VIEWS = {
    "plain": lambda args: args,
    "sliced q": sliced_q,
    "interleaved": lambda args: pair_of_slices(args, 3),
    "five axes": lambda args: pair_of_slices(args, 1),
    "all layers": all_layers,
    "unlike strides": unlike_strides,
    "backwards": backwards,
    "strided table": strided_table,
}
