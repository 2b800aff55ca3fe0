// Selection among the entries of one row by a thread block: bounds, lists by ascending id, cuts, sums.
//
// An entry has a weight and a key; keys are unsigned and a larger key comes first. The largest logit
// of each group of 64 bounds the group, so a sharp distribution reads few groups again. Lists hold
// kListed entries; larger sets are read again instead ("wide"), in the same order. All threads of
// the block call these functions with the same arguments and get the same results.
#pragma once
#include "sample_row.cuh"

// 320 threads leave 96 registers to each in two blocks per multiprocessor; 384 would leave 80, too few.
constexpr int kThreads = 320, kWarps = kThreads / 32, kBlocks = 2;
constexpr int kListRuns = 6, kListed = kListRuns * kThreads;
constexpr int kTileRuns = 2, kRunGroups = kThreads / 16;  // a run is 4 entries of each thread
// Counts of a run over all threads, packed into one word: up to kThreads of a list, 4 times as many of a tile.
constexpr int kListBits = 64 / kListRuns, kTileBits = 64 / kTileRuns;
static_assert(kListed % kSumBlock == 0 && kThreads >> kListBits == 0, "lists are cut into blocks of sums");
constexpr int kThresholds = 3;                   // of one pass over entries that do not fit the list
constexpr unsigned kLeastBound = 0x2b800000u;    // 2^-40

struct Found {  // where a draw is, in shared memory
    double before, threshold;
    int found, reach;
};
struct Choice : Found {  // shared memory
    unsigned groups[kMaxGroups];         // weight of each group's largest logit
    unsigned short chosen[kMaxGroups];   // groups that may hold candidates, rising
    union {
        struct {
            int ids[kListed];
            __align__(16) unsigned keys[kListed];
        } list;
        double ends[kMaxSums];
    };
    unsigned long long totals[kWarps];
    double sums[kListed / kSumBlock];
    int counts[kWarps], wide_counts[kThresholds][kWarps];
    float tile[kSumBlock];
    double total;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / 32); }

__device__ __forceinline__ double warp_sum_double(double v) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) v += __shfl_xor_sync(kAll, v, lanes);
    return v;
}

// Sum of v over the threads before this one; `total` over all kOf warps. v may pack several.
template <int kOf>
__device__ __forceinline__ unsigned long long scan(unsigned long long v, unsigned long long& total,
                                                   unsigned long long* totals) {
    unsigned long long inclusive = v;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const unsigned long long other = __shfl_up_sync(kAll, inclusive, lanes);
        if (lane_id() >= lanes) inclusive += other;
    }
    if (lane_id() == 31) totals[warp_id()] = inclusive;
#ifndef BATON_PLANT_SAMPLE_BARRIER
    __syncthreads();
#endif
    unsigned long long before = inclusive - v;
    total = 0;
#pragma unroll 4  // more would take the registers of a second block per multiprocessor
    for (int w = 0; w < kOf; w++) {
        if (w < warp_id()) before += totals[w];
        total += totals[w];
    }
    __syncthreads();
    return before;
}
__device__ __forceinline__ unsigned long long scan(unsigned long long v, unsigned long long& total,
                                                   Choice& s) {
    return scan<kWarps>(v, total, s.totals);
}
template <int kBits> __device__ __forceinline__ int field(unsigned long long packed, int i) {
    return static_cast<int>(packed >> (kBits * i) & ((1ull << kBits) - 1));
}

// ---------------------------------------------------------------- entries

