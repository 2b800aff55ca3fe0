// Decode attention: one query row per sequence over a paged cache, split over the keys.
//
// Every key and value is read from memory once and used only by the heads of one group, so the
// kernel must run at the speed of memory. A multiprocessor of an H200 receives 8 KiB, 16 tokens of 128
// dims, every 251 ns (4.3 TB/s), in which it can issue 1760 warp instructions. On CUDA cores, unpacking
// and multiplying these 4096 elements takes 128 instructions and 128 more per head, plus the sums
// across lanes: a group of 8 would be limited by instruction issue. On tensor cores the total is
// about 300 whatever the group, no more than CUDA cores need for one head. So one kernel serves all
// groups, with the *tokens* on the 16 rows of the mma and the heads on its 8 columns (S^T =
// K Q^T, O^T = V^T P^T): a group of 8 wastes nothing, and the accumulators take 32 registers, where
// heads on the rows, padded to 16, would take 64. Wider groups are processed 8 heads at a time.
//
// Loads: each warp has its own pipeline over tiles of 16 tokens, waits only for its own copies
// and meets the other warps of its block once, at the end. Two blocks of four warps with 16
// KiB in flight per warp keep 128 KiB in flight on a multiprocessor; 4.3 TB/s at a latency of 1 us
// need 33 KiB. With three stages shared memory limits the blocks on a multiprocessor to two, so a
// thread may have 255 registers. Bounds of four blocks would leave 128: NVRTC 13.0 then spills, and
// loads of fragments wait for the products before them. The macros below are the variants that
// `gpu-bench` measures; engine/kernels/cuda/tuning.py holds the values of each card. None changes
// a bit of a result.
//
// The softmax maximum is rounded up to a whole number in base 2. So rescaling
// by 2^(old - new) is exact, and a key's weight, rounded to bf16 for the tensor core, does not
// depend on the keys processed before it. The rounded weights are summed, so a row that sees one key
// gets exactly its value. Splitting changes only the order of sums.
//
// The plan (engine/kernels/cuda/attention_plan.py) is rows of four int32: (items, 0, 0, 0); then
// per sequence (first slot, splits, 0, 0); then the items (sequence, begin, end, slot): positions
// [begin, end) of a sequence for all its heads, and the workspace slot for the result. Slot -1 marks
// the only split of a sequence, which is written to `out` directly. Blocks step through items * heads
// with the stride of the grid, so one grid, captured in a graph, serves every plan.
//
// Over an int8 pool (int8_rows.cuh) the codes are in shared memory, and become bf16 in the registers of
// the fragments: written back as bf16, they would take three quarters of the bandwidth of shared memory.
// Making them takes 320 of the 880 warp instructions that can be issued while half of 8 KiB arrives. Tiles,
// products and sums are those of a bf16 pool with the same values, and so are all bits.
#include "int8_rows.cuh"
#include "paged_kv.cuh"

#ifndef BATON_DECODE_BOUNDS  // blocks on a multiprocessor for which registers are left
#define BATON_DECODE_BOUNDS 2
#endif
#ifndef BATON_DECODE_STAGES  // tiles of 128 dims that a warp has in shared memory
#define BATON_DECODE_STAGES 3
#endif
#ifndef BATON_COMBINE_WARPS  // warps that combine the splits of one head: 1, 2 or 4
#define BATON_COMBINE_WARPS 4
#endif

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kTile = 16;  // tokens of a warp's step: the rows of the mma
constexpr int kHeads = 8;  // heads of a group processed together: the columns of the mma
// Floats between heads when warps merge, so that the columns of a fragment use different banks.
template <int D> constexpr int kStride = D + 4;

// ---------------------------------------------------------------- tiles of a bf16 pool

