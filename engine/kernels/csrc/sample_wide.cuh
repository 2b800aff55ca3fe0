// Rows of which top-p or min-p keeps more entries than a list holds, by all blocks of the row.
//
// Kernels run one after the other and find in global memory what the one before wrote:
//
//   bins   of three levels: how many entries, and what sum, each of 1,024 ranges of weights has. A level
//          divides the range of the level before in which top-p cuts; the third has single weights.
//   count  how many entries of each chunk are kept
//   sum    the running sums of the kept entries, in blocks of 128 (docs/sampling.md)
//   draw   a block per row: the block of 128 that holds the share, then the entry
//
// The sums of a range are sums of integers, so they do not depend on the order of the additions. Blocks
// of a row that need a small result of all of them compute it again, each in the same way.
#pragma once
#include "sample_select.cuh"

constexpr int kPassThreads = 256, kPassWarps = kPassThreads / 32, kPassRuns = kChunk / (kPassThreads * 4);
constexpr int kPassBlocks = 4;  // per multiprocessor
constexpr int kLevels = 3, kBinBits = 10, kBins = 1 << kBinBits, kOwnBins = kBins / kPassThreads;
// A range in global memory: the number of its entries, above the sum of their 24-bit mantissas.
constexpr int kCountShift = 43;
// In shared memory it has two words: number and lowest bits of the mantissas, and their other bits.
constexpr int kLowBits = 7, kLowShift = 19;
static_assert(kChunk << kLowBits <= 1 << kLowShift && kChunk <= 1 << (31 - kLowShift), "words do not overflow");
static_assert(kMaxChunks * kChunk <= 1 << (kCountShift - 24) && kMaxChunks <= 64, "sums do not overflow");

enum WideState { kDrawn, kCut, kKnown };  // kCut: top-p cuts; kKnown: min-p alone does

struct Cut {       // kept: larger weights, and the first `needed` that are equal
    unsigned weight;
    int needed;
};
// engine/kernels/cuda/sampling.py allocates it.
struct WideRow {
    int state;
    unsigned low, min_p;  // weights below `low` do not matter
    Cut cut;
    double goal;          // sum that top-p requires
    struct {
        unsigned base;
        double above;
    } found[kLevels - 1]; // by the second and the third level
    int counts[kMaxChunks][2];  // entries above the cut, entries equal to it
    unsigned long long bins[kLevels][kBins];
};
static_assert(sizeof(WideRow) == 25152, "the size in engine/kernels/cuda/sampling.py");

struct WideShared {
    union {
        unsigned words[2][kBins];
        __align__(16) float weights[kChunk];
        double ends[kMaxSums];
    };
    int ids[kSumBlock];
    int starts[kMaxChunks + 1], equal[kMaxChunks];
    unsigned long long totals[kPassWarps];
    double sums[kPassWarps];
    int first[kPassWarps], last[kPassWarps];
    struct {
        unsigned edge;
        int count;
        double above;
    } bin;
};

// A thread's 4 entries of a run of a chunk.
__device__ __forceinline__ int place_in(int chunk, int run) {
    return chunk * kChunk + (run * kPassThreads + static_cast<int>(threadIdx.x)) * 4;
}
__device__ __forceinline__ int place_of(int run) { return place_in(static_cast<int>(blockIdx.x), run); }

// Calls visit(weight, run, j) for the thread's entries of a chunk. Beyond the vocabulary, weights are 0.
template <class E, class Visit>
__device__ __forceinline__ void visit_chunk(const E& e, int chunk, Visit visit) {
    float4 x[kPassRuns];
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) x[run] = e.load(place_in(chunk, run));
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) {
        const float logits[4] = {x[run].x, x[run].y, x[run].z, x[run].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned key;
            visit(e.look(logits[j], key), run, j);
        }
    }
}

// ---------------------------------------------------------------- ranges of weights

struct Span {  // of `size` ranges, each of 2^shift weights; `above`: sum of larger weights
    unsigned base, size;
    int shift;
    double above;
};

// Ranges of a level have one power of two each, because the shift of the first is at most 20.
__device__ __forceinline__ int shift_of(unsigned low, int level) {
    int shift = 0;
#pragma unroll 1
    while ((kWeightOfBest >> shift) - (low >> shift) >= kBins) shift++;
    return max(shift - level * kBinBits, 0);
}

// Sum of the entries of a range whose least weight is `edge`.
__device__ __forceinline__ double sum_of(unsigned long long bin, unsigned edge) {
    const double mantissas = static_cast<double>(static_cast<long long>(bin & ((1ull << kCountShift) - 1)));
    return mantissas * (static_cast<double>(__uint_as_float(edge & kInfinity)) * 0x1p-23);
}

