/* Chooses one of many weights: nucleus, relative floor, one uniform number.
 *
 * Invariant: the index equals that of the NumPy form in engine/sampling/sampler.py, or is -1 if rounding
 * could decide. Sums that enter the result are added in the documented order: float64, blocks of
 * SUM_BLOCK entries from left to right, then the blocks. The nucleus is found by bisection with
 * sums in another order, and is used only if no sum comes near its target.
 */
#define SUM_LANES 16 /* blocks, or entries, summed in parallel */
#define FEW_WEIGHTS 64

/* ends[b] = sum of blocks 0..b; returns the total. */
static double sum_blocks(const float *w, int64_t n, double *ends) {
    int64_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK, whole = n / SUM_BLOCK, b = 0;
    for (; b + SUM_LANES <= whole; b += SUM_LANES) {
        double sums[SUM_LANES] = {0};
        for (int i = 0; i < SUM_BLOCK; i++)
            for (int j = 0; j < SUM_LANES; j++) sums[j] += w[(b + j) * SUM_BLOCK + i];
        memcpy(ends + b, sums, sizeof sums);
    }
    for (; b < blocks; b++) {
        double sum = 0;
        for (int64_t i = b * SUM_BLOCK; i < n && i < (b + 1) * SUM_BLOCK; i++) sum += w[i];
        ends[b] = sum;
    }
    for (b = 1; b < blocks; b++) ends[b] += ends[b - 1];
    return ends[blocks - 1];
}

/* First index whose running sum exceeds `threshold` (or reaches it); the last if there is none. */
static int64_t find_sum(const float *w, int64_t n, const double *ends, double threshold,
                        int reach) {
    int64_t low = 0, high = (n + SUM_BLOCK - 1) / SUM_BLOCK, blocks = high;
    while (low < high) {
        int64_t b = (low + high) / 2;
        if (reach ? ends[b] >= threshold : ends[b] > threshold) high = b;
        else low = b + 1;
    }
    if (low == blocks) return n - 1;
    double before = low ? ends[low - 1] : 0, inside = 0;
    for (int64_t i = low * SUM_BLOCK; i < n; i++) {
        inside += w[i];
        if (reach ? before + inside >= threshold : before + inside > threshold) return i;
    }
    return n - 1;
}

typedef struct {
    double sum;
    int64_t count;
} Above;

/* Sum, in undefined order, and number of the weights >= limit. */
static Above sum_from(const float *w, int64_t n, float limit) {
    double sums[LANES] = {0};
    vf counts = v_set(0), from = v_set(limit);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        float kept[LANES];
        vf v = v_load(w + i);
        v_store(kept, v_keep(v, v, from));
        counts = v_add(counts, v_keep(v_set(1), v, from));
        for (int j = 0; j < LANES; j++) sums[j] += kept[j];
    }
    Above a = {0, (int64_t)v_total(counts)};
    for (int j = 0; j < LANES; j++) a.sum += sums[j];
    for (; i < n; i++)
        if (w[i] >= limit) a.sum += w[i], a.count++;
    return a;
}

typedef struct {
    float cut;     /* smallest weight kept */
    int64_t equal; /* number of weights equal to it that are kept, lowest indices first */
} Cut;

/* The weights to keep: the first `turn` entries from `low` on, the others from `high` on. */
typedef struct {
    int64_t turn;
    float low, high;
} Keep;

/* Whether a vector has weights in [low, high). */
static inline int some_between(const float *w, float low, float high) {
    vf v = v_load(w), one = v_set(1);
    return v_largest(v_sub(v_keep(one, v, v_set(low)), v_keep(one, v, v_set(high)))) > 0;
}

/* Descending list of the weights in [low, high), no more than FEW_WEIGHTS. */
static int list_between(const float *w, int64_t n, float low, float high, float *few) {
    int count = 0;
    for (int64_t from = 0; from < n; from += LANES) {
        if (from + LANES <= n && !some_between(w + from, low, high)) continue;
        for (int64_t i = from; i < n && i < from + LANES; i++) {
            if (!(w[i] >= low && w[i] < high)) continue;
            int at = count++;
            for (; at > 0 && few[at - 1] < w[i]; at--) few[at] = few[at - 1];
            few[at] = w[i];
        }
    }
    return count;
}

/* The entry after the `equal`-th one that equals cut. */
static int64_t turn_behind(const float *w, int64_t n, float cut, int equal) {
    float next = float_of(bits_of(cut) + 1);
    for (int64_t from = 0; from < n; from += LANES) {
        if (from + LANES <= n && !some_between(w + from, cut, next)) continue;
        for (int64_t i = from; i < n && i < from + LANES; i++)
            if (w[i] == cut && --equal == 0) return i + 1;
    }
    return n;
}