// Keys and values of kTile tokens in shared memory. `load` begins to copy the part of a lane, `keys` and
// `values` return the fragments k and k + 1 of the products, after the constructor.
template <int D> struct Halves {
    typedef bf16 Element;
    static constexpr int kPieces = kTile * D / 8;  // of 16 bytes in the keys; as many in the values
    static constexpr int kStagePieces = 2 * kPieces;
    // Tiles a warp has in shared memory (24 KiB for three of 128 dims); all but one are in flight.
    static constexpr int kStages = BATON_DECODE_STAGES * 128 / D;

    // rows[i]: the first row in the pool of the tile's half i.
    static __device__ __forceinline__ void load(uint4* keys, const PagedHead<bf16>& kv,
                                                const unsigned (&rows)[2], int start, int lane) {
        const int piece = lane % (D / 8);
        const long long to_value = kv.value_distance() * D;
#pragma unroll
        for (int i = 0; i < kTile; i += 256 / D) {
            const int row = i + lane / (D / 8);
            const bool wanted = kv.readable(start + row);
            const bf16* key = kv.pool + static_cast<long long>(rows[i / kGroup]) * D + piece * 8 +
                              (row % kGroup) * D;
            copy_or_zero(keys + swizzled<D>(row, piece), key, wanted);
            copy_or_zero(keys + kPieces + swizzled<D>(row, piece), key + to_value, wanted);
        }
    }

    const uint4* stage;
    int low, upper, last;

    __device__ __forceinline__ Halves(const uint4* stage, int, int, int, int lane)
        : stage(stage), low(lane & 7), upper((lane >> 3) & 1), last(lane >> 4) {}
    __device__ __forceinline__ void keys(unsigned (&a)[2][4], int k) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            ldmatrix_x4(a[i], stage + swizzled<D>(low + upper * 8, 2 * (k + i) + last));
    }
    __device__ __forceinline__ void values(unsigned (&a)[2][4], int m) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            ldmatrix_x4_trans(a[i], stage + kPieces + swizzled<D>(low + last * 8, 2 * (m + i) + upper));
    }
    // The dim of row g + 8 i of a fragment of values.
    static __device__ __forceinline__ int dim(int g, int i) { return i * 8 + g; }
};

// ---------------------------------------------------------------- tiles of an int8 pool

// Position of 16-byte piece `piece` of a row of codes, in pieces: eight rows of one piece touch all banks.
template <int D> __device__ __forceinline__ int swizzled_codes(int row, int piece) {
    constexpr int kPer = D / 16, kRows = 8 / kPer;  // pieces of a row; rows that touch all banks
    return row * kPer + (piece ^ (row / kRows % kPer));
}

template <int D> struct Codes {
    typedef unsigned char Element;
    static constexpr int kPieces = kTile * D / 16;
    static constexpr int kStagePieces = 2 * kPieces + 4;  // magnitudes: of keys, then of values
    static constexpr int kStages = BATON_DECODE_STAGES * 512 / kStagePieces;

    static __device__ __forceinline__ void load(uint4* keys, const PagedHead<unsigned char>& kv,
                                                const unsigned (&rows)[2], int start, int lane) {
        const int piece = lane % (D / 16);
        const long long to_value = kv.value_distance() * (D + 2);
        const unsigned char* half[2];
#pragma unroll
        for (int i = 0; i < 2; i++) half[i] = kv.pool + static_cast<long long>(rows[i]) * (D + 2);
#pragma unroll
        for (int i = 0; i < kTile; i += 512 / D) {
            const int row = i + lane / (D / 16);
            const bool wanted = kv.readable(start + row);
            const unsigned char* key = (row < kGroup ? half[0] : half[1]) + (row % kGroup) * D + piece * 16;
            copy_or_zero(keys + swizzled_codes<D>(row, piece), key, wanted);
            copy_or_zero(keys + kPieces + swizzled_codes<D>(row, piece), key + to_value, wanted);
        }
        if (lane < 4) {  // the eight magnitudes of a group, if one of its tokens may be read
            const int group = start + (lane & 1) * kGroup;
            const bool wanted = group < kv.end && group + kGroup > kv.begin;
            const unsigned char* from = (lane & 1 ? half[1] : half[0]) + kGroup * D;
            copy_or_zero(keys + 2 * kPieces + lane, lane < 2 ? from : from + to_value, wanted);
        }
    }

    const uint4* stage;
    int low, upper, last;
    Step key[2], value[4];  // of the tokens g, g + 8 and 2t, 2t + 1, 2t + 8, 2t + 9 of the tile

    __device__ __forceinline__ Codes(const uint4* stage, int start, int begin, int end, int lane)
        : stage(stage), low(lane & 7), upper((lane >> 3) & 1), last(lane >> 4) {
        const bf16* magnitudes = (const bf16*)(stage + 2 * kPieces);
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            key[i] = step_of(static_cast<unsigned>(magnitudes[i * 8 + g]) << 16);
#ifdef BATON_PLANT_STALE_MAGNITUDE
            const unsigned pair = ((const unsigned*)magnitudes)[i * 4 + t];
#else
            const unsigned pair = ((const unsigned*)magnitudes)[8 + i * 4 + t];
#endif
            unsigned two[2] = {pair << 16, pair & 0xffff0000u};
#ifndef BATON_PLANT_UNSEEN
            // Unread codes are zeros, but a group's magnitudes are read together, and may be NaN.
            const int position = start + i * 8 + 2 * t;
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (position + j < begin || position + j >= end) two[j] = 0u;
#endif
            value[2 * i] = step_of(two[0]), value[2 * i + 1] = step_of(two[1]);
        }
    }
    __device__ __forceinline__ void keys(unsigned (&a)[2][4], int k) const {
        unsigned words[4];
        ldmatrix_x4(words, stage + swizzled_codes<D>(low + upper * 8, k + last));
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                a[i][h] = two_values<0, 1>(words[2 * i + h], key[h], key[h]);
                a[i][2 + h] = two_values<2, 3>(words[2 * i + h], key[h], key[h]);
            }
    }
    __device__ __forceinline__ void values(unsigned (&a)[2][4], int m) const {
        unsigned words[4];
        ldmatrix_x4_trans(words, stage + kPieces + swizzled_codes<D>(low + upper * 8, m + last));
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                a[i][2 * h] = two_values<0, 2>(words[2 * i + h], value[2 * h], value[2 * h + 1]);
                a[i][2 * h + 1] = two_values<1, 3>(words[2 * i + h], value[2 * h], value[2 * h + 1]);
            }
    }
    // Rows g and g + 8 are two neighbouring codes.
    static __device__ __forceinline__ int dim(int g, int i) { return (g & 1) * 8 + (g >> 1) * 2 + i; }
};

