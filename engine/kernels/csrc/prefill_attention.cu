// Prefill attention: chunks of queries over a paged cache, on tensor cores.
//
// A thread block takes 128 query rows of one KV head. A row is one token and one head of the group
// (row = token * group + head). So a tile of keys is loaded once for all heads of the group, and few
// tokens fill a tile: at a group of 4 it spans 32 tokens, and little is lost at the causal edge.
// Each of the four warps takes 32 rows: a fragment of keys or values read from shared memory feeds
// two mma. This keeps shared memory (128 bytes per cycle) faster than the tensor cores: 64 keys of 128
// dims take 4 * 40 KiB = 1280 cycles of reading and 1024 mma * 4096 operations, about 1600 cycles at
// the rate of mma.sync on Hopper. With 16 rows per warp, reading would take 2300.
//
// Tiles of 64 keys and values are copied one ahead of their use; keys that no row of the tile sees are
// never read. Tiles start at multiples of 64 positions whatever the chunk, a key that a row does not
// see has weight zero, and the softmax maximum is a power of two, so that
// rescaling is exact. So a row's bits are the same in any chunk or batch. Weights
// are summed after rounding for the tensor cores.
//
// The plan (engine/kernels/cuda/attention_plan.py) gives a thread block eight int32: sequence,
// first row, number of rows (tokens), first and last + 1 of the positions that some row sees, first
// and last + 1 of those that every row sees, 0. Long tiles come first, so that the last to start
// are short.
#include "paged_kv.cuh"

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kRows = 128;  // of a thread block, 32 of a warp
constexpr int kKeys = 64;  // of a tile
constexpr int kFound = kWarp * kGroup / kKeys;  // tiles whose rows fit into the lanes of a warp
// Pieces of 16 bytes in the keys of a tile; as many in its values.
template <int D> constexpr int kPieces = kKeys * kRowPieces<D>;

// A tile of the plan. It is kept in shared memory, because this kernel is short of registers.
struct Job {
    int sequence, first_row, rows, begin;
    int end, common_begin, common_end, nothing;
};

// Copies tiles of keys and values, by all threads of the block.
template <int D> struct Loader {
    PagedHead<> kv;
    uint4* stages;  // two times keys and values of a tile
    unsigned rows, rows_ahead;

    __device__ __forceinline__ void start(int tile) {
        rows_ahead = find(tile);
        take(tile);
    }

    // Lane l holds the row of group l of kFound tiles; the next are fetched ahead of their use.
    __device__ __forceinline__ void take(int tile) {
        rows = rows_ahead;
#ifdef BATON_PLANT_LOOK_AHEAD
        rows_ahead = find(tile);
#else
        rows_ahead = find(tile + kFound);
#endif
    }

    __device__ __forceinline__ unsigned find(int tile) const {
        return kv.row_of_group(tile / kFound * kWarp + threadIdx.x % kWarp);
    }

    __device__ __forceinline__ void load(int tile) const {
        uint4* keys = stages + (tile & 1) * 2 * kPieces<D>;
        const long long to_value = kv.value_distance() * D;
#pragma unroll
        for (int i = 0; i < kKeys * D / 8; i += kThreads) {
            const int row = (i + threadIdx.x) / (D / 8), piece = (i + threadIdx.x) % (D / 8);
            const int group = tile % kFound * (kKeys / kGroup) + row / kGroup;
            const unsigned at = __shfl_sync(kAllLanes, rows, group) + row % kGroup;
            const bf16* key = kv.pool + static_cast<long long>(at) * D + piece * 8;
            const bool wanted = kv.readable(tile * kKeys + row);
            copy_or_zero(keys + swizzled<D>(row, piece), key, wanted);
            copy_or_zero(keys + kPieces<D> + swizzled<D>(row, piece), key + to_value, wanted);
        }
    }
};

// A warp's 32 rows in two halves of 16: rows g, g + 8 of each are this lane's.
template <int D> struct Sums {
    float out[2][D / 8][4];
    float peak[2][2], weight[2][2];
};

template <int D> __device__ __forceinline__ void clear(Sums<D>& sums) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.out[m][n][i] = 0.0f;
        sums.peak[m][0] = sums.peak[m][1] = kLowest, sums.weight[m][0] = sums.weight[m][1] = 0.0f;
    }
}

// Offset from the block's first row to row `row`, in q and out [T, Hq, D].
template <int D>
__device__ __forceinline__ long long row_offset(int row, int group, int heads) {
    const int token = row / group;
    return (static_cast<long long>(token) * heads + (row - token * group)) * D;
}

