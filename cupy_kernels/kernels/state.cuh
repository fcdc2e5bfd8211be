// The merge algebra, its one home on the device.
//
// An attention state is (o, lse): a weighted mean of values and the logarithm of its total weight; (0, -inf) is empty.
// A token is a state too: (v, score). So one running maximum and sum serves the tokens of a split and the states of a merge:
//
//     m = max x_i      l = sum exp(x_i - m)      o = sum exp(x_i - m) o_i / l      lse = m + log(l)
//
// Sources: Milakov & Gimelshein 2018 for the rescaling, the Flash-Decoding post of 2023 for the merge.
#define NEG_INF __int_as_float(0xff800000)
#define LOG2_E 1.44269504088896340736f
// ln 2 as two floats: one float alone would cost half an ulp of |m| in every natural lse.
#define LN2_HI 0.693147182464599609375f
#define LN2_LO -1.90465429995776804525e-9f

struct Softmax {
    // The unit of x and m: 1 for base-2 logarithms (scores inside a kernel), log2(e) for natural ones (states at a boundary).
    float log2_per_unit = 1.f;
    float m = NEG_INF;
    float l = 0.f;

    // Subtracting m = -inf would turn "nothing yet" into NaN: (-inf) - (-inf). Any finite pivot does, as all weights are 0 then.
    __device__ float pivot() const { return m == NEG_INF ? 0.f : m; }

    // Subtract first: the difference is small and nearly exact, while a product of a large x is off by half an ulp of x.
    __device__ float weight(float x) const { return ex2((x - pivot()) * log2_per_unit); }

    // Raises the maximum to cover x; what was accumulated so far is to be multiplied by the result, as l is here.
    // fmaxf drops a NaN, and so does m: the NaN lives on in l and o through weight(), where nothing takes it for "empty".
    __device__ float raise(float x) {
        const float old = m;
        m = fmaxf(m, x);
        const float alpha = weight(old);
        l *= alpha;
        return alpha;
    }

    // Empty is l == 0 and nothing else: testing l > 0, or m, would turn a NaN into "empty".
    __device__ bool empty() const { return l == 0.f; }

    // o of what was accumulated. Empty is selected: 0 / 0 is NaN, and NaN times a weight of 0 is NaN still.
    __device__ float normalised(float accumulated) const { return empty() ? 0.f : accumulated / l; }

    // The log-sum-exp in the unit of x.
    __device__ float lse() const { return empty() ? NEG_INF : m + log2f(l) / log2_per_unit; }

    // The natural log-sum-exp of base-2 scores.
    __device__ float natural_lse() const {
        return empty() ? NEG_INF : fmaf(m, LN2_HI, fmaf(m, LN2_LO, log2f(l) * LN2_HI));
    }

    // For tensor cores: x is a bare dot product, log2_per_unit its scale, and states meet before they are divided by l.

    // log2 of the weight x would have. Not below any limit while there is no maximum: +inf, or NaN where x is -inf or NaN too.
    __device__ float excess(float x) const { return (x - m) * log2_per_unit; }

    // Takes in an undivided state (m_x, l_x), whose m_x an earlier raise() has covered; its accumulator is to be multiplied by the
    // result. An empty one weighs 0; one that holds a NaN keeps it, as 0 * NaN is NaN.
    __device__ float take(float m_x, float l_x) {
        const float w = weight(m_x);
        l = fmaf(w, l_x, l);
        return w;
    }

    // The log-sum-exp of x * log2_per_unit in base 2, or natural. m * log2_per_unit is an exact pair of floats on the way.
    __device__ float scaled_lse(bool natural) const {
        const float high = m * log2_per_unit, low = fmaf(m, log2_per_unit, -high) + log2f(l);
        return empty() ? NEG_INF : natural ? fmaf(high, LN2_HI, fmaf(high, LN2_LO, low * LN2_HI)) : high + low;
    }
};
