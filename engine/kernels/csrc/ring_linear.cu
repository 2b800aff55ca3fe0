// skinny_linear.cu for 9 to 16 rows of x, with the weights that are in flight in shared memory instead of
// in registers; chosen per card (engine/kernels/cuda/tuning.py, skinny_ring).
//
// With 16 rows of x, a block of skinny_linear.cu reads as many bytes of x as of weights for each tile, and
// registers hold one piece of weights in flight. Here a block takes up to four tiles, which share what is
// read of x, and every warp has a ring of steps of 32 columns. A lane copies what it multiplies itself, so
// the ring needs no barrier. Rows, pieces, matrix instructions and the order of all sums are those of
// skinny_linear.cu, and so are the bits.
#include "skinny.cuh"

constexpr int kHalves = 2;
constexpr int kStepColumns = 32;  // of a piece of 64
// Steps of a warp's ring: at most 96 KiB for a block, so that two blocks fit into a multiprocessor.
template <int kTiles> constexpr int kSteps = kTiles == 1 ? 8 : 12 / kTiles;

template <int kTiles> struct Ring {
    static constexpr int kWords = 2 * kTiles;  // of 16 bytes, of a lane and step

    uint4* place;  // of this lane in the first step
    int warp, steps;

    __device__ __forceinline__ Ring(unsigned char* shared, int k) {
        warp = static_cast<int>(threadIdx.x / 32);
        place = reinterpret_cast<uint4*>(shared) + warp * kSteps<kTiles> * kWords * 32 + threadIdx.x % 32;
        steps = (k + kWarps * kPiece - 1 - warp * kPiece) / (kWarps * kPiece) * (kPiece / kStepColumns);
    }

    // First of this lane's 8 columns.
    __device__ __forceinline__ int column(int step) const {
        return (warp + step / 2 * kWarps) * kPiece + step % 2 * kStepColumns + lane_part() * 8;
    }

    __device__ __forceinline__ uint4* at(int stage, int tile, int upper) const {
        return place + (stage * kWords + tile * 2 + upper) * 32;
    }

    // Copies a step's weights into a stage; after the last step nothing.
    __device__ __forceinline__ void copy(const bf16* all, const Tiles<kTiles>& tiles, int k, int step,
                                         int stage) const {
        if (step < steps) {
            const int from = column(step);
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                for (int upper = 0; upper < 2; upper++) {
                    const int r = lane_row() + 8 * upper;
                    const bool inside = is_inside(from, k) && r < tiles.rows[tile];
                    // In units of 16 bytes, so that int can address 32 GiB.
                    const int word = inside ? (tiles.first[tile] + r) * (k / 8) + from / 8 : 0;
                    cp_async16_fill(at(stage, tile, upper), reinterpret_cast<const uint4*>(all) + word,
                                    inside ? 16u : 0u);
                }
        }
        cp_async_commit();
    }
};

// This lane's columns of its rows of x, in a step.
struct Part {
    uint4 row[kHalves];

    template <int kTiles>
    __device__ __forceinline__ void load(const bf16* x, const Ring<kTiles>& ring, int m, int k, int step) {
        const int from = ring.column(step);
#pragma unroll
        for (int half = 0; half < kHalves; half++) {
            const int r = lane_row() + kHalfRows * half;
            const bool inside = step < ring.steps && is_inside(from, k) && r < m;
            row[half] = inside ? __ldg(reinterpret_cast<const uint4*>(x) + r * (k / 8) + from / 8) : zero16();
        }
    }
};

// Adds the products of a step whose weights have arrived.
template <int kTiles>
__device__ __forceinline__ void multiply(const Ring<kTiles>& ring, const Part& x, int stage,
                                         float (*sums)[kHalves][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
        const uint4 low = *ring.at(stage, tile, 0), high = *ring.at(stage, tile, 1);
#pragma unroll
        for (int half = 0; half < kHalves; half++)
            multiply_tile(sums[tile][half], low, high, x.row[half]);
    }
}