__device__ __forceinline__ unsigned ordered(float x) {
    unsigned bits = __float_as_uint(x);
    if (bits == 0x80000000u) bits = 0;  // both zeros are equal
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The entries of a row. For drawing, keys are the weights, or, by_score, the logits divided by the
// temperature, which can differ where weights are equal. For reports, keys are the raw logits.
template <class T, bool kRaw> struct Entries {
    RowLogits<T> in;
    float best;
    Temperature temperature;
    bool by_score;

    // Weight of a logit, as bits, and its key.
    __device__ __forceinline__ unsigned look(float logit, unsigned& key) const {
        const float below = __fsub_rn(logit, best);
        if (kRaw) {
            key = ordered(logit);
            return __float_as_uint(exp_weight(below));
        }
        const float score = temperature.divide(below);
        const unsigned weight = __float_as_uint(exp_weight(score));
        key = by_score ? kInfinity - (__float_as_uint(score) & 0x7fffffffu) : weight;
        return weight;
    }
    __device__ __forceinline__ float4 load(int i) const {
        return kRaw ? in.raw(i) : in.adjusted(i);
    }
    // The thread's 4 logits of the chosen group number `at`, undefined beyond the last. Loaded ahead of
    // visit4, because a load takes longer than the work on a group.
    __device__ __forceinline__ float4 fetch4(const Choice& s, int at, int chosen) const {
        return load(s.chosen[min(at, chosen - 1)] * kGroup + static_cast<int>(threadIdx.x % 16) * 4);
    }
    // Calls visit(weight, key, id, j) for these 4 entries.
    template <class Visit>
    __device__ __forceinline__ void visit4(const float4& x, const Choice& s, int at, int chosen,
                                           Visit visit) const {
        if (at >= chosen) return;
        const int i = s.chosen[at] * kGroup + static_cast<int>(threadIdx.x % 16) * 4;
        const float logits[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned key;
            const unsigned weight = look(logits[j], key);
            if (i + j < in.vocab) visit(weight, key, i + j, j);
        }
    }
};

__device__ __forceinline__ unsigned weight_of_score(unsigned key) {
    return __float_as_uint(exp_weight(-__uint_as_float(kInfinity - key)));
}

// The goal of a cut: a number of entries, or a sum of weights.
struct Goal {
    bool by_count;
    int count;
    double sum;

    __device__ __forceinline__ bool met(int n, double weight) const {
#ifdef BATON_PLANT_SAMPLE_TOP_K
        if (by_count) return n > count;
#endif
        return by_count ? n >= count : n > 0 && weight >= sum;
    }
    // Number of equal entries of a weight that are needed after the entries before them.
    __device__ __forceinline__ int needed(int n, double weight, unsigned equal) const {
        if (by_count) return count - n;
        const double each = __uint_as_float(equal), rest = sum - weight;
        if (!(each > 0.0) || !(rest > each)) return 1;
        const double quotient = rest / each;
        long long m = quotient < 1e6 ? static_cast<long long>(quotient) : 1000000;
        while (m > 1 && weight + static_cast<double>(m - 1) * each >= sum) m--;
        while (m < 1000000 && weight + static_cast<double>(m) * each < sum) m++;
        return static_cast<int>(m);
    }
};

// Entries up to the id `turn` are kept from key `low` on, later ones from `high` on.
struct Keep {
    unsigned low, high;
    int turn;

    __device__ __forceinline__ bool operator()(unsigned key, int id) const {
        return key >= (id <= turn ? low : high);
    }
    __device__ __forceinline__ void at_least(unsigned key) {
        low = max(low, key), high = max(high, key);
    }
};

// Selects entries for a list: weight at least `weight`, a key that is kept and is below `below`.
struct Window {
    unsigned weight;
    Keep keep;
    unsigned below;

    __device__ __forceinline__ bool operator()(unsigned of, unsigned key, int id) const {
        return of >= weight && key < below && keep(key, id);
    }
};

__device__ __forceinline__ unsigned with_slack(unsigned weight) {
    return weight > kWeightSlack ? weight - kWeightSlack : min(weight, 1u);
}

// A weight at which the groups' maxima alone meet the goal, close below the largest such weight; 0 if
// there is none above 2^-40. Each warp tries one threshold.
__device__ inline unsigned bound_by_maxima(Choice& s, int groups, const Goal& goal) {
    unsigned low = kLeastBound, high = kWeightOfBest + 1;
    for (int round = 0; round < 3; round++) {
        const unsigned span = high - low;
        const unsigned from =
            low + static_cast<unsigned>(static_cast<unsigned long long>(span) * warp_id() / kWarps);
        int n = 0;
        float sum = 0.0f;
        for (int g = lane_id(); g < groups; g += 32) {
            const unsigned weight = s.groups[g];
            if (weight >= from) n++, sum += __uint_as_float(weight);
        }
        n = __reduce_add_sync(kAll, n);
        sum = warp_sum(sum);
        if (lane_id() == 0) s.counts[warp_id()] = n, s.sums[warp_id()] = sum;
        __syncthreads();
        int met = -1, count = 0;
#pragma unroll 4
        for (int w = 0; w < kWarps; w++)  // the margin covers the rounding of float sums
            if (goal.met(s.counts[w], s.sums[w] * 0.9999)) met = w, count = s.counts[w];
        __syncthreads();
        if (met < 0) return round ? with_slack(low) : 0;
        const unsigned long long wide = span;
        high = met + 1 < kWarps ? low + static_cast<unsigned>(wide * (met + 1) / kWarps) : high;
        low += static_cast<unsigned>(wide * met / kWarps);
        if (count <= 256 + (goal.by_count ? goal.count : 0) || high - low < kWarps) break;
    }
    return with_slack(low);
}

// Lists the groups whose maximum reaches a weight; returns their number.
__device__ inline int choose_groups(Choice& s, int groups, unsigned low) {
    low = with_slack(low);
    const int each = (groups + kThreads - 1) / kThreads, from = static_cast<int>(threadIdx.x) * each;
    int n = 0;
    for (int g = from; g < from + each && g < groups; g++) n += s.groups[g] >= low;
    unsigned long long total;
    int at = static_cast<int>(scan(static_cast<unsigned long long>(n), total, s));
    for (int g = from; g < from + each && g < groups; g++)
        if (s.groups[g] >= low) s.chosen[at++] = static_cast<unsigned short>(g);
    __syncthreads();
    return static_cast<int>(total);
}

// Lists the entries of a window by ascending id, starting with number `first`. Returns the number of
// entries; may stop after `stop` entries.
template <class E>
__device__ inline int collect(const E& e, Choice& s, int chosen, const Window& window, int first,
                              int stop) {
    int rank = 0;
    if (chosen == 0) return rank;
    const int own = static_cast<int>(threadIdx.x / 16);
    float4 ahead[kTileRuns];
#pragma unroll
    for (int run = 0; run < kTileRuns; run++) ahead[run] = e.fetch4(s, run * kRunGroups + own, chosen);
    for (int tile = 0; tile < chosen && rank < stop; tile += kTileRuns * kRunGroups) {
        unsigned keys[kTileRuns * 4], kept = 0;
        unsigned long long counts = 0, total;
#pragma unroll
        for (int run = 0; run < kTileRuns; run++) {
            const int at = tile + run * kRunGroups + own;
            const float4 x = ahead[run];
            ahead[run] = e.fetch4(s, at + kTileRuns * kRunGroups, chosen);
            e.visit4(x, s, at, chosen, [&](unsigned weight, unsigned key, int id, int j) {
                keys[run * 4 + j] = key;
                if (window(weight, key, id)) kept |= 1u << (run * 4 + j);
            });
            counts |= static_cast<unsigned long long>(__popc(kept >> (run * 4))) << (kTileBits * run);
        }
        const unsigned long long before = scan(counts, total, s);
#pragma unroll
        for (int run = 0; run < kTileRuns; run++) {
            const int group = tile + run * kRunGroups + static_cast<int>(threadIdx.x / 16);
            int at = rank + field<kTileBits>(before, run) - first;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!(kept >> (run * 4 + j) & 1u)) continue;
                if (at >= 0 && at < kListed) {
                    s.list.ids[at] = s.chosen[group] * kGroup + static_cast<int>(threadIdx.x % 16) * 4 + j;
                    s.list.keys[at] = keys[run * 4 + j];
                }
                at++;
            }
            rank += field<kTileBits>(total, run);
        }
    }
    __syncthreads();
    return rank;
}

