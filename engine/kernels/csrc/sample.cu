// Samples tokens from a batch of logits; docs/sampling.md defines the method, engine/sampling/sampler.py is its
// CPU version.
//
//   sample_scan    one pass: the largest logit of each group of 64 and chunk of 4096
//   sample_weigh   a second pass, for rows that need the sum of all weights or log-probabilities
//   sample_choose  a block per row: filter and draw from the few groups that matter
//   sample_bins, _count, _sum, _draw  more passes, for rows of which top-p or min-p keeps many entries
//   sample_report  a block per row: log-probabilities
//
// Parameters are in device memory and grids depend only on shapes, so the launches can be captured
// in a graph. The partition is fixed: a row's result depends only on the row.
#include "sample_wide.cuh"

constexpr int kMostLogprobs = 20;
constexpr int kNotDrawn = -1;  // by sample_choose: the row is wide
enum Error { kNone, kNoToken, kNotFinite, kBadRow };

// maxima: float32 [rows, 2, groups + chunks], of the adjusted and of the raw logits.
// sums: float64 [rows, chunks * 33]: of each block of 128 weights, then raw sums of each chunk.
__device__ __forceinline__ float* maxima_of(float* maxima, int row, int chunks, bool raw) {
    return maxima + (row * 2ll + raw) * (chunks * (kChunkGroups + 1));
}
__device__ __forceinline__ double* sums_of(double* sums, int row, int chunks) {
    return sums + static_cast<long long>(row) * chunks * (kChunkSums + 1);
}

#define BATCH                                                                               \
    int stride, int vocab, const SampleRow *__restrict__ rows, const unsigned *masks,       \
        unsigned *seen, int *counts, int mask_rows, int history_rows, float *maxima, double *sums,  \
        WideRow *wide
#define OF_BATCH stride, vocab, rows, masks, seen, counts, mask_rows, history_rows

// ---------------------------------------------------------------- first pass

__device__ inline void write_maxima(const float4* x, float* maxima, int chunks, float* shared) {
    const int chunk = blockIdx.x;
    float best = minus_infinity();
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) {
        float m = larger(x[run]);
#pragma unroll
        for (int lanes = 8; lanes; lanes >>= 1) m = larger(m, __shfl_xor_sync(kAll, m, lanes));
        if (threadIdx.x % 16 == 0)
            maxima[chunk * kChunkGroups + run * (kPassThreads / 16) + threadIdx.x / 16] = m;
        best = larger(best, m);
    }
    best = larger(best, __shfl_xor_sync(kAll, best, 16));
    if (lane_id() == 0) shared[warp_id()] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kPassThreads / 32; w++) best = larger(best, shared[w]);
        maxima[chunks * kChunkGroups + chunk] = best;
    }
#ifndef BATON_PLANT_SAMPLE_MAXIMA
    __syncthreads();  // the next call writes to `shared`
#endif
}

template <class T> __device__ __forceinline__ void scan_chunk(const T* logits, BATCH) {
    __shared__ float shared[kPassThreads / 32];
    const int row = blockIdx.y, chunks = gridDim.x;
    const RowLogits<T> in(logits, OF_BATCH, row);
    float4 x[kPassRuns];
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) x[run] = in.raw(place_of(run));
    if (!in.plain()) {
        if (in.row->logprobs > 0) write_maxima(x, maxima_of(maxima, row, chunks, true), chunks, shared);
#pragma unroll
        for (int run = 0; run < kPassRuns; run++) x[run] = in.adjust(x[run], place_of(run));
    }
    write_maxima(x, maxima_of(maxima, row, chunks, false), chunks, shared);
}

// ---------------------------------------------------------------- second pass