// Computes the products of the block's weight rows with all rows of x. The result lies where the ring was.
template <int kTiles>
__device__ __forceinline__ Sums<kTiles, kHalves>& products(unsigned char* shared, const bf16* x,
                                                           const bf16* w, const Tiles<kTiles>& tiles,
                                                           int m, int k) {
    constexpr int kAhead = kSteps<kTiles> - 1;
    const Ring<kTiles> ring(shared, k);
    float sums[kTiles][kHalves][4] = {};
#pragma unroll
    for (int step = 0; step < kAhead; step++) ring.copy(w, tiles, k, step, step);
    Part now, next;
    next.load(x, ring, m, k, 0);
    int stage = 0, free = kAhead;
    for (int step = 0; step < ring.steps; step++) {
#ifdef BATON_PLANT_RING_WAIT
        cp_async_wait<kAhead>();
#else
        cp_async_wait<kAhead - 1>();
#endif
        // The stage of the step before, whose weights this lane has multiplied.
#ifdef BATON_PLANT_RING_STAGE
        ring.copy(w, tiles, k, step + kAhead, stage);
#else
        ring.copy(w, tiles, k, step + kAhead, free);
#endif
        now = next;
        next.load(x, ring, m, k, step + 1);
        multiply<kTiles>(ring, now, stage, sums);
        free = stage;
        stage = stage + 1 == kSteps<kTiles> ? 0 : stage + 1;
    }
#ifndef BATON_PLANT_RING_SUMS
    __syncthreads();  // all warps have read their rings
#endif
    auto& found = *reinterpret_cast<Sums<kTiles, kHalves>*>(shared);
    found.put(sums);
    return found;
}

// out = x W^T + bias, plus the content of out if `add`. bias: float32 or null.
template <int kTiles, class Out>
__device__ __forceinline__ void linear(const bf16* x, const bf16* w, const float* bias, Out* out, int m,
                                       int n, int k, int add) {
    DYNAMIC_SHARED(shared);
    constexpr int kRows = kTiles * kTileRows;
    const int first = static_cast<int>(blockIdx.x) * kRows;
    Tiles<kTiles> tiles;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
        tiles.first[tile] = first + tile * kTileRows, tiles.rows[tile] = n - tiles.first[tile];
    const auto& sums = products<kTiles>(shared, x, w, tiles, m, k);
    put_products<kRows>(sums, bias, out, first, 0, m, n, add);
}

// out[m, F] = silu(x G^T) * (x U^T), rounded as in skinny_linear.cu. The first half of a block's tiles are
// rows of G, the others those of U.
template <int kTiles>
__device__ __forceinline__ void linear_silu_mul(const bf16* x, const bf16* w, bf16* out, int m, int f,
                                                int k) {
    DYNAMIC_SHARED(shared);
    constexpr int kRows = kTiles / 2 * kTileRows;
    const int first = static_cast<int>(blockIdx.x) * kRows;
    Tiles<kTiles> tiles;
#pragma unroll
    for (int tile = 0; tile < kTiles / 2; tile++) {
        const int row = first + tile * kTileRows;
        tiles.first[tile] = row, tiles.first[kTiles / 2 + tile] = f + row;
        tiles.rows[tile] = tiles.rows[kTiles / 2 + tile] = f - row;
    }
    const auto& sums = products<kTiles>(shared, x, w, tiles, m, k);
    put_silu_mul<kRows>(sums, out, first, m, f);
}

#define LINEAR(tiles, Out, name)                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) ring_linear_##tiles##_##name(       \
        const bf16* __restrict__ x, const bf16* __restrict__ w, const float* bias, Out* out,      \
        int m, int n, int k, int add) {                                                           \
        begin_after_previous();                                                                   \
        linear<tiles, Out>(x, w, bias, out, m, n, k, add);                                        \
    }
LINEAR(1, bf16, bf16)
LINEAR(2, bf16, bf16)
LINEAR(4, bf16, bf16)
LINEAR(1, float, f32)
LINEAR(2, float, f32)
LINEAR(4, float, f32)

#define SILU_MUL(tiles)                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) ring_linear_silu_mul_##tiles(       \
        const bf16* __restrict__ x, const bf16* __restrict__ w, bf16* out, int m, int f, int k) { \
        begin_after_previous();                                                                   \
        linear_silu_mul<tiles>(x, w, out, m, f, k);                                               \
    }
SILU_MUL(2)
SILU_MUL(4)