// ---------------------------------------------------------------- the kernel

template <int D, class Rows> struct Walker {
    PagedHead<typename Rows::Element> kv;
    uint4* stages;  // this warp's
    int warp, lane;
    int first_tile;  // this warp's first tile, then every kWarps-th; absolute, in kTile positions
    unsigned rows, rows_ahead;

    // Lane l looks up half l % 2 of the l / 2-th of the next 16 tiles, one fetch ahead of its use.
    __device__ __forceinline__ unsigned find(int step) const {
        return kv.row_of_group((first_tile + (step + (lane >> 1)) * kWarps) * 2 + (lane & 1));
    }

    __device__ __forceinline__ uint4* stage(int step) const {
        return stages + step % Rows::kStages * Rows::kStagePieces;
    }

    __device__ __forceinline__ void load(int step, int steps) {
        if (step < steps) {
            if ((step & 15) == 0) {
                rows = rows_ahead;
                rows_ahead = find(step + 16);
            }
            unsigned half[2];
#pragma unroll
            for (int i = 0; i < 2; i++) half[i] = __shfl_sync(kAllLanes, rows, (step & 15) * 2 + i);
            Rows::load(stage(step), kv, half, (first_tile + step * kWarps) * kTile, lane);
        }
        cp_async_commit();
    }
};

// A warp's state: columns 2t, 2t + 1 are heads, rows g, g + 8 of a tile are dims.
template <int D> struct Sums {
    float out[D / 16][4];
    float peak[2], weight[2];
};