/* Take the largest of the weights in [low, high) until the sum reaches the target. */
static int cut_among(const float *w, int64_t n, float low, float high, double above, double target,
                     double doubt, Keep *keep) {
    float few[FEW_WEIGHTS];
    int count = list_between(w, n, low, high, few), equal = 0;
    for (int i = 0; i < count; i++) {
        equal = i && few[i] == few[i - 1] ? equal + 1 : 1;
        above += few[i];
        if (fabs(above - target) <= doubt) return 0;
        if (above < target) continue;
        keep->low = few[i];
        keep->high = float_of(bits_of(few[i]) + 1);
        keep->turn = turn_behind(w, n, few[i], equal);
        return 1;
    }
    return 0;
}

static float largest(const float *w, int64_t n) {
    vf top = v_set(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) top = v_max(top, v_load(w + i));
    float best = v_largest(top);
    for (; i < n; i++) best = w[i] > best ? w[i] : best;
    return best;
}

/* The shortest list of largest weights that reaches the target; 0 if rounding could decide.
 * Non-negative floats are ordered like their bits, so halving bits halves orders of magnitude. */
static int find_nucleus(const float *w, int64_t n, double total, double target, Keep *keep) {
    double doubt = total * (double)n * 4.5e-16; /* 2 n 2^-53: two sums in different orders */
    /* All weights below this one together are less than the part that may be left out. */
    uint32_t low = bits_of((float)(0.5 * (total - target) / (double)n)), high = bits_of(largest(w, n)) + 1;
    if (!(target > doubt && target < total - doubt)) return 0;
    Above from_low = sum_from(w, n, float_of(low)), from_high = {0, 0};
    if (from_low.sum < target + doubt) return 0;
    while (from_low.count - from_high.count > FEW_WEIGHTS) {
        if (high - low < 2) return 0; /* many equal weights */
        uint32_t middle = low + (high - low) / 2;
        Above a = sum_from(w, n, float_of(middle));
        if (fabs(a.sum - target) <= doubt) return 0;
        if (a.sum > target) low = middle, from_low = a;
        else high = middle, from_high = a;
    }
    return cut_among(w, n, float_of(low), float_of(high), from_high.sum, target, doubt,
                     keep);
}

/* Gather the kept weights; starts[b] = number of kept weights before entry b * SUM_BLOCK. `kept` has
 * room for DRAW_SLACK more than n. */
static int64_t keep_weights(const float *w, int64_t n, Keep keep, float *kept, int64_t *starts) {
    int64_t count = 0;
    for (int64_t from = 0; from < n; from += SUM_BLOCK) {
        int64_t to = from + SUM_BLOCK < n ? from + SUM_BLOCK : n, i = from;
        starts[from / SUM_BLOCK] = count;
        if (to - from == SUM_BLOCK && (to <= keep.turn || from >= keep.turn)) {
            vf limit = v_set(to <= keep.turn ? keep.low : keep.high);
            for (; i < to; i += LANES) count += v_squeeze(kept + count, v_load(w + i), limit);
        }
        for (; i < to; i++) {
            kept[count] = w[i];
            count += w[i] >= (i < keep.turn ? keep.low : keep.high);
        }
    }
    return count;
}

/* Index of the entry that keep_weights stored as number `rank`. */
static int64_t kept_index(const float *w, int64_t n, Keep keep, const int64_t *starts,
                          int64_t rank) {
    int64_t low = 0, high = (n - 1) / SUM_BLOCK;
    while (low < high) { /* last block that starts at or before rank */
        int64_t b = (low + high + 1) / 2;
        if (starts[b] <= rank) low = b;
        else high = b - 1;
    }
    int64_t before = starts[low];
    for (int64_t i = low * SUM_BLOCK; i < n; i++)
        if (w[i] >= (i < keep.turn ? keep.low : keep.high) && before++ == rank) return i;
    return -1;
}

static int64_t invert(const float *w, int64_t n, const double *ends, double total, double draw) {
    double threshold = draw * total;
    return find_sum(w, n, ends, threshold, threshold >= total);
}

/* kept: n + DRAW_SLACK floats; ends and starts: a number for every SUM_BLOCK entries. */
static int64_t draw(const float *w, int64_t n, double top_p, float min_p, double uniform,
                    float *kept, double *ends, int64_t *starts) {
    double total = sum_blocks(w, n, ends);
    Keep keep = {0, 0, 0};
    if (!(total < INFINITY)) return -1;
    if (!(top_p < 1) && !(min_p > 0)) return invert(w, n, ends, total, uniform);
    if (top_p < 1 && !find_nucleus(w, n, total, top_p * total, &keep)) return -1;
    if (keep.low < min_p) keep.low = min_p;
    if (keep.high < min_p) keep.high = min_p;
    int64_t count = keep_weights(w, n, keep, kept, starts);
    if (count == 0) return -1;
    total = sum_blocks(kept, count, ends);
    return kept_index(w, n, keep, starts, invert(kept, count, ends, total, uniform));
}