// Finds the range in which the running sum of falling weights reaches the goal: s.bin.
__device__ inline void find_bin(const unsigned long long* bins, const Span& span, double goal, WideShared& s) {
    // Of kOwnBins neighbouring ranges per thread, those with the largest weights first.
    const int own = static_cast<int>(threadIdx.x) * kOwnBins;
    const unsigned top = (span.base >> span.shift) + kBins - 1;
    double sum = 0.0;
#pragma unroll
    for (int i = own; i < own + kOwnBins; i++)
        sum += sum_of(__ldcg(bins + kBins - 1 - i), (top - static_cast<unsigned>(i)) << span.shift);
    const double inclusive = sum_up_to(sum);
    if (lane_id() == 31) s.sums[warp_id()] = inclusive;
    __syncthreads();
    double before = span.above;
#pragma unroll 1
    for (int w = 0; w < warp_id(); w++) before += s.sums[w];
    before += inclusive - sum;
    int first = kBins, last = -1;
    double running = before;
#pragma unroll 1
    for (int i = own; i < own + kOwnBins; i++) {
        const unsigned long long bin = __ldcg(bins + kBins - 1 - i);
        if (!bin) continue;
        running += sum_of(bin, (top - static_cast<unsigned>(i)) << span.shift);
        last = i;
        if (running >= goal) first = min(first, i);
    }
    __syncwarp();
    first = __reduce_min_sync(kAll, first), last = __reduce_max_sync(kAll, last);
    if (lane_id() == 0) s.first[warp_id()] = first, s.last[warp_id()] = last;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < kPassWarps; w++) first = min(first, s.first[w]), last = max(last, s.last[w]);
    if (first == kBins) first = max(last, 0);  // by rounding, none reaches the goal
    if (first / kOwnBins == static_cast<int>(threadIdx.x)) {
#pragma unroll 1
        for (int i = own; i < first; i++)
            before += sum_of(__ldcg(bins + kBins - 1 - i), (top - static_cast<unsigned>(i)) << span.shift);
        s.bin.edge = (top - static_cast<unsigned>(first)) << span.shift;
        s.bin.count = static_cast<int>(__ldcg(bins + kBins - 1 - first) >> kCountShift);
        s.bin.above = before;
    }
    __syncthreads();
}

// The ranges of a level, from what the level before found.
__device__ __forceinline__ Span span_of(const WideRow& row, WideShared& s, int level) {
    const int first = shift_of(row.low, 0), shift = max(first - level * kBinBits, 0);
    const unsigned size = (kWeightOfBest >> first) - (row.low >> first) + 1;
    Span wider = {row.low >> first << first, size, first, 0.0};
    if (level == 0) return wider;
    if (level == 2) wider.base = row.found[0].base, wider.above = row.found[0].above;
    wider.shift = max(first - (level - 1) * kBinBits, 0);
    find_bin(row.bins[level - 1], wider, row.goal, s);
#ifdef BATON_PLANT_WIDE_ABOVE
    return {s.bin.edge, 1u << (wider.shift - shift), shift, wider.above};
#else
    return {s.bin.edge, 1u << (wider.shift - shift), shift, s.bin.above};
#endif
}

template <class E>
__device__ __forceinline__ void fill_bins(const E& e, WideShared& s, WideRow& row, const Span& span,
                                          int level) {
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kPassThreads)
        s.words[0][bin] = s.words[1][bin] = 0;
    __syncthreads();
    const unsigned low = row.low;
    visit_chunk(e, static_cast<int>(blockIdx.x), [&](unsigned weight, int, int) {
        const unsigned bin = (weight >> span.shift) - (span.base >> span.shift);
        if (weight < low || bin >= span.size) return;
        const unsigned mantissa = weight & 0x7fffffu;
        atomicAdd(&s.words[0][bin], 1u << kLowShift | (mantissa & ((1u << kLowBits) - 1)));
        atomicAdd(&s.words[1][bin], mantissa >> kLowBits);
    });
#ifndef BATON_PLANT_WIDE_BARRIER
    __syncthreads();
#endif
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kPassThreads) {
        const unsigned long long first = s.words[0][bin], count = first >> kLowShift;
        if (!count) continue;
        const unsigned long long mantissas = (count << 23) + (first & ((1u << kLowShift) - 1)) +
                                             (static_cast<unsigned long long>(s.words[1][bin]) << kLowBits);
        atomicAdd(&row.bins[level][bin], (count << kCountShift) + mantissas);
    }
}