// Removes list entries that are not kept; returns the number left.
__device__ inline int filter(Choice& s, int listed, const Keep& keep) {
    int ids[kListRuns];
    unsigned keys[kListRuns], kept = 0;
    unsigned long long counts = 0, total;
#pragma unroll
    for (int run = 0; run < kListRuns; run++) {
        const int i = run * kThreads + static_cast<int>(threadIdx.x);
        if (i >= listed) continue;
        ids[run] = s.list.ids[i], keys[run] = s.list.keys[i];
        if (!keep(keys[run], ids[run])) continue;
        kept |= 1u << run;
        counts |= 1ull << (kListBits * run);
    }
    const unsigned long long before = scan(counts, total, s);  // also waits until all have read
    int start = 0;
#pragma unroll
    for (int run = 0; run < kListRuns; run++) {
        const int at = start + field<kListBits>(before, run);
        if (kept >> run & 1u) s.list.ids[at] = ids[run], s.list.keys[at] = keys[run];
        start += field<kListBits>(total, run);
    }
    __syncthreads();
    return start;
}

// ---------------------------------------------------------------- cuts

// The bracket of a search: the goal is met at key `low` but not at `high`; with counts and sum there.
struct Bracket {
    unsigned low, high;
    int count_low, count_high;
    double sum_high;