template <int D, class Rows>
__device__ __forceinline__ void add_tile(Sums<D>& sums, const unsigned (&query)[D / 16][2],
                                         const uint4* stage, int start, int begin, int end, int lane,
                                         float scale_log2) {
    const Rows tile(stage, start, begin, end, lane);
    float score[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) score[i >> 2][i & 3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k += 2) {
        unsigned a[2][4];
        tile.keys(a, k);
#pragma unroll
        for (int i = 0; i < 2; i++)
            mma_bf16_16816(score[i], a[i], query[k + i]);  // two chains: half the latency
    }
    float s[4], peak[2];
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = score[0][i] + score[1][i];
    if (start < begin || start + kTile > end) {
        const int position = start + (lane >> 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = position + (i >> 1) * 8;
#ifdef BATON_PLANT_WINDOW
            const bool seen = at < end;
#elif defined(BATON_PLANT_CAUSAL_MASK)
            const bool seen = at >= begin;
#else
            const bool seen = at >= begin && at < end;
#endif
            if (!seen) s[i] = minus_infinity();
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(s[i], s[i + 2]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
        peak[i] = fmaxf(sums.peak[i], ceilf(top * scale_log2));
    }
    const bool grew = peak[0] != sums.peak[0] || peak[1] != sums.peak[1];
    if (__any_sync(kAllLanes, grew)) {
        const float by[2] = {power_of_two(sums.peak[0] - peak[0]),
                             power_of_two(sums.peak[1] - peak[1])};
#pragma unroll
        for (int i = 0; i < 2; i++) sums.weight[i] *= by[i], sums.peak[i] = peak[i];
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.out[m][i] *= by[i & 1];
    }
    unsigned weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float p0 = exp2f(fmaf(s[2 * i], scale_log2, -peak[0]));
        const float p1 = exp2f(fmaf(s[2 * i + 1], scale_log2, -peak[1]));
        const unsigned packed = pack_bf16(p0, p1);
        sums.weight[0] += low_bf16(packed), sums.weight[1] += high_bf16(packed);
        weight[i] = transpose_8x8(packed);
    }
#pragma unroll
    for (int m = 0; m < D / 16; m += 2) {
        unsigned a[2][4];
        tile.values(a, m);
#pragma unroll
        for (int i = 0; i < 2; i++) mma_bf16_16816(sums.out[m + i], a[i], weight);
    }
}

// Adds up the sums of the warps through shared memory, in the order of the warps.
template <int D, class Rows>
__device__ __forceinline__ void write_out(const Sums<D>& sums, float* merge, int warp, int lane,
                                          int heads, int slot, long long row, long long partial_row,
                                          bf16* out, float* partial, float2* partial_stats) {
    float2* stats = (float2*)(merge + kWarps * kHeads * kStride<D>);
    const int g = lane >> 2, t = lane & 3;
    float* mine = merge + (warp * kHeads + 2 * t) * kStride<D>;
#pragma unroll
    for (int m = 0; m < D / 16; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            mine[(i & 1) * kStride<D> + m * 16 + Rows::dim(g, i >> 1)] = sums.out[m][i];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float weight = sums.weight[i];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) weight += __shfl_xor_sync(kAllLanes, weight, d);
        if (g == 0) stats[warp * kHeads + 2 * t + i] = {sums.peak[i], weight};
    }
#ifndef BATON_PLANT_BARRIER
    __syncthreads();
#endif
    const int dim = threadIdx.x % (D / 4) * 4;
    for (int head = threadIdx.x / (D / 4); head < heads; head += kThreads / (D / 4)) {
        float peak = kLowest, weight = 0.0f;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWarps; w++) peak = fmaxf(peak, stats[w * kHeads + head].x);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            const float2 of = stats[w * kHeads + head];
            const float4 v = *(const float4*)(merge + (w * kHeads + head) * kStride<D> + dim);
            const float by = power_of_two(of.x - peak);
            weight += by * of.y;
            sum.x += by * v.x, sum.y += by * v.y, sum.z += by * v.z, sum.w += by * v.w;
        }
        if (slot >= 0) {
            *(float4*)(partial + (partial_row + head) * D + dim) = sum;
            if (dim == 0) partial_stats[partial_row + head] = {peak, weight};
        } else {
            const float by = weight > 0.0f ? 1.0f / weight : 0.0f;
            const uint2 packed = {pack_bf16(sum.x * by, sum.y * by),
                                  pack_bf16(sum.z * by, sum.w * by)};
            *(uint2*)(out + (row + head) * D + dim) = packed;
        }
    }
}