// Sums of the chunk's blocks of 128 weights: each run of a warp is a block.
template <class T>
__device__ __forceinline__ void sum_chunk(const RowLogits<T>& in, float4* x, float best, double* sums) {
    const Temperature temperature(in.row->temperature);
    if (!in.plain()) {
#pragma unroll
        for (int run = 0; run < kPassRuns; run++) x[run] = in.adjust(x[run], place_of(run));
    }
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) {
        x[run].x = exp_weight(temperature.divide(__fsub_rn(x[run].x, best)));
        x[run].y = exp_weight(temperature.divide(__fsub_rn(x[run].y, best)));
        x[run].z = exp_weight(temperature.divide(__fsub_rn(x[run].z, best)));
        x[run].w = exp_weight(temperature.divide(__fsub_rn(x[run].w, best)));
#ifdef BATON_PLANT_SAMPLE_LANE
        if (lane_id() == 31) x[run].w = 0.0f;
#endif
    }
    const double sum = block_sums<kPassRuns>(x);
    const int run = lane_id() / (32 / kPassRuns);
    if (lane_id() % (32 / kPassRuns) == 0)
        sums[blockIdx.x * kChunkSums + run * (kPassThreads / 32) + warp_id()] = sum;
}

// Sum of exp(logit - highest) over the chunk, for log-probabilities.
__device__ __forceinline__ void sum_raw(const float4* x, float highest, double* sum, double* parts) {
    double own = 0.0;
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) {
        own += static_cast<double>(exp_weight(__fsub_rn(x[run].x, highest)));
        own += static_cast<double>(exp_weight(__fsub_rn(x[run].y, highest)));
        own += static_cast<double>(exp_weight(__fsub_rn(x[run].z, highest)));
        own += static_cast<double>(exp_weight(__fsub_rn(x[run].w, highest)));
    }
    own = warp_sum_double(own);
    if (lane_id() == 0) parts[warp_id()] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kPassThreads / 32; w++) own += parts[w];
        *sum = own;
    }
}

template <class T> __device__ __forceinline__ void weigh_chunk(const T* logits, BATCH) {
    __shared__ double shared[kPassThreads / 32];
    const int row = blockIdx.y, chunks = gridDim.x;
    const RowLogits<T> in(logits, OF_BATCH, row);
    const bool draws = sums_all(*in.row, vocab), reports = in.row->logprobs > 0;
    if (!draws && !reports) return;
    float4 x[kPassRuns];
#pragma unroll
    for (int run = 0; run < kPassRuns; run++) x[run] = in.raw(place_of(run));
    const float* tops = maxima_of(maxima, row, chunks, false) + chunks * kChunkGroups;
    const float best = row_maximum(tops, chunks);
    double* out = sums_of(sums, row, chunks);
    if (reports) {
        const float* raw = maxima_of(maxima, row, chunks, true) + chunks * kChunkGroups;
        const float highest = in.plain() ? best : row_maximum(raw, chunks);
        if (is_finite(highest)) sum_raw(x, highest, out + chunks * kChunkSums + blockIdx.x, shared);
    }
    if (draws && is_finite(best)) sum_chunk(in, x, best, out);
}

// ---------------------------------------------------------------- choice

// Lowest id among the largest logits.
template <class E>
__device__ inline int greedy_token(const E& e, Choice& s, const float* maxima, int groups) {
    int first = groups;
    for (int g = static_cast<int>(threadIdx.x); g < groups; g += kThreads)
        if (__ldcg(maxima + g) == e.best) first = min(first, g);
    first = __reduce_min_sync(kAll, first);
    if (lane_id() == 0) s.counts[warp_id()] = first;
    __syncthreads();
    for (int w = 0; w < kWarps; w++) first = min(first, s.counts[w]);
    if (warp_id() == 0) {
        const int i = first * kGroup + lane_id() * 4;
        int id = 0x7fffffff;
        if (lane_id() < kGroup / 4) {
            const float4 x = e.in.adjusted(i);
            if (x.w == e.best) id = i + 3;
            if (x.z == e.best) id = i + 2;
            if (x.y == e.best) id = i + 1;
            if (x.x == e.best) id = i;
        }
        id = __reduce_min_sync(kAll, id);
        if (lane_id() == 0) s.found = id;
    }
    __syncthreads();
    return s.found;
}

template <class E>
__device__ inline void weigh_groups(const E& e, Choice& s, const float* maxima, int groups) {
    for (int g = static_cast<int>(threadIdx.x); g < groups; g += kThreads)
        s.groups[g] = __float_as_uint(
            exp_weight(e.temperature.divide(__fsub_rn(__ldcg(maxima + g), e.best))));
    __syncthreads();
}