    __device__ __forceinline__ unsigned at(unsigned top, int i, int parts) const {
        return low + static_cast<unsigned>(static_cast<unsigned long long>(top - low) * (i + 1) / parts);
    }
    // Takes over the result at threshold i, in ascending order; false after the first unmet one.
    __device__ __forceinline__ bool learn(unsigned key, const Goal& goal, int n, double sum) {
        if (key >= high) return false;
        if (goal.met(n, sum)) {
            low = key, count_low = n;
            return true;
        }
        high = key, count_high = n, sum_high = sum;
        return false;
    }
};

// If few keys are far above the others, the first thresholds stay below `soft`.
__device__ __forceinline__ unsigned top_of(const Bracket& b, unsigned soft, int round) {
    return round == 0 && soft > b.low && soft - b.low > 64 && soft < b.high ? soft : b.high;
}

// Id of the m-th listed entry (from 1) with a key in [low, high).
__device__ inline int id_in_turn(Choice& s, int listed, unsigned low, unsigned high, int m) {
    if (warp_id() == 0) {
        int before = 0;
        for (int base = 0; base < listed; base += 32) {
            const int i = base + lane_id();
            const bool in = i < listed && s.list.keys[i] >= low && s.list.keys[i] < high;
            const unsigned lanes = __ballot_sync(kAll, in);
            if (in && before + __popc(lanes & ((2u << lane_id()) - 1)) == m) s.found = s.list.ids[i];
            before += __popc(lanes);
        }
    }
    __syncthreads();
    const int id = s.found;
    __syncthreads();
    return id;
}

// Cuts the listed entries in the bracket b. Each warp tries one threshold per round.
// The order of the sums is fixed but differs from the documented one. It can change the cut only if
// a running sum is as near to the goal as rounding, about 1e-13 of it.
__device__ inline Keep cut_list(Choice& s, int listed, const Goal& goal, Bracket b, unsigned soft) {
    const int above = b.count_high;
    const double sum_above = b.sum_high;
    for (int round = 0; b.count_low - b.count_high > 1 && b.high - b.low > 1; round++) {
        const unsigned top = top_of(b, soft, round), from = b.at(top, warp_id(), kWarps + 1);
        int n = 0;
        double sum = 0.0;
        for (int i = lane_id(); i < listed; i += 32) {
            const unsigned key = s.list.keys[i];
            if (key < from) continue;
            n++;
            if (!goal.by_count) sum += static_cast<double>(__uint_as_float(key));
        }
        n = __reduce_add_sync(kAll, n);
        sum = warp_sum_double(sum);
        if (lane_id() == 0) s.counts[warp_id()] = above + n, s.sums[warp_id()] = sum_above + sum;
        __syncthreads();
        const Bracket old = b;
#pragma unroll 2
        for (int w = 0; w < kWarps; w++)
            if (!b.learn(old.at(top, w, kWarps + 1), goal, s.counts[w], s.sums[w])) break;
        __syncthreads();
    }
    Keep keep = {b.low, b.low, -1};
    const int crowd = b.count_low - b.count_high;
    if (crowd <= 1) return keep;
    const int m = goal.needed(b.count_high, b.sum_high, b.low);
    if (m >= crowd) return keep;
    keep.high = b.high;
    keep.turn = id_in_turn(s, listed, b.low, b.high, m);
    return keep;
}

