"""The mutants: faults planted in the kernels' own text, each one seen in the wild or one slip of the pen away from it.

A mutant is a list of text replacements for `cupy_kernels.jit.settings(patches=...)`; the text it replaces has to stand there exactly
once, so a mutant cannot silently go stale. `verify.mutation` runs them against the input families.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupy_kernels.jit import Patches


@dataclass(frozen=True)
class Mutant:
    """One planted fault."""

    # mutants that share a number are variants of one fault
    row: int
    name: str
    fault: str
    patches: Patches
    # One of the five mistakes that everybody makes once; they stand out in the report.
    classic: str = ""
    # A change that is no fault: it must pass everything.
    healthy: bool = False
    # where splits are meant to be cut, and are judged by: at "pages" or at "tokens"
    cut: str = "pages"


def _partial(*pairs: tuple[str, str]) -> Patches:
    return tuple(("partial.cu", old, new) for old, new in pairs)


def _merge(*pairs: tuple[str, str]) -> Patches:
    return tuple(("merge.cu", old, new) for old, new in pairs)


def _state(*pairs: tuple[str, str]) -> Patches:
    return tuple(("state.cuh", old, new) for old, new in pairs)


def _pages(*pairs: tuple[str, str]) -> Patches:
    return tuple(("pages.cuh", old, new) for old, new in pairs)


def _half(value: str, c_type: str = "__half") -> str:
    return f"to_float(from_float<{c_type}>({value}))"


_RAISE = "const float rescale = state.raise(warp_max(score));"
_MASKED = "head_dim) * scale_log2 : NEG_INF;"
_SCORE = """first + lane < tokens.end
                ? dot(q_tile + h * head_dim, tile + lane * (head_dim + 1), head_dim) * scale_log2 : NEG_INF;"""
_P = "p[h][lane] = state.weight(score);"
_SUM_L = "state.l += warp_sum(p[h][lane]);"
_LOAD_Q = "q_tile[i] = to_float(q[request * q_batch_stride + (first_head + i / head_dim) * q_head_stride + i % head_dim]);"
_LOAD_K = "load_tile(tile, k_cache + kv_head * k_head_stride, pages, first, tokens.end,"
_LOAD_V = "load_tile(tile, v_cache + kv_head * v_head_stride, pages, first, tokens.end,"
_ACC = "acc[i] = fmaf(acc[i], alpha[h], sum);"
_STORE_O = "from_float<OUT>(Softmax{1.f, m[h], l[h]}.normalised(acc[i]));"
_STORE_LSE = "natural ? state.natural_lse() : state.lse();"
_PAGE_END = "(tokens.end + page_size - 1) / page_size * page_size"
_RUNNING = """Running merged = {{log2_per_unit}};
    for (int first"""
_TAKE = "const float weight = sum.weight(x);"
_TAKE_O = "add(weight, o_x);"
_MERGED = "    merged.store(o + row.offset(o_outer_stride, o_inner_stride), lse + row.offset(lse_outer_stride, lse_inner_stride), d);\n}\n\n// Two"
_MERGED_O = "from_float<T>(sum.normalised(acc.at[i]));"
_MERGED_LSE = "*lse = sum.lse();"
_NATURAL = "return empty() ? NEG_INF : fmaf(m, LN2_HI, fmaf(m, LN2_LO, log2f(l) * LN2_HI));"
_OFFSET = "page_table[token / page_size] * page_stride"
_VISIBLE = "max(0, length - window)"


def _lse(expression: str) -> str:
    return _MERGED_LSE.replace("sum.lse()", expression)


def _before_store(factor: str) -> tuple[str, str]:
    """Multiplies what is divided by l in the end."""
    return (_MERGED, f"    for (float& a : merged.acc.at) a *= {factor};\n" + _MERGED)


def _store(c_type: str) -> Patches:
    return _partial((_STORE_O, f"from_float<OUT>({_half('Softmax{1.f, m[h], l[h]}.normalised(acc[i])', c_type)});"))


def _store_lse(c_type: str) -> Patches:
    return _partial((_STORE_LSE, _half("natural ? state.natural_lse() : state.lse()", c_type) + ";"))


# A cut along tokens. The correct one reads a page at the border twice, its tokens once; the fault counts those tokens twice.
_CUT = "{(int)min(begin, (long long)length), (int)min(end, (long long)length)}"
_TOKEN_CUT = "{(int)((long long)split * length / num_splits), (int)((split + 1LL) * length / num_splits)}"
_TOKEN_CUT_PAGES = (
    "{(int)((long long)split * length / num_splits / page_size * page_size), "
    "(int)min((long long)length, ((split + 1LL) * length / num_splits + page_size - 1) / page_size * page_size)}"
)

# The formulas as they stand on paper, without a thought for "nothing": no pivot, nothing selected.
UNGUARDED_PARTIAL = _partial(
    (_RAISE, "const float old = state.m;\n            state.m = fmaxf(old, warp_max(score));\n"
             "            const float rescale = ex2(old - state.m);\n            state.l *= rescale;"),
    (_P, "p[h][lane] = ex2(score - state.m);"),
    (_STORE_O, "from_float<OUT>(acc[i] / l[h]);"),
    (_STORE_LSE, "(state.m + log2f(state.l)) * (natural ? LN2_HI : 1.f);"),
)  # fmt: skip
UNGUARDED_MERGE = _merge(
    ("merged.raise(warp_max(top));", "merged.sum.m = warp_max(top);"),
    ("if (x == NEG_INF) continue;", "if (first + i >= num_states) continue;"),
    (_TAKE, "const float weight = ex2((x - sum.m) * sum.log2_per_unit);"),
    (_MERGED_O, "from_float<T>(acc.at[i] / sum.l);"),
    (_MERGED_LSE, _lse("sum.m + log2f(sum.l) / sum.log2_per_unit")),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (
    Mutant(1, "no_max", "scores exponentiated without subtracting the maximum",
           _partial((_RAISE, "state.m = 0.f;\n            const float rescale = 1.f;"))),
    Mutant(2, "max_starts_at_zero", "the running maximum starts at 0 instead of -inf",
           _partial(("m[threadIdx.x] = NEG_INF;", "m[threadIdx.x] = 0.f;"))),
    Mutant(3, "sentinel_5e4", "masked scores are -5e4 instead of -inf", _partial((_MASKED, _MASKED.replace("NEG_INF", "-5e4f")))),
    Mutant(3, "sentinel_1e4", "masked scores are -1e4 instead of -inf", _partial((_MASKED, _MASKED.replace("NEG_INF", "-1e4f")))),
    Mutant(4, "merge_without_max", "the merge exponentiates lse without subtracting the maximum",
           _merge((_TAKE, "sum.m = 0.f;\n        " + _TAKE)), classic="merge without the maximum"),
    Mutant(5, "sum_of_o", "the merge adds the o of all splits",
           _merge((_TAKE_O, "add(1.f, o_x);"), _before_store("merged.sum.l")), classic="o without lse"),
    Mutant(6, "average_of_o", "the merge averages the o of all splits",
           _merge((_TAKE_O, "add(1.f, o_x);"), _before_store("merged.sum.l / num_states")), classic="o without lse"),
    Mutant(7, "natural_as_base_2", "natural lse merged as base 2",
           _merge((_RUNNING, _RUNNING.replace("log2_per_unit", "1.f")),
                  ("        merged = {{log2_per_unit}};", "        merged = {{1.f}};"))),
    Mutant(7, "base_2_as_natural", "base-2 lse merged as natural", _partial((_STORE_LSE, "state.lse();"))),
    Mutant(8, "exp2_without_log2e", "exp2 of natural scores", _partial((_MASKED, _MASKED.replace("scale_log2", "(scale_log2 * LN2_HI)")))),
    Mutant(9, "acc_not_rescaled", "the accumulator keeps its old maximum", _partial((_ACC, "acc[i] = acc[i] + sum;"))),
    Mutant(9, "l_not_rescaled", "the denominator keeps its old maximum", _state(("l *= alpha;", ""))),
    Mutant(9, "alpha_in_base_e", "rescale factors in base e", _state(("const float alpha = weight(old);", "const float alpha = expf(old - pivot());"))),
    Mutant(10, "no_division", "partial o stored without the division by l", _partial((_STORE_O, "from_float<OUT>(acc[i]);"))),
    Mutant(11, "lse_without_max", "the returned lse lacks the maximum", _merge((_MERGED_LSE, _lse("log2f(sum.l) / sum.log2_per_unit")))),
    Mutant(11, "lse_in_base_2", "the returned lse is in base 2", _merge((_MERGED_LSE, _lse("sum.lse() * sum.log2_per_unit")))),
    Mutant(12, "split_overlap", "splits overlap by a page", _pages(("end = begin + pps * page_size;", "end = begin + (pps + 1) * page_size;"))),
    Mutant(13, "tail_pages_dropped", "pages per split rounded down", _pages(("(pages + num_splits - 1) / num_splits;", "pages / num_splits;"))),
    Mutant(14, "last_split_dropped", "the merge stops one state early",
           _merge(("first + lane < num_states ? *lse_s", "first + lane < num_states - 1 ? *lse_s"))),
    Mutant(15, "newest_token_lost", "the length is one short", _partial(("const int length = covered_length(", "const int length = -1 + covered_length("))),
    Mutant(16, "last_page_not_masked", "the last page counts as full",
           _pages(("(int)min(end, (long long)length)}", "(int)min(end, pages * page_size)}"))),
    Mutant(17, "v_not_zeroed", "V past the length is read, times a weight of 0", _partial((_LOAD_V, _LOAD_V.replace("tokens.end", _PAGE_END)))),
    Mutant(18, "additive_mask", "the mask is added to the score of whatever K holds",
           _partial((_LOAD_K, _LOAD_K.replace("tokens.end", _PAGE_END)),
                    (_SCORE, "dot(q_tile + h * head_dim, tile + lane * (head_dim + 1), head_dim) * scale_log2\n"
                             "                + (first + lane < tokens.end ? 0.f : NEG_INF);"))),
    Mutant(19, "wrong_kv_head", "query heads mapped to KV heads by modulo",
           _partial(("kv_head * k_head_stride", "first_head % (int)(gridDim.y / head_chunks) * k_head_stride"),
                    ("kv_head * v_head_stride", "first_head % (int)(gridDim.y / head_chunks) * v_head_stride"))),
    Mutant(20, "window_too_wide", "the window shows one key too many", _pages((_VISIBLE, "max(0, length - window - 1)"))),
    Mutant(20, "window_too_narrow", "the window hides its oldest key", _pages((_VISIBLE, "max(0, length - window + 1)"))),
    Mutant(21, "zero_over_zero", "an empty split divides 0 by 0",
           _state(("return empty() ? 0.f : accumulated / l;", "return accumulated / l;")), classic="NaN from empty splits"),
    Mutant(22, "empty_lse_nan", "an empty split's lse is computed, not selected",
           _state((_NATURAL, _NATURAL.replace("empty() ? NEG_INF : ", ""))), classic="NaN from empty splits"),
    Mutant(23, "inf_minus_inf", "(-inf) - (-inf) where all is empty",
           _state(("return m == NEG_INF ? 0.f : m;", "return m;")), classic="NaN from empty splits"),
    Mutant(24, "empty_lse_zero", "an empty split says lse = 0", _state((_NATURAL, _NATURAL.replace("NEG_INF", "0.f")))),
    Mutant(25, "stale_partials", "an empty split writes nothing",
           _partial(("    // o[request, head, split, :] and lse", "    if (tokens.begin >= tokens.end) return;\n    // o[request, head, split, :] and lse"))),
    Mutant(26, "partial_fp16", "partial o stored in fp16", _store("__half"), classic="16-bit partials"),
    Mutant(27, "partial_bf16", "partial o stored in bf16", _store("__nv_bfloat16"), classic="16-bit partials"),
    Mutant(28, "lse_fp16", "partial lse stored in fp16", _store_lse("__half"), classic="16-bit partials"),
    Mutant(29, "lse_bf16", "partial lse stored in bf16", _store_lse("__nv_bfloat16"), classic="16-bit partials"),
    Mutant(30, "p_bf16", "P rounded to bf16", _partial((_P, "p[h][lane] = " + _half("state.weight(score)", "__nv_bfloat16") + ";"))),
    Mutant(31, "acc_fp16", "the accumulator in fp16", _partial((_ACC, "acc[i] = " + _half("fmaf(acc[i], alpha[h], sum)") + ";"))),
    Mutant(31, "l_fp16", "the denominator in fp16", _partial((_SUM_L, "state.l = " + _half("state.l + warp_sum(p[h][lane])") + ";"))),
    Mutant(32, "scores_fp16", "scores rounded to fp16",
           _partial(("? dot(q_tile + h * head_dim, tile + lane * (head_dim + 1), head_dim) * scale_log2 :",
                     "? " + _half("dot(q_tile + h * head_dim, tile + lane * (head_dim + 1), head_dim) * (scale_log2 * LN2_HI)") + " * LOG2_E :"))),
    Mutant(33, "scaled_q_fp16", "q * scale rounded to fp16",
           _partial((_LOAD_Q, "q_tile[i] = " + _half("to_float(" + _LOAD_Q.partition("to_float(")[2].rstrip(";")[:-1] + ") * (scale_log2 * LN2_HI)") + ";"),
                    (_MASKED, _MASKED.replace("scale_log2", "LOG2_E")))),
    Mutant(34, "truncating_cast", "the output is truncated instead of rounded",
           (("types.cuh", "return __float2half_rn(x);", "return __float2half_rn(__int_as_float(__float_as_int(x) & ~0x1fff));"),
            ("types.cuh", "return __float2bfloat16_rn(x);", "return __float2bfloat16_rn(__int_as_float(__float_as_int(x) & ~0xffff));"))),
    Mutant(35, "nan_laundered", "fmax drops the NaN of a weight", _partial((_P, "p[h][lane] = fmaxf(state.weight(score), 0.f);"))),
    Mutant(36, "int32_offset", "page id times page stride in 32 bits", _pages((_OFFSET, "(long long)((unsigned)page_table[token / page_size] * (unsigned)page_stride)"))),
    Mutant(37, "batch_stride_zero", "the merge reads the states of the first request for all",
           _merge(("o_part + row.offset(o_part_outer_stride, o_part_inner_stride)", "o_part + row.offset(0, o_part_inner_stride)"))),
    Mutant(38, "aliased_in_place", "an in-place merge reads back the lse it has just written",
           _merge(("        merged.raise(x_a);\n", "        const float x_a = lse_a[row.offset(lse_a_outer_stride, lse_a_inner_stride)];\n        merged.raise(x_a);\n"))),
    Mutant(39, "border_page_twice", "a cut along tokens that counts the page at the border twice",
           _pages((_CUT, _TOKEN_CUT_PAGES)), cut="tokens", classic="a token cut that counts the border page twice"),
    Mutant(40, "warps_forgotten", "the merge of many states forgets half of the warps that took them",
           _merge(("w < warp + ways; w++) merged.add(", "w < warp + ways / 2; w++) merged.add("))),
    Mutant(39, "token_cut", "a correct cut along tokens: no fault, some pages are read twice", _pages((_CUT, _TOKEN_CUT)), cut="tokens", healthy=True),
)  # fmt: skip