// Sums of blocks of 128 weights, from the second pass or a walk.
__device__ inline void load_sums(Choice& s, const double* sums, int blocks) {
    for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kThreads) s.ends[b] = __ldcg(sums + b);
    __syncthreads();
}

// No filter: the block of 128 that holds the share, then the entry.
template <class E>
__device__ inline int draw_from_all(const E& e, Choice& s, int blocks) {
    if (warp_id() == 0) {
        find_block(s, s.ends, blocks, *e.in.row);
        __syncwarp();
        const int from = s.found * kSumBlock;
        const float4 x = e.in.adjusted(from + lane_id() * 4);
        float* tile = s.tile + lane_id() * 4;
        unsigned key;
        tile[0] = __uint_as_float(e.look(x.x, key)), tile[1] = __uint_as_float(e.look(x.y, key));
        tile[2] = __uint_as_float(e.look(x.z, key)), tile[3] = __uint_as_float(e.look(x.w, key));
        __syncwarp();
        const int at = find_in_block(s, s.tile, min(kSumBlock, e.in.vocab - from));
        if (lane_id() == 0) s.found = from + at;
    }
    __syncthreads();
    return s.found;
}

__device__ inline int draw_from_list(const SampleRow& row, Choice& s, int listed) {
    const int blocks = sum_list(s, listed);
    if (warp_id() == 0) {
        find_block(s, s.sums, blocks, row);
        __syncwarp();
        const int from = s.found * kSumBlock;
        const float* weights = reinterpret_cast<const float*>(s.list.keys) + from;
        const int at = find_in_block(s, weights, min(kSumBlock, listed - from));
        if (lane_id() == 0) s.found = s.list.ids[from + at];
    }
    __syncthreads();
    return s.found;
}

// The sum that top-p requires, as a part of all weights.
__device__ inline double nucleus_sum(Choice& s, const double* sums, int blocks, double top_p) {
    load_sums(s, sums, blocks);
    if (warp_id() == 0) {
        const double total = RunningSums<double>(s.ends, blocks).total();
        if (lane_id() == 0) s.total = total;
    }
    __syncthreads();
    return top_p * s.total;
}

// Applies top-p to the list, then min-p; returns the number of entries left.
__device__ inline int filter_list(const SampleRow& row, Choice& s, int listed) {
    Keep keep = {0, 0, -1};
    if (row.top_p < 1.0) {
        const int blocks = sum_list(s, listed);
        double total = 0.0;
        for (int b = 0; b < blocks; b++) total += s.sums[b];
        __syncthreads();
        const Goal goal = {false, 0, row.top_p * total};
        keep = cut_list(s, listed, goal, Bracket{0, kWeightOfBest + 1, listed, 0, 0.0}, 0);
    }
    keep.at_least(__float_as_uint(row.min_p));
    return filter(s, listed, keep);
}

// Leaves the row to the passes of sample_wide.cuh.
__device__ inline int left_wide(WideRow& wide, unsigned low, unsigned min_p, bool cuts, double goal) {
    const int i = static_cast<int>(threadIdx.x);
    if (cuts) {
        for (int bin = i; bin < kLevels * kBins; bin += kThreads) wide.bins[bin / kBins][bin % kBins] = 0;
    }
    if (i == 0) {
        wide.low = low, wide.min_p = min_p, wide.goal = goal;
        wide.state = cuts ? kCut : kKnown;
    }
    return kNotDrawn;
}