template <int D>
__device__ __forceinline__ void load_queries(uint4* queries, const bf16* q, int count, int group,
                                             int heads) {
    for (int i = threadIdx.x; i < kRows * D / 8; i += kThreads) {
        const int row = i / (D / 8), piece = i % (D / 8);
        const long long offset = row < count ? row_offset<D>(row, group, heads) : 0;
        copy_or_zero(queries + swizzled<D>(row, piece), q + offset + piece * 8, row < count);
    }
}

template <int D>
__device__ __forceinline__ void score_tile(float (&score)[2][kKeys / 8][4], const uint4* queries,
                                           const uint4* keys, int lane) {
    const int low = lane & 7, upper = (lane >> 3) & 1, last = lane >> 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) score[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            ldmatrix_x4(a[m], queries + swizzled<D>(m * 16 + low + upper * 8, 2 * k + last));
#pragma unroll
        for (int n = 0; n < kKeys / 8; n += 2) {
            unsigned b[4];
            ldmatrix_x4(b, keys + swizzled<D>(n * 8 + low + last * 8, 2 * k + upper));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16_16816(score[m][n], a[m], b);
                mma_bf16_16816(score[m][n + 1], a[m], b + 2);
            }
        }
    }
}

// seen[r] is the last position that row r sees; it sees `window` positions up to it.
__device__ __forceinline__ void mask_tile(float (&score)[2][kKeys / 8][4], const int* seen,
                                          int first, int window, int lane) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int last = seen[m * 16 + h * 8 + (lane >> 2)];
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int key = first + n * 8 + (lane & 3) * 2 + i;
#ifdef BATON_PLANT_CAUSAL_MASK
                    const bool visible = key > last - window;
#elif defined(BATON_PLANT_WINDOW)
                    const bool visible = key <= last;
#else
                    const bool visible = key <= last && key > last - window;
#endif
                    if (!visible) score[m][n][h * 2 + i] = minus_infinity();
                }
        }
}

// Rounded weights 2^(score - maximum) of a tile; two adjacent score fragments form a weight fragment.
struct Weights {
    unsigned pair[kKeys / 16][2][4];
};

// Weighs the scores of a tile and rescales the sums so far to the new maximum.
template <int D>
__device__ __forceinline__ void weigh_tile(Sums<D>& sums, Weights& weights,
                                           const float (&score)[2][kKeys / 8][4],
                                           float scale_log2) {
    bool grew = false;
    float peak[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(score[m][0][h * 2], score[m][0][h * 2 + 1]);
#pragma unroll
            for (int n = 1; n < kKeys / 8; n++)
                top = fmaxf(top, fmaxf(score[m][n][h * 2], score[m][n][h * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
            peak[m][h] = fmaxf(sums.peak[m][h], ceilf(top * scale_log2));
            grew |= peak[m][h] != sums.peak[m][h];
        }
    if (__any_sync(kAllLanes, grew)) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float by = power_of_two(sums.peak[m][h] - peak[m][h]);
                sums.peak[m][h] = peak[m][h];
                sums.weight[m][h] *= by;
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    sums.out[m][n][h * 2] *= by, sums.out[m][n][h * 2 + 1] *= by;
            }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* s = &score[m][2 * k + (i >> 1)][(i & 1) * 2];
                const float low = exp2f(fmaf(s[0], scale_log2, -sums.peak[m][i & 1]));
                const float high = exp2f(fmaf(s[1], scale_log2, -sums.peak[m][i & 1]));
                const unsigned pair = weights.pair[k][m][i] = pack_bf16(low, high);
                sums.weight[m][i & 1] += low_bf16(pair) + high_bf16(pair);
            }
}

template <int D>
__device__ __forceinline__ void add_values(Sums<D>& sums, const Weights& weights,
                                           const uint4* values, int lane) {
    const int low = lane & 7, upper = (lane >> 3) & 1, last = lane >> 4;
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++)
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            unsigned b[4];
            ldmatrix_x4_trans(b, values + swizzled<D>(k * 16 + low + upper * 8, n + last));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16_16816(sums.out[m][n], weights.pair[k][m], b);
                mma_bf16_16816(sums.out[m][n + 1], weights.pair[k][m], b + 2);
            }
        }
}

