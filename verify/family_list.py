"""The input families themselves; `verify.families` says what a family is."""

from __future__ import annotations

import numpy as np

from .families import LN2, Rows, Shape, aim, family, largest_value, normal

Rng = np.random.Generator


def values(rng: Rng, shape: Shape) -> np.ndarray:
    """Standard normal V."""
    return rng.standard_normal((shape.context_len, shape.head_dim))


def scored(rng: Rng, shape: Shape, target: np.ndarray, v: np.ndarray | None = None) -> Rows:
    """Scores where `target` puts them, and V (normal unless given)."""
    q, k = aim(rng, shape, target)
    return q, k, values(rng, shape) if v is None else v


def near(sign: np.ndarray | float, rng: Rng, shape: Shape) -> np.ndarray:
    """V of one size: `sign (1 + 0.05 randn)`."""
    return np.reshape(sign, (-1, 1)) * (1 + 0.05 * values(rng, shape))


family("normal", "nothing in particular: the baseline")(normal)


@family("large", "no maximum subtracted, scores or scaled q in 16 bits, rounding of the scaled score")
def _large(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    return 30 * q, k, v


for _name, _offset, _exposes in [
    ("offset_plus", 300, "overflow without a maximum, 16-bit lse, rounding of the scaled score"),
    ("offset_minus", -300, "a maximum that starts at 0, underflow, 16-bit lse"),
    ("pos_1e4", 1e4, "scores beyond any shift that replaces a maximum"),
    ("neg_1e4", -1e4, "mask sentinel -1e4"),
    ("neg_sentinel", -6e4, "mask sentinel -5e4, and a maximum initialised with it"),
    ("neg_1e5", -1e5, "mask sentinels of float16's range"),
]:

    @family(_name, _exposes)
    def _offset_scores(rng: Rng, shape: Shape, offset: float = _offset) -> Rows:
        return scored(rng, shape, offset + rng.standard_normal(shape.context_len))


def needle(rng: Rng, shape: Shape, position: int) -> Rows:
    """One token takes nearly all the weight, and its V (7, 8, 9, 7, ...) is unlike the others."""
    target = rng.standard_normal(shape.context_len)
    # The shortest q of the group scales scores by a little more than 1/2.
    target[position] = 30 * 2
    v = values(rng, shape)
    v[position] = 7 + np.arange(shape.head_dim) % 3
    return scored(rng, shape, target, v)


def _last_edge(step: int, shape: Shape) -> int:
    """The last multiple of `step` inside the context."""
    return (shape.context_len - 1) // max(1, step) * max(1, step)


for _name, _position, _exposes in [
    ("needle_first", lambda s: 0, "the first token lost"),
    ("needle_last", lambda s: s.context_len - 1, "length - 1: the newest token lost; last split or tail pages dropped"),
    ("needle_page", lambda s: _last_edge(s.page_size, s), "first slot of the last page: wrong page, page read twice"),
    ("needle_page_end", lambda s: max(0, _last_edge(s.page_size, s) - 1), "last slot of the page before the last"),
    ("needle_split", lambda s: _last_edge(s.tokens_per_split, s), "first token of the last split: cuts, lost splits"),
    ("needle_split_end", lambda s: max(0, _last_edge(s.tokens_per_split, s) - 1), "last token of a full split"),
    ("needle_window_in", lambda s: max(0, s.context_len - (s.window or s.context_len)), "a window one too narrow"),
    ("needle_window_out", lambda s: max(0, s.context_len - 1 - (s.window or 0)), "a window one too wide"),
]:

    @family(_name, _exposes)
    def _needle(rng: Rng, shape: Shape, position=_position) -> Rows:  # type: ignore[no-untyped-def]
        return needle(rng, shape, position(shape))


@family("dominant", "one token anywhere: dropped, duplicated or misplaced tokens")
def _dominant(rng: Rng, shape: Shape) -> Rows:
    return needle(rng, shape, int(rng.integers(shape.context_len)))


def _mean(shape: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.broadcast_to(v.astype(np.float64).mean(axis=0), q.shape)


@family(
    "equal",
    "l in 16 bits, splits that overlap or lose a page: the mean of small integers is an integer",
    exact=_mean,
    exact_in_16_bits_only=True,
)
def _equal(rng: Rng, shape: Shape) -> Rows:
    n, d = shape.context_len, shape.head_dim
    # q and K of small powers of two: every product and sum is exact, so all scores are one number.
    q = rng.choice([-1.0, -0.5, 0.5, 1.0], (shape.group_size, d))
    k = np.broadcast_to(rng.choice([-0.5, 0.5], d), (n, d))
    deviation = rng.integers(-3, 4, (n, d)).astype(float)
    for column in range(d):
        # Random tokens absorb the sum, so that the mean is exact and a page still has a mean of its own.
        while excess := int(deviation[:, column].sum()):
            chosen = rng.permutation(n)[: abs(excess)]
            deviation[chosen, column] -= np.sign(excess)
    return q, k, deviation + 1 + np.arange(d) % 3


@family("ramp_up", "acc or l not rescaled, rescale in the wrong base, splits merged without weights")
def _ramp_up(rng: Rng, shape: Shape) -> Rows:
    return scored(rng, shape, np.linspace(-10, 10, shape.context_len))


@family("ramp_down", "the maximum in the first tile: no rescale, tiny late weights")
def _ramp_down(rng: Rng, shape: Shape) -> Rows:
    return scored(rng, shape, np.linspace(10, -10, shape.context_len))


@family("staircase", "a rescale in every tile: the most a running state can have")
def _staircase(rng: Rng, shape: Shape) -> Rows:
    return scored(rng, shape, np.arange(shape.context_len) // shape.tile * 0.7)


def _sink(rng: Rng, shape: Shape, position: int) -> Rows:
    target = -16 + 0.3 * rng.standard_normal(shape.context_len)
    target[position] = 0
    v = 0.5 + rng.random((shape.context_len, shape.head_dim))
    v[position] = 0
    return scored(rng, shape, target, v)


@family("sink_first", "underflow of 16-bit P: the mass is in weights of 1e-7 after a maximum")
def _sink_first(rng: Rng, shape: Shape) -> Rows:
    return _sink(rng, shape, 0)


@family("sink_last", "the same mass before the maximum: order dependence, rescale of a long sum")
def _sink_last(rng: Rng, shape: Shape) -> Rows:
    return _sink(rng, shape, -1)


@family("subnormal_p", "P among float16's subnormals: their rounding, flush to zero")
def _subnormal_p(rng: Rng, shape: Shape) -> Rows:
    target = -LN2 * rng.uniform(14, 26, shape.context_len)
    target[0] = 0
    return scored(rng, shape, target)


@family("subnormal_inputs", "inputs below the smallest normal number: flushed, and no division or NaN for it")
def _subnormal_inputs(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    # One product of a huge q and a subnormal k is no small part of a score; V is as small as numbers get.
    tiny, huge = (2.0**-20, 2.0**10) if shape.dtype == "float16" else (2.0**-129, 2.0**120)
    k[:, 0] *= tiny
    q[:, 0] = huge
    return q, k, v * tiny


@family("alt_v", "cancellation inside a split: 16-bit accumulators")
def _alt_v(rng: Rng, shape: Shape) -> Rows:
    sign = (-1.0) ** np.arange(shape.context_len)
    return scored(rng, shape, np.zeros(shape.context_len), near(sign, rng, shape))


def _flip(rng: Rng, shape: Shape, offset: float, slope: float, spread: float) -> Rows:
    target = offset + slope * shape.split + spread * rng.standard_normal(shape.context_len)
    return scored(rng, shape, target, near((-1.0) ** shape.split, rng, shape))


@family("split_flip", "16-bit partials and wrong merge weights: splits of opposite sign and unequal weight")
def _split_flip(rng: Rng, shape: Shape) -> Rows:
    return _flip(rng, shape, 0, 0.37, 0.3)


@family("split_flip_off", "16-bit lse: the same at scores of 40")
def _split_flip_off(rng: Rng, shape: Shape) -> Rows:
    return _flip(rng, shape, 40, 0.37, 0.3)


@family("cancel", "16-bit partials at their worst: an even number of equal splits cancels")
def _cancel(rng: Rng, shape: Shape) -> Rows:
    return _flip(rng, shape, 0, 0, 0.01)


@family("pos_v", "truncating accumulation, biased P: all terms of one sign")
def _pos_v(rng: Rng, shape: Shape) -> Rows:
    q, k, _ = normal(rng, shape)
    return q, k, near(1.0, rng, shape)


def _first_row(shape: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.broadcast_to(v[0].astype(np.float64), q.shape)


@family("const_v", "weights that do not sum to 1", exact=_first_row, exact_in_16_bits_only=True)
def _const_v(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    return q, k, np.ones_like(v)


@family("gqa_id", "wrong KV head: V is the head's number + 1", exact=_first_row, exact_in_16_bits_only=True)
def _gqa_id(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    return q, k, np.full_like(v, shape.kv_head + 1)


def _attended(shape: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return v.astype(np.float64)[np.argmax(q.astype(np.float64) @ k.astype(np.float64).T, axis=1)]


@family("token_id", "which token is attended: V is its number modulo 128, + 1", exact=_attended)
def _token_id(rng: Rng, shape: Shape) -> Rows:
    n, d = shape.context_len, shape.head_dim
    # One-hot: q_g sees one key with a score above 200, and 0 everywhere else.
    size = 2.0 ** np.ceil(np.log2(200 / shape.sm_scale) / 2)
    axes = np.arange(shape.group_size) % d
    q, k = np.zeros((shape.group_size, d)), np.zeros((n, d))
    q[np.arange(shape.group_size), axes] = size
    for axis in np.unique(axes):
        k[rng.integers(n), axis] = size
    return q, k, np.repeat(np.arange(n)[:, None] % 128 + 1.0, d, axis=1)


@family("repeated_max", "biased rounding: eight keys equal to the maximum, V negative")
def _repeated_max(rng: Rng, shape: Shape) -> Rows:
    q, k = aim(rng, shape, np.append(rng.standard_normal(shape.context_len - 1) - 2, 4.0))
    chosen = rng.permutation(shape.context_len)[:8]
    k[chosen] = k[-1].copy()
    return q, k, -np.abs(values(rng, shape))


@family("heavy_tail", "the largest term of a tensor-core sum: alignment loss, overflow of 16-bit partials")
def _heavy_tail(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    return q, k, np.clip(rng.standard_t(2, v.shape), -65504, 65504)


@family("heavy_outlier", "a few V ten thousand times the rest: accumulators that overflow or lose the small")
def _heavy_outlier(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    v[::97] *= 1e4
    return q, k, np.clip(v, -65504, 65504)


@family("huge_v", "V near the end of the range: un-normalised partials in 16 bits, overflow of acc")
def _huge_v(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    # Even the un-normalised sum of all of them stays below float32's largest.
    limit = largest_value(shape.dtype)
    return q, k, rng.uniform(-1, 1, v.shape) * (limit if limit < 1e5 else limit / shape.context_len)


@family("outlier_channel", "one channel a hundred times the rest, against a q a hundred times smaller")
def _outlier_channel(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    k[:, 7 % shape.head_dim] *= 100
    q[:, 7 % shape.head_dim] *= 0.01
    return q, k, v


@family("dot_cancel", "accumulation order of q.k: products ten times the score cancel in pairs")
def _dot_cancel(rng: Rng, shape: Shape) -> Rows:
    q, k, v = normal(rng, shape)
    # The nearest ratio that 16 bits of each kind tell from 1.
    ratio = 1 + (2.0**-6 if shape.dtype == "bfloat16" else 2.0**-10)
    pairs = shape.head_dim // 2 * 2
    q[:, 1:pairs:2] = q[:, :pairs:2]
    k[:, :pairs:2] *= 8
    k[:, 1:pairs:2] = -k[:, :pairs:2] * ratio
    return q, k, v


for _name, _array, _value, _exposes in [
    ("nan_q", 0, np.nan, "NaN laundered by a maximum that drops it, or taken for empty"),
    ("nan_k", 1, np.nan, "the same, from one visible key"),
    ("nan_v", 2, np.nan, "non-finite V: only its own column is hit"),
    ("inf_v", 2, np.inf, "the same with inf: 0 * inf may make it NaN"),
    ("inf_q", 0, np.inf, "inf - inf in the scores"),
]:

    @family(_name, _exposes, nonfinite=True)
    def _planted(rng: Rng, shape: Shape, array: int = _array, value: float = _value) -> Rows:
        rows = normal(rng, shape)
        x = rows[array]
        x[rng.integers(len(x)), rng.integers(x.shape[1])] = value
        return rows