// Counts the entries of weight `low` and more at each threshold, in s.counts.
template <class E>
__device__ inline void tally(const E& e, Choice& s, int chosen, unsigned low,
                             const Bracket& b, unsigned top) {
    int n[kThresholds];
    unsigned thresholds[kThresholds];
#pragma unroll
    for (int t = 0; t < kThresholds; t++) n[t] = 0, thresholds[t] = b.at(top, t, kThresholds + 1);
    constexpr int kAhead = 2;
    for (int at = static_cast<int>(threadIdx.x / 16); at < chosen; at += kAhead * kRunGroups) {
        float4 x[kAhead];
#pragma unroll
        for (int run = 0; run < kAhead; run++) x[run] = e.fetch4(s, at + run * kRunGroups, chosen);
#pragma unroll
        for (int run = 0; run < kAhead; run++)
            e.visit4(x[run], s, at + run * kRunGroups, chosen, [&](unsigned weight, unsigned key, int, int) {
#pragma unroll
                for (int t = 0; t < kThresholds; t++) n[t] += weight >= low && key >= thresholds[t];
            });
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kThresholds; t++) {
        const int count = __reduce_add_sync(kAll, n[t]);
        if (lane_id() == 0) s.wide_counts[t][warp_id()] = count;
    }
    __syncthreads();
    if (threadIdx.x < kThresholds) {
        int count = 0;
#pragma unroll 4
        for (int w = 0; w < kWarps; w++) count += s.wide_counts[threadIdx.x][w];
        s.counts[threadIdx.x] = count;
    }
    __syncthreads();
}

struct Selection {
    Keep keep;
    int listed;  // number of candidates in the list; -1: not all fit
};

// Cuts the chosen groups' entries of weight `low` and more at a number of entries. Keys are at most `most`.
template <class E>
__device__ inline Selection select(const E& e, Choice& s, int chosen, unsigned low, const Goal& goal,
                                   unsigned most) {
    // Scores are dense near 0: most binades of their keys are above a score of -1/64.
    const unsigned soft = most == kInfinity ? kInfinity - 0x3c800000u : 0;
    const Keep all = {0, 0, -1};
    const int n = collect(e, s, chosen, Window{low, all, kAll}, 0, kListed + 1);
    if (n <= goal.count) return Selection{all, n};
    Bracket b = {0, most + 1, n, 0, 0.0};
    if (n <= kListed) return Selection{cut_list(s, n, goal, b, soft), n};
    b.count_low = 0x7fffffff;  // unknown until a threshold meets the goal
    for (int round = 0; b.count_low - b.count_high > kListed && b.high - b.low > 1; round++) {
        const unsigned top = top_of(b, soft, round);
        tally(e, s, chosen, low, b, top);
        const Bracket old = b;
        for (int t = 0; t < kThresholds; t++)
            if (!b.learn(old.at(top, t, kThresholds + 1), goal, s.counts[t], 0.0)) break;
        __syncthreads();
    }
    // The rest of the bracket fits the list, or consists of equal keys.
    const bool crowd = b.count_low - b.count_high > kListed;
    const int m = crowd ? goal.needed(b.count_high, b.sum_high, b.low) : 1;
    Keep keep = {b.low, b.low, -1};
    const int inside = collect(e, s, chosen, Window{low, keep, b.high}, m - 1, crowd ? m : kListed + 1);
    if (!crowd) return Selection{cut_list(s, inside, goal, b, 0), -1};
    if (inside >= m) keep.high = b.high, keep.turn = s.list.ids[0];
    __syncthreads();
    return Selection{keep, -1};
}

// Lists the kept entries; returns their number.
template <class E>
__device__ inline int list_kept(const E& e, Choice& s, int chosen, unsigned low,
                                const Selection& found) {
    if (found.listed >= 0) return filter(s, found.listed, found.keep);
    return collect(e, s, chosen, Window{low, found.keep, kAll}, 0, kListed + 1);
}

// ---------------------------------------------------------------- running sums

