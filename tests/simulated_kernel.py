"""A split decode kernel in NumPy float32 that does what an `Arithmetic` says, with functions as bad as documented."""

import numpy as np

from verify.arithmetic import DTYPES, UNIT

F32 = np.float32
LN2 = np.log(2)


def fma(a, b, c):
    """One rounding: the product of two float32 is exact in float64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(F32)


def truncate(x, exponent):
    """x cut toward zero to a multiple of 2^exponent."""
    return np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent)


def block_fma(c, products, extra_bits):
    """Tensor core: terms `products [block, ...]` and c aligned to the largest, truncated, result toward zero."""
    terms = np.concatenate([np.float64(c)[None], products])
    largest = np.abs(terms).max(0)
    top = np.frexp(np.where(largest == 0, 1, largest))[1] - 1
    total = truncate(terms, top - 23 - extra_bits).sum(0)
    exponent = np.frexp(np.where(total == 0, 1, total))[1] - 1
    return truncate(total, exponent - 23).astype(F32)


class Kernel:
    """`run(q, k, v, scale, order)` for the heads of one KV head. `wobble(shape)` gives errors in [-1, 1] of ex2 and
    lg2, in units of what is documented."""

    def __init__(self, arithmetic, wobble):
        self.a, self.wobble = arithmetic, wobble

    def ex2(self, x):
        exact = np.exp2(np.float64(x))
        y = exact.astype(F32)
        y = (y + np.trunc(2.999 * self.wobble(y.shape)) * np.spacing(y)).astype(F32)
        y = np.where(x == 0, F32(1), y)
        return np.where(exact < 2.0**-126, F32(0), y)

    def lg2(self, x):
        exact = np.log2(np.float64(x))
        return (exact + self.a.lg2 / 4 * 2.0**-22 * 0.7 * np.maximum(1, abs(exact)) * self.wobble(exact.shape)).astype(F32)

    def dot(self, q, k):
        products = (q[:, None] * np.float64(k)).transpose(2, 0, 1)
        if self.a.dot == "mma":
            chains = np.zeros((self.a.dot_chains, *products.shape[1:]), F32)
            for i in range(0, len(products), self.a.mma_products):
                chain = i // 16 % self.a.dot_chains
                chains[chain] = block_fma(chains[chain], products[i : i + self.a.mma_products], self.a.mma_extra_bits)
            return np.add.reduce(chains, axis=0, dtype=F32)
        total = np.zeros(products.shape[1:], F32)
        for i in range(0, len(products), 8):
            chunk = np.zeros_like(total)
            for product in products[i : i + 8]:
                chunk = (product + chunk).astype(F32)
            total = total + chunk
        return total

    def store_p(self, p):
        """The parts of P that multiply V, as float64."""
        name, _, parts = self.a.p.rpartition("x") if self.a.p[-2] == "x" else (self.a.p, "", 1)
        if name == "float32":
            return [np.float64(p)]
        rest, found, shift = np.float64(p) * 2.0**self.a.p_shift, [], 0
        for _ in range(int(parts)):
            part = np.ldexp(np.ldexp(rest, shift).astype(DTYPES[name]).astype(np.float64), -shift)
            found, rest = [*found, part * 2.0**-self.a.p_shift], rest - part
            shift += 11 * (name == "float16")
        return found

    def pv(self, acc, parts, v):
        if self.a.pv == "mma_tile":
            total = np.zeros_like(acc)
            for p in reversed(parts):
                total = (self.products(np.zeros_like(acc), p, v) + total).astype(F32)
            return acc + total
        total = self.products(np.zeros_like(acc) if self.a.pv.endswith("tile") else acc, sum(parts), v)
        return acc + total if self.a.pv.endswith("tile") else total

    def products(self, total, p, v):
        products = np.moveaxis(p[..., None] * v, 1, 0)
        if self.a.pv.startswith("mma"):
            for i in range(0, len(products), self.a.mma_products):
                total = block_fma(total, products[i : i + self.a.mma_products], self.a.mma_extra_bits)
        else:
            for product in products:
                total = (product + total).astype(F32)
        return total

    def sum_l(self, l, p):
        """l, a sum or 8 sums side by side, and a tile's P."""
        if self.a.l_sum == "lanes":
            for i in range(p.shape[1]):
                l[:, i % 8] += p[:, i].astype(F32)
            return l
        while self.a.l_sum == "tree" and p.shape[1] > 1:
            p = np.pad(p, [(0, 0), (0, p.shape[1] % 2)])
            p = (p[:, ::2] + p[:, 1::2]).astype(F32)
        return l + np.add.accumulate(p.astype(F32), axis=1)[:, -1:]

    def state(self, q, k, v, tiles):
        m, acc = np.full(len(q), -np.inf, F32), np.zeros((len(q), v.shape[1]), F32)
        l = np.zeros((len(q), 8 if self.a.l_sum == "lanes" else 1), F32)
        for tile in tiles:
            x, old = self.score(self.dot(q, k[list(tile)])), m
            if (self.argument(x - m[:, None]) > self.a.lazy).any() or not self.a.lazy:
                m = np.maximum(m, x.max(1))
            alpha = self.ex2(self.argument(old - m))
            p = self.ex2(self.argument(x - m[:, None]))
            held = self.store_p(p)
            acc = self.pv(acc * alpha[:, None], held, np.float64(v[list(tile)]))
            l = self.sum_l(l * alpha[:, None], sum(held) if self.a.l_from_p else p)
        while l.shape[1] > 1:
            l = l[:, ::2] + l[:, 1::2]
        return m, l[:, 0], acc

    def score(self, dot):
        return (dot * self.c).astype(F32) if self.a.score == "scaled" else dot

    def argument(self, difference):
        return difference if self.a.score == "scaled" else (difference * self.c).astype(F32)

    def together(self, parts, batch):
        """Undivided states, `batch` at a time."""
        m, l, acc = np.full_like(parts[0][0], -np.inf), np.zeros_like(parts[0][1]), np.zeros_like(parts[0][2])
        for i in range(0, len(parts), batch):
            old, m = m, np.max([m, *(part[0] for part in parts[i : i + batch])], axis=0)
            alpha = self.ex2(self.argument(old - m))
            l, acc = l * alpha, acc * alpha[:, None]
            for m_w, l_w, acc_w in parts[i : i + batch]:
                weight = self.ex2(self.argument(m_w - m))
                l, acc = fma(weight, l_w, l), fma(weight[:, None], acc_w, acc)
        return m, l, acc

    def split(self, q, k, v, states):
        parts = [self.state(q, k, v, tiles) for tiles in states]
        return self.together(parts, len(parts))

    def shares(self, q, k, v, order):
        """All shares as one state."""
        pieces, ways = [self.split(q, k, v, states) for states in order], self.a.share_ways[0]
        return self.together([self.together(pieces[way::ways], 8) for way in range(min(ways, len(pieces)))], 2)

    def normalised(self, m, l, acc):
        """o, and the natural lse."""
        in_log2 = np.float64(m) * (self.c if self.a.score == "bare" else 1)
        return acc / l[:, None], self.log_sum(in_log2 * LN2, l)

    def log_sum(self, m, l):
        scaled = (self.lg2(l) * F32(LN2)).astype(F32)
        return (m + np.float64(scaled)).astype(F32)

    def weight(self, x):
        return self.ex2((x.astype(F32) * F32(1 / LN2)).astype(F32))

    def merge(self, o, lse, places=None):
        """States `o [s, head, d]` and `lse [s, head]`; `places` are theirs among all, of which the others are empty."""
        ways = [self.a.merge_way(s) for s in (range(len(o)) if places is None else places)]
        sums = [self.merge_one_way(o, lse, np.flatnonzero(np.equal(ways, way))) for way in sorted(set(ways))]
        m, l, acc = sums[0]
        if len(sums) > 1:
            m, l, acc = np.max([m for m, _, _ in sums], axis=0), np.zeros_like(l), np.zeros_like(acc)
            for m_w, l_w, acc_w in sums:
                w = self.weight(m_w - m)
                acc, l = fma(w[:, None], acc_w, acc), fma(w, l_w, l)
        return acc / l[:, None], self.log_sum(m, l)

    def merge_one_way(self, o, lse, states):
        acc, l = np.zeros(o[0].shape, F32), np.zeros(lse[0].shape, F32)
        m = lse.max(0) if self.a.merge == "max_first" else lse[states[0]]
        for s in states:
            old, m = m, np.maximum(m, lse[s])
            alpha = self.weight(old - m)
            w = self.weight(lse[s] - m)
            acc, l = fma(w[:, None], o[s], acc * alpha[:, None]), l * alpha + w
        return m, l, acc

    def run(self, q, k, v, scale, order):
        """Output before its last rounding (float32), output, lse, and the stored partials [split, head, ...]."""
        q, k, v = (np.asarray(x).astype(F32) for x in (q, k, v))
        self.c = F32(scale / LN2)
        full = [split for split in order if split]
        undivided = [self.shares(q, k, v, full)] if self.a.share_ways else [self.split(q, k, v, split) for split in full]
        states = [self.normalised(*state) for state in undivided]
        o = np.stack([s[0] for s in states])
        lse = np.stack([s[1] for s in states])
        if len(order) == 1 or self.a.share_ways:
            return o[0], o[0].astype(DTYPES[self.a.out_dtype]), lse[0], (o, lse)
        o = o.astype(DTYPES[self.a.partial_dtype])
        lse = lse.astype(DTYPES[self.a.lse_dtype]).astype(F32)
        out, total = self.merge(o.astype(F32), lse, [i for i, split in enumerate(order) if split])
        return out, out.astype(DTYPES[self.a.out_dtype]), total, (o, lse)


def random_wobble(rng):
    """Errors anywhere in [-1, 1]."""
    return lambda shape: rng.uniform(-1, 1, shape)


assert UNIT["float32"] == 2.0**-24