// ---------------------------------------------------------------- kept entries

__device__ __forceinline__ Cut cut_of(const WideRow& row, WideShared& s) {
    const Cut by_min_p = {row.min_p - 1, 0};
    if (row.state == kKnown) return by_min_p;
    const Span span = {row.found[1].base, 0, shift_of(row.low, 2), row.found[1].above};
    find_bin(row.bins[2], span, row.goal, s);
    if (row.min_p > s.bin.edge) return by_min_p;
    const int needed = Goal{false, 0, row.goal}.needed(0, s.bin.above, s.bin.edge);
    return {s.bin.edge, min(needed, s.bin.count)};
}

template <class E>
__device__ __forceinline__ void count_kept(const E& e, WideShared& s, WideRow& row, const Cut& cut) {
    int counts = 0;  // both at once
    visit_chunk(e, static_cast<int>(blockIdx.x), [&](unsigned weight, int, int) {
        counts += (weight > cut.weight) + ((weight == cut.weight) << 16);
    });
    __syncwarp();
    counts = __reduce_add_sync(kAll, counts);
    if (lane_id() == 0) s.first[warp_id()] = counts;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < kPassWarps; w++) counts += s.first[w];
    row.counts[blockIdx.x][0] = counts & 0xffff, row.counts[blockIdx.x][1] = counts >> 16;
}

// Finds how many entries are kept before each chunk, s.starts, and how many are equal to the cut.
__device__ __forceinline__ void find_starts(const WideRow& row, WideShared& s, int chunks) {
    if (warp_id() == 0) {
        const int at = lane_id() * 2, needed = row.cut.needed;
        unsigned long long counts[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int* of = row.counts[at + i];
            counts[i] = 0;
            if (at + i < chunks)
                counts[i] = static_cast<unsigned>(__ldcg(of)) |
                            static_cast<unsigned long long>(__ldcg(of + 1)) << 32;
        }
        unsigned long long before = counts[0] + counts[1];
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes <<= 1) {
            const unsigned long long other = __shfl_up_sync(kAll, before, lanes);
            if (lane_id() >= lanes) before += other;
        }
        before -= counts[0] + counts[1];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int equal = static_cast<int>(before >> 32);
            if (at + i < chunks) {
                s.equal[at + i] = equal;
                s.starts[at + i] = static_cast<int>(before & kAll) + min(equal, needed);
            }
            before += counts[i];
            if (at + i == chunks - 1)
                s.starts[chunks] = static_cast<int>(before & kAll) +
                                   min(static_cast<int>(before >> 32), needed);
        }
    }
    __syncthreads();
}

// Puts the weights of the kept entries number from .. from + n - 1 into s.weights, and the ids of the
// first 128 into s.ids. All wait for them.
template <class E>
__device__ __forceinline__ void walk_kept(const E& e, WideShared& s, const Cut& cut, int chunks, int from,
                                          int n) {
    constexpr int kField = 16;  // of the counts of a run in a word
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (s.starts[chunk + 1] <= from || s.starts[chunk] >= from + n) continue;
        unsigned weights[kPassRuns][4];
        unsigned long long above = 0, equal = 0, all_above, all_equal;
        visit_chunk(e, chunk, [&](unsigned weight, int run, int j) {
            weights[run][j] = weight;
            above += static_cast<unsigned long long>(weight > cut.weight) << (kField * run);
            equal += static_cast<unsigned long long>(weight == cut.weight) << (kField * run);
        });
        above = scan<kPassWarps>(above, all_above, s.totals);
        equal = scan<kPassWarps>(equal, all_equal, s.totals);
#ifdef BATON_PLANT_WIDE_EQUAL
        const int equal_before = 0;
#else
        const int equal_before = s.equal[chunk];
#endif
        int larger_ones = s.starts[chunk] - min(equal_before, cut.needed), equal_ones = equal_before;
#pragma unroll
        for (int run = 0; run < kPassRuns; run++) {
            int a = larger_ones + field<kField>(above, run), q = equal_ones + field<kField>(equal, run);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const unsigned weight = weights[run][j];
                const bool is_equal = weight == cut.weight && q < cut.needed;
                const int at = a + min(q, cut.needed) - from;
                if ((weight > cut.weight || is_equal) && at >= 0 && at < n) {
                    s.weights[at] = __uint_as_float(weight);
                    if (at < kSumBlock) s.ids[at] = place_in(chunk, run) + j;
                }
                a += weight > cut.weight, q += weight == cut.weight;
            }
            larger_ones += field<kField>(all_above, run), equal_ones += field<kField>(all_equal, run);
        }
    }
    __syncthreads();
}