// Top-k, top-p, min-p. Reads again only groups that may hold a kept entry.
template <class E>
__device__ inline int draw_filtered(const E& e, Choice& s, const float* maxima, int groups,
                                    const double* sums, WideRow& wide) {
    const SampleRow& row = *e.in.row;
    const unsigned min_p = max(__float_as_uint(row.min_p), 1u);  // weight 0 is never drawn
    Goal goal = {e.by_score, row.top_k, 0.0};
    double total_left = 0.0;  // half of the share that top-p leaves out
    if (!e.by_score && row.top_p < 1.0) {
        goal.sum = nucleus_sum(s, sums, (e.in.vocab + kSumBlock - 1) / kSumBlock, row.top_p);
        total_left = 0.5 * (s.total - goal.sum);
    }
    weigh_groups(e, s, maxima, groups);
    const bool cuts = e.by_score || row.top_p < 1.0;
    unsigned low = min_p;
    if (cuts) {
        low = bound_by_maxima(s, groups, goal);
        // All weights below this one together are less than half of what may be left out.
        if (!low) low = __float_as_uint(static_cast<float>(total_left / e.in.vocab));
        low = max(low, 1u);
    }
    const int chosen = choose_groups(s, groups, low);
    if (e.by_score) {
        int listed = list_kept(e, s, chosen, low, select(e, s, chosen, low, goal, kInfinity));
        for (int i = static_cast<int>(threadIdx.x); i < listed; i += kThreads)
            s.list.keys[i] = weight_of_score(s.list.keys[i]);
        __syncthreads();
        listed = filter_list(row, s, listed);
        return draw_from_list(row, s, listed);
    }
    Keep keep = {low, low, -1};
    const int n = collect(e, s, chosen, Window{low, keep, kAll}, 0, kListed + 1);
    if (n > kListed) return left_wide(wide, low, min_p, cuts, goal.sum);
    if (cuts) keep = cut_list(s, n, goal, Bracket{low, kWeightOfBest + 1, n, 0, 0.0}, 0);
    keep.at_least(max(min_p, low));
    return draw_from_list(row, s, filter(s, n, keep));
}

template <class T>
__device__ __forceinline__ int token_of_row(const RowLogits<T>& in, float best, Choice& s,
                                            const float* maxima, int groups, const double* sums,
                                            WideRow& wide) {
    const SampleRow& row = *in.row;
    const Entries<T, false> e = {in, best, Temperature(row.temperature), keeps_top_k(row, in.vocab)};
    if (is_greedy(row)) return greedy_token(e, s, maxima, groups);
    if (!sums_all(row, in.vocab) || row.top_p < 1.0)
        return draw_filtered(e, s, maxima, groups, sums, wide);
    const int blocks = (in.vocab + kSumBlock - 1) / kSumBlock;
    load_sums(s, sums, blocks);
    return draw_from_all(e, s, blocks);
}

// Writes the row's token, and adds it to the row's history with `record`. By one thread.
__device__ __forceinline__ void put_token(const SampleRow& row, int token, int record, int vocab,
                                          unsigned* seen, int* counts, int* out) {
    *out = token;
    if (!record || row.history < 0) return;
    seen[row.history * static_cast<long long>((vocab + 31) / 32) + token / 32] |= 1u << token % 32;
    counts[row.history * static_cast<long long>(vocab) + token]++;
}

template <class T>
__device__ __forceinline__ void choose_token(const T* logits, BATCH, int chunks, int record,
                                             int* tokens, int* errors) {
    __shared__ Choice s;
    const int at = blockIdx.x, groups = chunks * kChunkGroups;
    const RowLogits<T> in(logits, OF_BATCH, at);
    const float* own = maxima_of(maxima, at, chunks, false);
    const float best = row_maximum(own + groups, chunks);
    const int error = !in.valid()                ? kBadRow
                      : is_finite(best)          ? kNone
                      : best == minus_infinity() ? kNoToken
                                                 : kNotFinite;
    const int token =
        error ? 0 : token_of_row(in, best, s, own, groups, sums_of(sums, at, chunks), wide[at]);
    if (threadIdx.x != 0) return;
    errors[at] = error;
    if (token == kNotDrawn) return;
    wide[at].state = kDrawn;
    if (!error) return put_token(*in.row, token, record, vocab, seen, counts, tokens + at);
    tokens[at] = 0;  // a valid id, so that a step already queued stays inside its tables
}

// ---------------------------------------------------------------- rows that are left wide

template <class T>
__device__ __forceinline__ void bin_chunk(const T* logits, BATCH, int level) {
    __shared__ WideShared s;
    const int row = blockIdx.y, chunks = gridDim.x;
    WideRow& left = wide[row];
    if (left.state != kCut) return;
    const Span span = span_of(left, s, level);
    if (level && blockIdx.x == 0 && threadIdx.x == 0) left.found[level - 1] = {span.base, span.above};
    const RowLogits<T> in(logits, OF_BATCH, row);
    const float* tops = maxima_of(maxima, row, chunks, false) + chunks * kChunkGroups;
    const Entries<T, false> e = {in, row_maximum(tops, chunks), Temperature(in.row->temperature), false};
    fill_bins(e, s, left, span, level);
}

