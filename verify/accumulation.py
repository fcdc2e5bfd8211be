"""Running maxima and running sums of a kernel's order: what its accumulators hold, and how far they round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .arithmetic import U32, Arithmetic, Order

# Elements of one temporary array of prefixes.
CHUNK = 1 << 21


@dataclass(frozen=True)
class Running:
    """The running maximum in exact arithmetic; every array is spread to tokens `[group_size, context_len]`."""

    # after the token's tile, and how low the one in use may be, where it is raised lazily
    tokens: np.ndarray
    low: np.ndarray
    # at the end of the token's running state, how low that may be, and the maximum over the states of its split
    state_final: np.ndarray
    state_low: np.ndarray
    split_final: np.ndarray
    # rescales that the token's contribution goes through after its tile, those within the noise included
    later_changes: np.ndarray
    # whether the token is the maximum beyond the noise, so that its weight is ex2(0) = 1 exactly
    sure_maximum: np.ndarray
    # per tile [group_size, tiles]: whether it rescales what came before it, and by how much the maximum rose
    changes: np.ndarray
    rise: np.ndarray


@dataclass(frozen=True)
class Layout:
    """An order as arrays. Tokens are numbered in the kernel's order; `tokens` leads back to their positions."""

    tokens: np.ndarray
    # first token of each tile, and the number of tokens
    tile_edges: np.ndarray
    # (first tile, end tile) of each running state
    states: list[tuple[int, int]]
    # first token, and first running state, of each split; shares that are merged undivided are one split
    split_starts: np.ndarray
    split_states: np.ndarray
    shares: int
    # largest number of tokens of a tile, tiles of a state, tokens of a state, states of a split or share
    longest_tile: int
    most_tiles: int
    most_tokens: int
    most_states: int

    @staticmethod
    def of(order: Order, context_len: int, undivided: bool = False) -> Layout:
        """ValueError unless the order covers every token of the context exactly once, without empty parts."""
        states = [state for split in order for state in split]
        tiles = [tile for state in states for tile in state]
        tokens = np.concatenate([np.asarray(tile, dtype=np.int64) for tile in tiles] or [np.zeros(0, np.int64)])
        if not np.array_equal(np.sort(tokens), np.arange(context_len)) or not all(map(len, [*states, *tiles])):
            raise ValueError(f"order: expected every token in [0, {context_len}) once, got {order}")
        tile_edges = np.cumsum([0, *map(len, tiles)])
        state_edges = np.cumsum([0, *map(len, states)])
        split_states = np.array([0, len(states)]) if undivided and order else np.cumsum([0, *map(len, order)])
        return Layout(
            tokens=tokens,
            tile_edges=tile_edges,
            states=list(pairwise(state_edges.tolist())),
            split_starts=tile_edges[state_edges[split_states[:-1]]],
            split_states=split_states[:-1],
            shares=max(1, len(order)) if undivided else 1,
            longest_tile=max(map(len, tiles), default=0),
            most_tiles=max(map(len, states), default=0),
            most_tokens=max((sum(map(len, state)) for state in states), default=0),
            most_states=max(map(len, order), default=0),
        )

    def running_maximum(self, scores: np.ndarray, noise: np.ndarray, lazy: float = 0.0) -> Running:
        """`scores [group_size, context_len]`; maxima closer than `noise [group_size]` may come out swapped.

        A score up to `lazy` above a maximum does not raise it by itself. When one of another head does, all heads may be raised.
        """
        noise = noise[:, None]
        sizes = np.diff(self.tile_edges)
        spread = lambda per_tile: np.repeat(per_tile, sizes, axis=1)
        own = np.maximum.reduceat(scores, self.tile_edges[:-1], axis=1)
        # The maximum in use, at its highest and at its lowest, before and after each tile.
        before, after, low_before, low = (np.full(own.shape, -np.inf) for _ in range(4))
        changes, sure = np.zeros(own.shape, bool), np.zeros(own.shape, bool)
        first, end = np.array(self.states, np.int64).reshape(-1, 2).T
        for step in range(self.most_tiles):
            tile = (first + step)[first + step < end]
            if step:
                before[:, tile], low_before[:, tile] = after[:, tile - 1], low[:, tile - 1]
            x, top, bottom = own[:, tile], before[:, tile], low_before[:, tile]
            # Whether it may be raised here, which a NaN does too, and whether it must be.
            may, must = ~(x + noise <= bottom + lazy), x - noise > top + lazy
            may = may.any(axis=0) if lazy else may
            after[:, tile] = np.where(may, np.maximum(top, x), top)
            low[:, tile] = np.where(must | (lazy == 0), np.maximum(bottom, x), bottom)
            changes[:, tile], sure[:, tile] = may & (bottom > -np.inf) & (x > bottom - noise), must
        later, final, final_low, per_state = np.zeros(own.shape), after.copy(), low.copy(), after[:, end - 1]
        for a, b in self.states:
            later[:, a : b - 1] = np.cumsum(changes[:, b - 1 : a : -1], axis=1)[:, ::-1]
            final[:, a:b], final_low[:, a:b] = after[:, b - 1 : b], low[:, b - 1 : b]
        per_split = np.maximum.reduceat(per_state, self.split_states, axis=1)
        near = scores > spread(after) - noise
        alone = np.add.reduceat(near, self.tile_edges[:-1], axis=1, dtype=np.int64) == 1
        return Running(
            tokens=spread(after),
            low=spread(low),
            state_final=spread(final),
            state_low=spread(final_low),
            split_final=np.repeat(per_split, np.diff([*self.split_starts, len(self.tokens)]), axis=1),
            later_changes=spread(later),
            sure_maximum=near & spread(alone & sure),
            changes=changes,
            rise=np.where(changes, np.maximum(after - low_before, 0), 0),
        )