template <int D, class Rows>
__device__ __forceinline__ void decode_attention(
    const bf16* __restrict__ q, const typename Rows::Element* __restrict__ kv_layer,
    const int* __restrict__ tables,
    const int4* __restrict__ plan, bf16* __restrict__ out, float* __restrict__ partial,
    float2* __restrict__ partial_stats, int sequences, int table_width, int kv_heads, int group,
    int block_size, float scale_log2) {
    DYNAMIC_SHARED(shared);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int pieces = (group + kHeads - 1) / kHeads, walks = kv_heads * pieces;
    const int total = plan[0].x * walks, stride = static_cast<int>(gridDim.x);
    int4 coming = {0, 0, 0, 0};  // the next item, loaded while this one is computed
    if (static_cast<int>(blockIdx.x) < total) coming = plan[1 + sequences + blockIdx.x / walks];
    for (int work = blockIdx.x; work < total; work += stride) {
        const int4 item = coming;
#ifdef BATON_PLANT_STALE_ITEM
        if (work + stride < total) coming = plan[1 + sequences + work / walks];
#else
        if (work + stride < total) coming = plan[1 + sequences + (work + stride) / walks];
#endif
        const int kv_head = work % walks / pieces, piece = work % walks % pieces;
        const int heads = min(kHeads, group - piece * kHeads), slot = item.w;
        const int first_head = kv_head * group + piece * kHeads;
        const int begin = item.y, end = item.z;

        Walker<D, Rows> walker;
        const int* table = tables + static_cast<long long>(item.x) * table_width;
        walker.kv = {kv_layer, table, block_size, kv_heads, kv_head, begin, end};
        walker.stages = (uint4*)shared + warp * (Rows::kStages * Rows::kStagePieces);
        walker.warp = warp, walker.lane = lane;
        walker.first_tile = begin / (kTile * kWarps) * kWarps + warp;
        walker.rows_ahead = walker.find(0);
        const int tiles = (end + kTile - 1) / kTile - walker.first_tile;
        const int steps = begin < end && tiles > 0 ? (tiles + kWarps - 1) / kWarps : 0;
#pragma unroll
        for (int i = 0; i < Rows::kStages - 1; i++) walker.load(i, steps);

        unsigned query[D / 16][2];
        const int g = lane >> 2, t = lane & 3;
        const long long row = static_cast<long long>(item.x) * (kv_heads * group) + first_head;
        const unsigned* words = (const unsigned*)(q + (row + min(g, heads - 1)) * D);
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            query[i >> 1][i & 1] = g < heads ? words[i * 4 + t] : 0u;

        Sums<D> sums;
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.out[m][i] = 0.0f;
        sums.peak[0] = sums.peak[1] = kLowest, sums.weight[0] = sums.weight[1] = 0.0f;
        for (int step = 0; step < steps; step++) {
#ifdef BATON_PLANT_ASYNC_WAIT
            cp_async_wait<Rows::kStages - 1>();
#else
            cp_async_wait<Rows::kStages - 2>();
#endif
#ifndef BATON_PLANT_SYNC_WARP
            __syncwarp();  // all lanes' copies have arrived, and the previous tile is finished
#endif
            walker.load(step + Rows::kStages - 1, steps);
            add_tile<D, Rows>(sums, query, walker.stage(step),
                              (walker.first_tile + step * kWarps) * kTile, begin, end, lane,
                              scale_log2);
        }
        __syncthreads();  // the stages of all warps are now reused for merging
        write_out<D, Rows>(sums, (float*)shared, warp, lane, heads, slot, row,
                           static_cast<long long>(slot) * (kv_heads * group) + first_head, out,
                           partial, partial_stats);
        __syncthreads();
    }
}

// Combines the splits of a sequence into its output row. A lane takes D / 32 dims of one head, half of
// the lanes take 2 of 32.
//
// Split s is added to sum s % 4, and the four sums are added in their order. So the number of warps
// per head, which share the sums, changes no bit.
constexpr int kSums = 4;