// Rounds a warp's rows into shared memory, over its queries, and copies them from there to `out`, which
// points to the first row of the block.
template <int D>
__device__ __forceinline__ void write_rows(Sums<D>& sums, uint4* place, bf16* out, int first,
                                           int count, int group, int heads, int lane) {
    const int g = lane >> 2, t = lane & 3;
    __syncwarp();  // all lanes have read the queries: ldmatrix and shuffles order no memory
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float weight = sums.weight[m][h];
            weight += __shfl_xor_sync(kAllLanes, weight, 1);
            weight += __shfl_xor_sync(kAllLanes, weight, 2);
            const float by = weight > 0.0f ? 1.0f / weight : 0.0f;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const float* pair = &sums.out[m][n][h * 2];
                unsigned* words = (unsigned*)(place + swizzled<D>(m * 16 + h * 8 + g, n));
                words[t] = pack_bf16(pair[0] * by, pair[1] * by);
            }
        }
    __syncwarp();
    for (int i = lane; i < 32 * D / 8; i += kWarp) {
        const int row = i / (D / 8), piece = i % (D / 8);
        if (first + row < count)
            *(uint4*)(out + row_offset<D>(first + row, group, heads) + piece * 8) =
                place[swizzled<D>(row, piece)];
    }
}

template <int D>
__device__ __forceinline__ void prefill_attention(
    const bf16* __restrict__ q, const bf16* __restrict__ kv_layer, const int* __restrict__ tables,
    const int* __restrict__ positions, const Job* __restrict__ plan, bf16* __restrict__ out,
    int table_width, int kv_heads, int group, int block_size, int window, float scale_log2) {
    DYNAMIC_SHARED(shared);
    uint4* queries = (uint4*)shared;
    uint4* stages = queries + kRows * kRowPieces<D>;
    Job* job = (Job*)(stages + 4 * kPieces<D>);
    int* seen = (int*)(job + 1);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int kv_head = blockIdx.x % kv_heads, heads = kv_heads * group;
    if (threadIdx.x == 0) *job = plan[blockIdx.x / kv_heads];
    __syncthreads();

    const auto loader_of = [&](unsigned rows, unsigned rows_ahead) {
        const int* table = tables + static_cast<long long>(job->sequence) * table_width;
        const PagedHead<> kv = {kv_layer, table, block_size, kv_heads, kv_head, job->begin, job->end};
        return Loader<D>{kv, stages, rows, rows_ahead};
    };
    const auto origin = [&] {  // the row of the block's first token and head, in q and out
        return (static_cast<long long>(job->first_row) * heads + kv_head * group) * D;
    };
    int tile = job->begin / kKeys;
    const int tiles = (job->end + kKeys - 1) / kKeys;
    Loader<D> first_loader = loader_of(0, 0);
    first_loader.start(tile);
    first_loader.load(tile);
    load_queries<D>(queries, q + origin(), job->rows * group, group, heads);
    cp_async_commit();
    for (int i = threadIdx.x; i < kRows; i += kThreads)
        seen[i] = i < job->rows * group ? positions[job->first_row + i / group] : -1;
    unsigned rows = first_loader.rows, rows_ahead = first_loader.rows_ahead;

    Sums<D> sums;
    clear(sums);
    uint4* mine = queries + warp * 32 * kRowPieces<D>;
    for (; tile < tiles; tile++) {
#ifdef BATON_PLANT_ASYNC_WAIT
        cp_async_wait<1>();
#else
        cp_async_wait<0>();
#endif
#ifndef BATON_PLANT_BARRIER
        __syncthreads();  // this tile has arrived, and all warps have finished the previous one
#endif
        if (tile + 1 < tiles) {
            Loader<D> loader = loader_of(rows, rows_ahead);
            if ((tile + 1) % kFound == 0) loader.take(tile + 1);
            loader.load(tile + 1);
            cp_async_commit();
            rows = loader.rows, rows_ahead = loader.rows_ahead;
        }
        const uint4* keys = stages + (tile & 1) * 2 * kPieces<D>;
        const int first = tile * kKeys;
        float score[2][kKeys / 8][4];
        score_tile<D>(score, mine, keys, lane);
        if (first < job->common_begin || first + kKeys > job->common_end)
            mask_tile(score, seen + warp * 32, first, window, lane);
        Weights weights;
        weigh_tile<D>(sums, weights, score, scale_log2);
        add_values<D>(sums, weights, keys + kPieces<D>, lane);
    }
    write_rows<D>(sums, mine, out + origin(), warp * 32, job->rows * group, group, heads, lane);
}

#define KERNEL(D)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) prefill_attention_d##D(              \
        const bf16* q, const bf16* kv_layer, const int* tables, const int* positions,              \
        const Job* plan, bf16* out, int table_width, int kv_heads, int group, int block_size,      \
        int window, float scale_log2) {                                                            \
        prefill_attention<D>(q, kv_layer, tables, positions, plan, out, table_width, kv_heads,     \
                             group, block_size, window, scale_log2);                               \
    }

KERNEL(32)
KERNEL(64)
KERNEL(80)  // towers of vision models
KERNEL(128)