@dataclass(frozen=True)
class Accumulated:
    """Error of acc, relative to the whole weighted sum, per `[group_size, head_dim]`."""

    # never exceeded
    bound: np.ndarray
    # variance of the part that is as good as independent, the shared exponentials of rescales included
    variance: np.ndarray
    # size of the part that leans to one side: truncation
    bias: np.ndarray


def accumulate(a: Arithmetic, pi: np.ndarray, v: np.ndarray, out: np.ndarray, layout: Layout, running: Running) -> Accumulated:
    """Error of `acc = sum pi_j v_j` in the order of `layout`, from the exact prefixes.

    `pi [group_size, context_len]` and `v [context_len, head_dim]` are in the kernel's order. A float32 addition
    rounds by u |prefix|; a block FMA by `mma_result |prefix| + mma_align max(|prefix before|, max |p v|)`. No sum
    does worse than (operations on the longest path) u sum |p v|, in whatever order.
    """
    bound, variance, bias = np.zeros_like(out), np.zeros_like(out), np.zeros_like(out)
    step = a.mma_result + a.mma_align
    parts, rest = a.p_parts
    blocks_of = lambda tokens: -(-tokens // a.mma_products)
    for tiles, tokens, before, within in _prefixes(pi, v, layout):
        edges = layout.tile_edges[tiles.start : tiles.stop + 1] - tokens.start
        sizes, ends = np.diff(edges), edges[1:] - 1
        prefix = np.repeat(before, sizes, axis=1) + within
        tile_ends = prefix[:, ends]
        changes = running.changes[:, tiles, None]
        exponential = U32 * (a.ex2 + a.argument_roundings * running.rise[:, tiles, None])
        weight_before = _weight_before(pi, layout, tiles)
        centred = before - weight_before * out[:, None]
        shared = (exponential * centred) ** 2 + U32**2 * (before**2 + (weight_before * out[:, None]) ** 2)
        variance += np.where(changes, shared, 0).sum(1) / 3
        if a.pv in ("fma", "fma_tile"):
            sums = [prefix] if a.pv == "fma" else [within, tile_ends]
            bound += sum(U32 * np.abs(x).sum(1) for x in sums)
            variance += sum(U32**2 * (x**2).sum(1) for x in sums) / 3
        elif a.pv in ("mma", "mma_tile"):
            # Blocks of consecutive tokens, from the start of the tile. What the accumulator holds before and after:
            held, start = (prefix, before) if a.pv == "mma" else (within, np.zeros_like(before))
            starts = np.concatenate([np.arange(*edge, a.mma_products) for edge in pairwise(edges)])
            after = np.abs(held[:, np.append(starts[1:], edges[-1]) - 1])
            ahead = np.abs(held[:, starts - 1])
            ahead[:, np.isin(starts, edges)] = np.abs(start)
            largest = np.maximum.reduceat(np.abs(pi[:, tokens, None] * v[tokens]), starts, axis=1)
            leaning = (a.mma_result * after + a.mma_align * np.maximum(ahead, largest)).sum(1)
            # Parts of P are multiplied apart: the first is off P V by the others, whose products have errors of their own size.
            leaning += rest * (2 * a.mma_result + a.mma_align) * (pi[:, tokens] @ np.abs(v[tokens]))
            bound += (parts - 1) * U32 * np.abs(within[:, ends]).sum(1)
            bound += leaning
            bias += leaning
            if a.pv == "mma_tile":
                bound += U32 * np.abs(tile_ends).sum(1)
                variance += U32**2 * (tile_ends**2).sum(1) / 3
    magnitude = pi @ np.abs(v)
    if a.pv in ("mma", "mma_tile"):
        blocks = max(blocks_of(np.diff(layout.tile_edges)[first:end]).sum() for first, end in layout.states)
        depth = (blocks * step + layout.most_tiles * U32) * (1 + 2 * rest) + layout.most_tiles * (parts - 1) * U32
        return Accumulated(np.minimum(bound, depth * magnitude), variance, bias)
    if a.pv == "any":
        variance += layout.most_tokens * (U32 * magnitude) ** 2 / 3
        return Accumulated(layout.most_tokens * U32 * magnitude, variance, bias)
    depth = layout.most_tokens + layout.most_tiles * (a.pv == "fma_tile")
    return Accumulated(np.minimum(bound, depth * U32 * magnitude), variance, bias)


def _weight_before(pi: np.ndarray, layout: Layout, tiles: slice) -> np.ndarray:
    """Sum of the weights of a state before each tile, `[group_size, tiles, 1]`."""
    first = next(a for a, b in layout.states if a <= tiles.start < b)
    edges = layout.tile_edges[first : tiles.stop + 1]
    sums = np.add.reduceat(pi[:, edges[0] : edges[-1]], edges[:-1] - edges[0], axis=1)
    return (np.cumsum(sums, axis=1) - sums)[:, tiles.start - first :, None]


def _prefixes(pi: np.ndarray, v: np.ndarray, layout: Layout) -> Iterator[tuple[slice, slice, np.ndarray, np.ndarray]]:
    """Runs of whole tiles of one running state, at most about CHUNK elements each.

    Yields `tiles, tokens`, what the state's acc holds before each tile `[group_size, tiles, head_dim]`, and the
    sums from the start of its tile to each token `[group_size, tokens, head_dim]`.
    """
    limit = max(1, CHUNK // (len(pi) * v.shape[1]))
    for first, end in layout.states:
        held = np.zeros((len(pi), 1, v.shape[1]))
        while first < end:
            room = layout.tile_edges[first] + limit
            stop = min(end, max(first + 1, int(np.searchsorted(layout.tile_edges, room, side="right")) - 1))
            edges = layout.tile_edges[first : stop + 1]
            tokens, local = slice(edges[0], edges[-1]), edges - edges[0]
            prefix = np.cumsum(pi[:, tokens, None] * v[tokens], axis=1)
            until = np.concatenate([np.zeros_like(held), prefix[:, local[1:] - 1]], axis=1)
            within = prefix - np.repeat(until[:, :-1], np.diff(local), axis=1)
            yield slice(first, stop), tokens, held + until[:, :-1], within
            held = held + until[:, -1:]
            first = stop