template <int D>
__device__ __forceinline__ void decode_combine(const int4* __restrict__ plan,
                                               const float* __restrict__ partial,
                                               const float2* __restrict__ partial_stats,
                                               bf16* __restrict__ out, int heads) {
    constexpr int kPer = BATON_COMBINE_WARPS, kMine = kSums / kPer, kTogether = kWarps / kPer;
    constexpr int kPairs = (D + 63) / 64, kDims = 2 * kPairs;
    static_assert(kPer * kMine == kSums && kPer * kTogether == kWarps, "1, 2 or 4 warps per head");
    __shared__ float shared_sums[kTogether][kSums][kDims * kWarp];
    __shared__ float shared_weights[kTogether][kSums];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const bool has_dims = D >= 64 || lane < D / 2;
    const int part = warp % kPer, place = warp / kPer, sequence = blockIdx.y;
    const int head = static_cast<int>(blockIdx.x) * kTogether + place;
    const int4 splits = plan[1 + sequence];
    if (splits.y == 1) return;  // the whole block
    float sum[kMine][kDims], weight[kMine];
#pragma unroll
    for (int j = 0; j < kMine; j++) {
        weight[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < kDims; i++) sum[j][i] = 0.0f;
    }
    if (head < heads) {
        float peak = kLowest;
#ifdef BATON_PLANT_FIRST_SPLITS
        for (int s = lane; s < min(splits.y, kWarp); s += kWarp)
#else
        for (int s = lane; s < splits.y; s += kWarp)
#endif
            peak = fmaxf(peak, partial_stats[(long long)(splits.x + s) * heads + head].x);
        peak = warp_max(peak);
#pragma unroll 4
        for (int first = part * kMine; first < splits.y; first += kSums)
#pragma unroll
            for (int j = 0; j < kMine; j++) {
#ifdef BATON_PLANT_LAST_SPLIT
                if (first + j >= splits.y - 1) break;
#else
                if (first + j >= splits.y) break;
#endif
                const long long row = (long long)(splits.x + first + j) * heads + head;
                const float2 of = partial_stats[row];
                const float2* from = (const float2*)(partial + row * D);
                const float by = power_of_two(of.x - peak);
                weight[j] += by * of.y;
#pragma unroll
                for (int i = 0; i < kPairs; i++) {
                    if (!has_dims) break;
                    const float2 v = from[i * kWarp + lane];
                    sum[j][2 * i] += by * v.x, sum[j][2 * i + 1] += by * v.y;
                }
            }
    }
    if (kPer > 1) {
#pragma unroll
        for (int j = 0; j < kMine; j++) {
#pragma unroll
            for (int i = 0; i < kDims; i++)
                shared_sums[place][part * kMine + j][i * kWarp + lane] = sum[j][i];
            if (lane == 0) shared_weights[place][part * kMine + j] = weight[j];
        }
#ifndef BATON_PLANT_COMBINE_BARRIER
        __syncthreads();
#endif
    }
    if (part > 0 || head >= heads) return;
    float total[kDims], all = 0.0f;
#pragma unroll
    for (int i = 0; i < kDims; i++) total[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kSums; j++) {
        all += kPer > 1 ? shared_weights[place][j] : weight[j % kMine];
#pragma unroll
        for (int i = 0; i < kDims; i++)
            total[i] += kPer > 1 ? shared_sums[place][j][i * kWarp + lane] : sum[j % kMine][i];
    }
    const float by = all > 0.0f ? 1.0f / all : 0.0f;
    unsigned* to = (unsigned*)(out + (static_cast<long long>(sequence) * heads + head) * D);
#pragma unroll
    for (int i = 0; i < kPairs; i++)
        if (has_dims) to[i * kWarp + lane] = pack_bf16(total[2 * i] * by, total[2 * i + 1] * by);
}

#define ATTENTION(D, suffix, Rows)                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, BATON_DECODE_BOUNDS)                    \
        decode_attention##suffix##_d##D(                                                           \
        const bf16* q, const Rows<D>::Element* kv_layer, const int* tables, const int4* plan,      \
        bf16* out, float* partial, float2* partial_stats, int sequences, int table_width,          \
        int kv_heads, int group, int block_size, float scale_log2) {                               \
        begin_after_previous();                                                                    \
        decode_attention<D, Rows<D>>(q, kv_layer, tables, plan, out, partial, partial_stats,       \
                                     sequences, table_width, kv_heads, group, block_size,          \
                                     scale_log2);                                                  \
    }
#define COMBINE(D)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads) decode_combine_d##D(                    \
        const int4* plan, const float* partial, const float2* partial_stats, bf16* out,            \
        int heads) {                                                                               \
        begin_after_previous();                                                                    \
        decode_combine<D>(plan, partial, partial_stats, out, heads);                               \
    }
#define KERNELS(D)                                                                                 \
    ATTENTION(D, , Halves)                                                                         \
    ATTENTION(D, _int8, Codes)                                                                     \
    COMBINE(D)

KERNELS(32)
KERNELS(64)
KERNELS(128)