template <class T>
__device__ __forceinline__ void count_chunk(const T* logits, BATCH) {
    __shared__ WideShared s;
    const int row = blockIdx.y, chunks = gridDim.x;
    WideRow& left = wide[row];
    if (left.state == kDrawn) return;
    const Cut cut = cut_of(left, s);
    if (blockIdx.x == 0 && threadIdx.x == 0) left.cut = cut;
    const RowLogits<T> in(logits, OF_BATCH, row);
    const float* tops = maxima_of(maxima, row, chunks, false) + chunks * kChunkGroups;
    const Entries<T, false> e = {in, row_maximum(tops, chunks), Temperature(in.row->temperature), false};
    count_kept(e, s, left, cut);
}

template <class T>
__device__ __forceinline__ void sum_kept(const T* logits, BATCH) {
    __shared__ WideShared s;
    const int row = blockIdx.y, chunks = gridDim.x, from = blockIdx.x * kChunk;
    WideRow& left = wide[row];
    if (left.state == kDrawn) return;
    find_starts(left, s, chunks);
    const int n = min(s.starts[chunks] - from, kChunk);
    if (n <= 0) return;
    const RowLogits<T> in(logits, OF_BATCH, row);
    const float* tops = maxima_of(maxima, row, chunks, false) + chunks * kChunkGroups;
    const Entries<T, false> e = {in, row_maximum(tops, chunks), Temperature(in.row->temperature), false};
    walk_kept(e, s, left.cut, chunks, from, n);
    sum_blocks<kPassWarps>(s.weights, n, sums_of(sums, row, chunks) + blockIdx.x * kChunkSums);
}

template <class T>
__device__ __forceinline__ void draw_wide(const T* logits, BATCH, int chunks, int record, int* tokens) {
    __shared__ WideShared s;
    __shared__ Found found;
    const int row = blockIdx.x;
    WideRow& left = wide[row];
    if (left.state == kDrawn) return;
    find_starts(left, s, chunks);
    const RowLogits<T> in(logits, OF_BATCH, row);
    const float* tops = maxima_of(maxima, row, chunks, false) + chunks * kChunkGroups;
    const Entries<T, false> e = {in, row_maximum(tops, chunks), Temperature(in.row->temperature), false};
    const int kept = s.starts[chunks], blocks = (kept + kSumBlock - 1) / kSumBlock;
    const double* own = sums_of(sums, row, chunks);
    for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kPassThreads) s.ends[b] = __ldcg(own + b);
    __syncthreads();
    if (warp_id() == 0) find_block(found, s.ends, blocks, *in.row);
    __syncthreads();
    const int from = found.found * kSumBlock, n = min(kept - from, kSumBlock);
    walk_kept(e, s, left.cut, chunks, from, n);
    if (warp_id() != 0) return;
    const int at = find_in_block(found, s.weights, n);
    if (lane_id() == 0) put_token(*in.row, s.ids[at], record, vocab, seen, counts, tokens + row);
}

// ---------------------------------------------------------------- log-probabilities