// Where a part of the chain of additions 0 + v0 + v1 + ... starts and ends; lane l has the l-th part.
// chain(x) adds the lane's own values to x, one after the other. Each lane runs its part from a guess.
// If every part starts where the previous one ended, all values are those of the chain, to the last bit.
// Rounding rarely depends on the start of a part, so shifting the starts by their errors corrects nearly
// all at once; each round certainly corrects one lane. Whole warps only.
struct Part {
    double start, end;
};
__device__ __forceinline__ double sum_up_to(double v) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const double other = __shfl_up_sync(kAll, v, lanes);
        if (lane_id() >= lanes) v += other;
    }
    return v;
}
template <class Chain> __device__ __forceinline__ Part chain_part(Chain chain) {
    const double own = chain(0.0);
    Part part;
    part.start = sum_up_to(own) - own;  // of lane 0: exactly 0
#pragma unroll 1
    for (int round = 0; round <= 32; round++) {
        part.end = chain(part.start);
        double due = __shfl_up_sync(kAll, part.end, 1);
        if (lane_id() == 0) due = 0.0;
        const unsigned wrong = __ballot_sync(kAll, due != part.start);
        if (!wrong) break;
        const double shift = sum_up_to(due - part.start);
        part.start = lane_id() == __ffs(static_cast<int>(wrong)) - 1 ? due : part.start + shift;
    }
    return part;
}