// Log-softmax of the raw logits: of the sampled token and of the likeliest ids, ties by lowest id.
template <class T>
__device__ __forceinline__ void report_row(const T* logits, BATCH, int chunks, const int* tokens,
                                           const int* errors, float* logprobs, int* top_ids,
                                           float* top_logprobs) {
    __shared__ Choice s;
    const int at = blockIdx.x, groups = chunks * kChunkGroups, i = static_cast<int>(threadIdx.x);
    const RowLogits<T> in(logits, OF_BATCH, at);
    const float* own = maxima_of(maxima, at, chunks, !in.plain());
    const bool wanted = in.row->logprobs > 0 && errors[at] == kNone;
    const float best = wanted ? row_maximum(own + groups, chunks) : minus_infinity();
    top_ids += at * kMostLogprobs, top_logprobs += at * kMostLogprobs;
    if (i < kMostLogprobs) top_ids[i] = -1, top_logprobs[i] = minus_infinity();
    if (!is_finite(best)) {
        if (i == 0) logprobs[at] = __uint_as_float(0x7fffffffu);
        return;
    }
    const Entries<T, true> e = {in, best, Temperature(1.0f), false};
    const double* raw_sums = sums_of(sums, at, chunks) + chunks * kChunkSums;
    double total = 0.0;
    for (int c = lane_id(); c < chunks; c += 32) total += __ldcg(raw_sums + c);
    const double log_total = log(warp_sum_double(total)), highest = best;
    if (i == 0) {
        const T* logit = logits + static_cast<long long>(at) * stride + tokens[at];
        logprobs[at] = static_cast<float>(to_float(*logit) - highest - log_total);
    }
    weigh_groups(e, s, own, groups);
    const Goal goal = {true, min(min(in.row->logprobs, kMostLogprobs), vocab), 0.0};
    const unsigned low = bound_by_maxima(s, groups, goal);
    const int chosen = choose_groups(s, groups, low);
    const Selection found = select(e, s, chosen, low, goal, kAll - 1);
    const int listed = min(list_kept(e, s, chosen, low, found), kMostLogprobs);
    if (i >= listed) return;
    const unsigned key = s.list.keys[i];
    int rank = 0;
    for (int j = 0; j < listed; j++) rank += s.list.keys[j] > key || (s.list.keys[j] == key && j < i);
    const float logit = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
    top_ids[rank] = s.list.ids[i];
    top_logprobs[rank] = static_cast<float>(logit - highest - log_total);
}

// Blocks of sample_sum on a multiprocessor. For sm_120, NVRTC 13.0 does not fit it into the 64 registers that
// all of them would leave to a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kSumBlocks = kPassBlocks - 1;
#else
constexpr int kSumBlocks = kPassBlocks;
#endif

#define KERNELS(T, name)                                                                           \
    extern "C" __global__ void __launch_bounds__(kPassThreads)                                     \
        sample_scan_##name(const T* __restrict__ logits, BATCH) {                                 \
        begin_after_previous();                                                                   \
        scan_chunk<T>(logits, OF_BATCH, maxima, sums, wide);                                       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kPassThreads, kPassBlocks)                        \
        sample_weigh_##name(const T* __restrict__ logits, BATCH) {                                \
        begin_after_previous();                                                                   \
        weigh_chunk<T>(logits, OF_BATCH, maxima, sums, wide);                                      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                                \
        sample_choose_##name(const T* __restrict__ logits, BATCH, int chunks, int record,         \
                             int* tokens, int* errors) {                                           \
        begin_after_previous();                                                                    \
        choose_token<T>(logits, OF_BATCH, maxima, sums, wide, chunks, record, tokens, errors);     \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kPassThreads, kPassBlocks)                        \
        sample_bins_##name(const T* __restrict__ logits, BATCH, int level) {                      \
        begin_after_previous();                                                                   \
        bin_chunk<T>(logits, OF_BATCH, maxima, sums, wide, level);                                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kPassThreads, kPassBlocks)                        \
        sample_count_##name(const T* __restrict__ logits, BATCH) {                                \
        begin_after_previous();                                                                   \
        count_chunk<T>(logits, OF_BATCH, maxima, sums, wide);                                      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kPassThreads, kSumBlocks)                         \
        sample_sum_##name(const T* __restrict__ logits, BATCH) {                                  \
        begin_after_previous();                                                                   \
        sum_kept<T>(logits, OF_BATCH, maxima, sums, wide);                                         \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kPassThreads, 1)                                  \
        sample_draw_##name(const T* __restrict__ logits, BATCH, int chunks, int record,           \
                           int* tokens) {                                                          \
        begin_after_previous();                                                                    \
        draw_wide<T>(logits, OF_BATCH, maxima, sums, wide, chunks, record, tokens);                \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                                \
        sample_report_##name(const T* __restrict__ logits, BATCH, int chunks, const int* tokens,  \
                             const int* errors, float* logprobs, int* top_ids,                     \
                             float* top_logprobs) {                                                \
        begin_after_previous();                                                                    \
        report_row<T>(logits, OF_BATCH, maxima, sums, wide, chunks, tokens, errors, logprobs,      \
                      top_ids, top_logprobs);                                                      \
    }
KERNELS(float, f32)
KERNELS(bf16, bf16)