// A warp's sums of kRuns blocks of 128 weights, of which each lane has 4 neighbours: w[run].
// Run r is in the 32 / kRuns lanes from lane 32 r / kRuns on. The bits are those of the chain from left to
// right. If all weights are multiples of u, and their sum is less than 2^53 u, every sum of some of them
// is exact, so that any order gives the chain's bits: lanes are then added in pairs. Else the lanes have
// parts of the chain.
template <int kRuns> __device__ __forceinline__ double block_sums(const float4* w) {
    static_assert(kSumBlock == 4 * 32 && (kRuns == 1 || kRuns == 4), "a lane has 4 entries");
    double sums[kRuns];
    float limits[kRuns];
#pragma unroll
    for (int run = 0; run < kRuns; run++) {
        const float4& x = w[run];
        sums[run] = static_cast<double>(x.x) + static_cast<double>(x.y) +
                    (static_cast<double>(x.z) + static_cast<double>(x.w));
        // The least weight above 0: 0 - 1 is the largest number.
        unsigned least = min(min(__float_as_uint(x.x) - 1u, __float_as_uint(x.y) - 1u),
                             min(__float_as_uint(x.z) - 1u, __float_as_uint(x.w) - 1u));
        least = __reduce_min_sync(kAll, least);
        limits[run] = __uint_as_float((least == kAll ? kInfinity : least + 1u) & kInfinity);
    }
    double sum = sums[0];
    float limit = limits[0];
    if (kRuns == 4) {
        const bool upper = lane_id() & 16, odd = lane_id() & 8;
        const double low = upper ? sums[2] : sums[0], high = upper ? sums[3] : sums[1];
        const double pair[2] = {low + __shfl_xor_sync(kAll, upper ? sums[0] : sums[2], 16),
                                high + __shfl_xor_sync(kAll, upper ? sums[1] : sums[3], 16)};
        sum = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(kAll, odd ? pair[0] : pair[1], 8);
        limit = upper ? (odd ? limits[3] : limits[2]) : (odd ? limits[1] : limits[0]);
    }
#pragma unroll
    for (int lanes = kRuns == 4 ? 4 : 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(kAll, sum, lanes);
#ifndef BATON_PLANT_SAMPLE_EXACT
    // u is the last place of the least weight, 2^-23 of its power of two.
    const unsigned inexact = __ballot_sync(kAll, !(sum < static_cast<double>(limit) * 536870912.0));
#pragma unroll
    for (int run = 0; run < kRuns; run++) {
        if (!(inexact >> (32 / kRuns * run) & 1u)) continue;
        const Part part = chain_part([&](double x) {
            x += static_cast<double>(w[run].x), x += static_cast<double>(w[run].y);
            x += static_cast<double>(w[run].z), x += static_cast<double>(w[run].w);
            return x;
        });
        const double chain = __shfl_sync(kAll, part.end, 31);
        if (lane_id() / (32 / kRuns) == run) sum = chain;
    }
#endif
    return sum;
}

// Sums of the blocks of 128 of weights[0 .. n-1], in shared memory, to `sums`, by kOf warps. All wait for
// them. Weights behind n, up to a multiple of 128, are read but not added.
template <int kOf> __device__ inline void sum_blocks(const float* weights, int n, double* sums) {
    for (int block = warp_id(); block * kSumBlock < n; block += kOf) {
        const int at = block * kSumBlock + lane_id() * 4;
        float4 x = *reinterpret_cast<const float4*>(weights + at);
        if (at >= n) x.x = 0.0f;
        if (at + 1 >= n) x.y = 0.0f;
        if (at + 2 >= n) x.z = 0.0f;
        if (at + 3 >= n) x.w = 0.0f;
#ifdef BATON_PLANT_SAMPLE_LANE
        if (lane_id() == 31) x.w = 0.0f;
#endif
        const double sum = block_sums<1>(&x);
        if (lane_id() == 0) sums[block] = sum;
    }
#ifndef BATON_PLANT_SAMPLE_SUM_BARRIER
    __syncthreads();
#endif
}

// A warp's running sums of values[0 .. n-1], from left to right; each lane has a part.
template <class Value> struct RunningSums {
    const Value* values;
    int each, from, to;
    Part part;

    __device__ __forceinline__ RunningSums(const Value* values_, int n) : values(values_) {
        each = (n + 31) / 32 | 1;  // odd: neighbouring lanes read different banks
        from = min(n, lane_id() * each), to = min(n, from + each);
        part = chain_part([&](double sum) {
            for (int i = from; i < to; i++) sum += static_cast<double>(values[i]);
            return sum;
        });
    }
    __device__ __forceinline__ double total() const { return __shfl_sync(kAll, part.end, 31); }

    // First index at which before + (values[0] + ... + values[i]) exceeds the threshold (or reaches it);
    // if there is none, the last index with a value above 0. `until`: the chain before that index.
    __device__ __forceinline__ int first_beyond(double before, double threshold, bool reach, double& until) const {
        double sum = part.start, found_until = 0.0, last_until = 0.0;
        int found = 0x7fffffff, last = -1;
        for (int i = from; i < to; i++) {
            const double x = static_cast<double>(values[i]), next = sum + x, running = before + next;
            if (x > 0.0) last = i, last_until = sum;
            if (found == 0x7fffffff && (reach ? running >= threshold : running > threshold))
                found = i, found_until = sum;
            sum = next;
        }
        const int first = __reduce_min_sync(kAll, found), positive = __reduce_max_sync(kAll, last);
        if (first == 0x7fffffff) {
            until = positive < 0 ? 0.0 : __shfl_sync(kAll, last_until, positive / each);
            return max(positive, 0);
        }
        until = __shfl_sync(kAll, found_until, first / each);
        return first;
    }
};

// Finds which of n block sums contains the row's share of their total: s.found, with s.before (the sums
// before it), s.threshold and s.reach. Warp 0 only.
__device__ __forceinline__ void find_block(Found& s, const double* sums, int n, const SampleRow& row) {
    const RunningSums<double> running(sums, n);
    const double total = running.total(), threshold = uniform(row.seed, row.position) * total;
    const bool reach = threshold >= total;  // rounding can lift the product to the total
    double until;
    const int block = running.first_beyond(0.0, threshold, reach, until);
    if (lane_id() == 0)
        s.found = block, s.before = until, s.threshold = threshold, s.reach = reach;
}

// Finds which of the n weights of that block contains it. Warp 0 only.
__device__ __forceinline__ int find_in_block(Found& s, const float* weights, int n) {
    double until;
    const RunningSums<float> running(weights, n);
    const int at = running.first_beyond(s.before, s.threshold, s.reach != 0, until);
    __syncwarp();
    return at;
}

// Sums the blocks of 128 listed weights into s.sums; returns the number of blocks.
__device__ inline int sum_list(Choice& s, int listed) {
    sum_blocks<kWarps>(reinterpret_cast<const float*>(s.list.keys), listed, s.sums);
    return (listed + kSumBlock - 1) / kSumBlock;
}
