// Prefill attention on Hopper's asynchronous tensor cores (wgmma, sm_90a), otherwise like
// prefill_attention.cu: the same plan, rows, masks and rounding.
//
// The division of work is that of FlashAttention-3 (https://arxiv.org/abs/2407.08608): of a block's
// three warpgroups one copies, and two take 64 rows each. The two take turns in issuing products,
// so that one weighs its scores while the other multiplies. Queries stay in registers, which leaves
// their place to the next tile's.
//
// Tiles are copied by cp.async, 16 bytes per thread: positions that nobody may read become zeros. With
// kBulk, a tile of which all positions may be read is copied by the bulk copy engine, a part of 64 columns
// of one block of the cache at a time (prefill_bulk.cu). The bits are the same.
//
// Thread blocks stay: each takes every n-th tile of the plan, so that the first keys of the next are
// copied while the last of the previous are computed. Tiles of 128 keys start at multiples of 128
// positions whatever the chunk, and the softmax maximum is a power of two, so a row's bits are the
// same in any chunk or batch. They differ from those of prefill_attention.cu, whose tiles have 64 keys.
#pragma once
#include "hopper.cuh"
#include "paged_kv.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(BATON_CUDA_HOST)

constexpr int kRows = 128, kKeys = 128;  // of a tile of the plan; of a tile of keys
constexpr int kStages = 2;  // three were no faster
constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kCopyRegisters = 56, kComputeRegisters = 224;  // 128 * 56 + 256 * 224 <= 65536
constexpr int kPartBytes = kKeys * kSwizzleBytes;  // 64 columns of a tile
template <int D> constexpr int kTileBytes = D / 64 * kPartBytes;
constexpr int kGroupsPerTile = kKeys / kGroup;
constexpr int kFound = kWarp / kGroupsPerTile;  // tiles whose rows fit into the lanes of a warp

// Addresses in shared memory. "full": its content has arrived; "empty": nobody reads it any more.
template <int D> struct Places {
    unsigned start;
    __device__ __forceinline__ unsigned queries() const { return start; }
    __device__ __forceinline__ unsigned keys(unsigned stage) const {
        return start + (1 + stage) * kTileBytes<D>;
    }
    __device__ __forceinline__ unsigned values(unsigned stage) const {
        return start + (1 + kStages + stage) * kTileBytes<D>;
    }
    __device__ __forceinline__ unsigned barrier(int n) const {
        return start + (1 + 2 * kStages) * kTileBytes<D> + n * 8;
    }
    __device__ __forceinline__ unsigned queries_full() const { return barrier(0); }
    __device__ __forceinline__ unsigned queries_empty() const { return barrier(1); }
    __device__ __forceinline__ unsigned keys_full(unsigned s) const { return barrier(2 + s); }
    __device__ __forceinline__ unsigned keys_empty(unsigned s) const {
        return barrier(2 + kStages + s);
    }
    __device__ __forceinline__ unsigned values_full(unsigned s) const {
        return barrier(2 + 2 * kStages + s);
    }
    __device__ __forceinline__ unsigned values_empty(unsigned s) const {
        return barrier(2 + 3 * kStages + s);
    }
};

// A tile of the plan, as in prefill_attention.cu.
struct Job {
    int sequence, first_row, rows, begin;
    int end, common_begin, common_end, nothing;
};

struct Call {
    const bf16* q;
    const bf16* kv_layer;
    const int* tables;
    const int* positions;
    const Job* plan;
    bf16* out;
    int table_width, kv_heads, group, block_size, window;
    float scale_log2;
    int items;  // tiles of the plan times KV heads
};

__device__ __forceinline__ Job job_of(const Call& call, int item) {
    const int4* words = (const int4*)(call.plan + item / call.kv_heads);
    const int4 a = words[0], b = words[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// The item of a thread block in round r: there and back, because the plan begins with long tiles.
__device__ __forceinline__ int item_of(int round) {
    const int at = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * gridDim.x + at;
}

// ---------------------------------------------------------------- the warpgroup that copies

template <int D, bool kBulk> struct Copier {
    static constexpr int kPieces = D / 8;  // of a row
    static constexpr int kParts = D / 64;  // of a tile, for the bulk copy engine
    static constexpr int kStep = kWarpgroup / kPieces;  // rows that all threads copy at once

    const Places<D> places;
    const TensorMap* map;  // of all rows of the pool, if kBulk
    int thread;

    // This thread's place within the first rows of a tile; step i is i * kStep rows below.
    __device__ __forceinline__ unsigned place() const {
        const int row = thread / kPieces, piece = thread % kPieces;
#ifdef BATON_PLANT_SWIZZLE
        return piece / 8 * kPartBytes + row * kSwizzleBytes + (piece & 7) * 16;
#else
        return piece / 8 * kPartBytes + row * kSwizzleBytes + ((piece ^ row) & 7) * 16;
#endif
    }

    __device__ __forceinline__ void queries(const Call& call, const Job& job, int kv_head) const {
        const int heads = call.kv_heads * call.group, count = job.rows * call.group;
        const bf16* q = call.q + (static_cast<long long>(job.first_row) * heads +
                                  kv_head * call.group) * D + thread % kPieces * 8;
        const unsigned to = places.queries() + place();
#pragma unroll 4
        for (int i = 0; i < kRows / kStep; i++) {
            const int row = i * kStep + thread / kPieces, token = row / call.group;
            const long long at = static_cast<long long>(token) * heads + (row - token * call.group);
            const bool wanted = row < count;
            cp_async16_fill_at(to + i * kStep * kSwizzleBytes, q + (wanted ? at * D : 0),
                               wanted ? 16u : 0u);
        }
    }

    // Keys (or, `distance` rows after them, values) of a tile; `rows` are those of its groups.
    __device__ __forceinline__ void rows(const PagedHead<>& kv, unsigned rows, int tile,
                                         unsigned target, long long distance) const {
        const unsigned to = target + place();
        const bf16* pool = kv.pool + distance * D + thread % kPieces * 8;
#pragma unroll
        for (int i = 0; i < kKeys / kStep; i++) {
            const int row = i * kStep + thread / kPieces;
            const int group = tile % kFound * kGroupsPerTile + row / kGroup;
            const unsigned at = __shfl_sync(kAllLanes, rows, group) + row % kGroup;
            cp_async16_fill_at(to + i * kStep * kSwizzleBytes, pool + static_cast<long long>(at) * D,
                               kv.readable(tile * kKeys + row) ? 16u : 0u);
        }
    }

    // As rows(), by the bulk copy engine; all threads arrive at the barrier `full` of the target.
    __device__ __forceinline__ void boxes(const PagedHead<>& kv, unsigned rows, int tile,
                                          unsigned target, long long distance, unsigned full) const {
        // Rows of a block that lie together within a tile; the host makes the map with as many.
        const int box = min(kv.block_size & -kv.block_size, kKeys), last = kKeys / box - 1;
        const int at = thread / kParts, part = thread % kParts;
        const int group = tile % kFound * kGroupsPerTile + min(at, last) * box / kGroup;
        const unsigned first = __shfl_sync(kAllLanes, rows, group);
#ifdef BATON_PLANT_EXPECT
        barrier_arrive(full);
#else
        if (thread == 0) barrier_arrive_expecting(full, kTileBytes<D>);
        else barrier_arrive(full);
#endif
        if (at > last) return;
        // The copies of the last tile here were written by threads, and products have read them.
        shared_fence_for_wgmma();
        bulk_copy(target + part * kPartBytes + at * box * kSwizzleBytes, map, part * 64,
                  static_cast<int>(first + distance), full);
    }

    // Keys or values of a tile into `target`, whose barrier is `full`.
    __device__ __forceinline__ void copy(const PagedHead<>& kv, unsigned found, int tile,
                                         unsigned target, long long distance, unsigned full) const {
#ifdef BATON_PLANT_EDGE
        const bool whole = kBulk;
#else
        const bool whole = kBulk && tile * kKeys >= kv.begin && (tile + 1) * kKeys <= kv.end;
#endif
        if (whole) {
            boxes(kv, found, tile, target, distance, full);
        } else {
            rows(kv, found, tile, target, distance);
            barrier_arrive_after_copies(full);
        }
    }

    __device__ __forceinline__ void run(const Call& call) const {
        unsigned count = 0;  // tiles of keys so far
        for (int round = 0, item; (item = item_of(round)) < call.items; round++) {
            const Job job = job_of(call, item);
            const int kv_head = item % call.kv_heads;
            const int* table = call.tables + static_cast<long long>(job.sequence) * call.table_width;
            const PagedHead<> kv = {call.kv_layer, table, call.block_size, call.kv_heads,
                                  kv_head, job.begin, job.end};
            barrier_wait(places.queries_empty(), (round & 1) ^ 1);
            queries(call, job, kv_head);
            barrier_arrive_after_copies(places.queries_full());
            const int tiles = (job.end + kKeys - 1) / kKeys;
            int tile = job.begin / kKeys;
            const auto find = [&](int tile) {
                return kv.row_of_group(tile / kFound * kWarp + thread % kWarp);
            };
            unsigned found = find(tile), found_ahead = find(tile + kFound);
            for (; tile < tiles; tile++, count++) {
                const unsigned stage = count % kStages, parity = (count / kStages & 1) ^ 1;
#ifndef BATON_PLANT_STAGE
                barrier_wait(places.keys_empty(stage), parity);
#endif
                copy(kv, found, tile, places.keys(stage), 0, places.keys_full(stage));
                barrier_wait(places.values_empty(stage), parity);
                copy(kv, found, tile, places.values(stage), kv.value_distance(),
                     places.values_full(stage));
                if ((tile + 1) % kFound == 0) {
                    found = found_ahead;
#ifdef BATON_PLANT_LOOK_AHEAD
                    found_ahead = find(tile + 1);
#else
                    found_ahead = find(tile + 1 + kFound);
#endif
                }
            }
        }
        cp_async_wait_all();
    }
};

// ---------------------------------------------------------------- a warpgroup that computes

// A lane's part of 64 rows: rows g and g + 8 of its warp's 16, two of each eight columns.
template <int D> struct Sums {
    float out[D / 2];
    float peak[2], weight[2];
};

struct Weights {
    unsigned pair[kKeys / 16][4];
};

// A warp's 16 rows of queries. Read from shared memory for every tile, they would take a quarter of its
// bandwidth.
template <int D> struct Queries {
    unsigned part[D / 16][4];
};

template <int D> struct Computer {
    const Places<D> places;
    int consumer, warp, lane;  // the warpgroup; the warp within it

    __device__ __forceinline__ void load(Queries<D>& queries) const {
        const int row = consumer * 64 + warp * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const int piece = 2 * k + lane / 16;
            ldmatrix_x4_at(queries.part[k], places.queries() + piece / 8 * kPartBytes +
                                                row * kSwizzleBytes + ((piece ^ row) & 7) * 16);
        }
    }

    __device__ __forceinline__ void scores(float (&score)[kKeys / 2], const Queries<D>& queries,
                                           unsigned stage) const {
        const unsigned keys = places.keys(stage);
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            wgmma_scores(score, queries.part[k],
                         tile_descriptor(keys + k / 4 * kPartBytes + k % 4 * 32, 16), k > 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void add_values(Sums<D>& sums, const Weights& weights,
                                               unsigned stage) const {
        const unsigned values = places.values(stage);
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++)
            wgmma_values(sums.out, weights.pair[k],
#ifdef BATON_PLANT_PARTS
                         tile_descriptor(values + k * 16 * kSwizzleBytes, kPartBytes / 2));
#else
                         tile_descriptor(values + k * 16 * kSwizzleBytes, kPartBytes));
#endif
        wgmma_commit();
    }

    // seen[h] is the last position that row g + 8 h sees; it sees `window` positions up to it.
    __device__ __forceinline__ void mask(float (&score)[kKeys / 2], const int (&seen)[2], int first,
                                         int window) const {
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first + n * 8 + (lane & 3) * 2 + (i & 1), last = seen[i >> 1];
#ifdef BATON_PLANT_CAUSAL_MASK
                const bool visible = key > last - window;
#elif defined(BATON_PLANT_WINDOW)
                const bool visible = key <= last;
#else
                const bool visible = key <= last && key > last - window;
#endif
                if (!visible) score[n * 4 + i] = minus_infinity();
            }
    }

    // The new maxima of the rows; `by` is what sums so far are multiplied with, if some row's grew.
    __device__ __forceinline__ bool raise(Sums<D>& sums, const float (&score)[kKeys / 2],
                                          float (&by)[2], float scale_log2) const {
        bool grew = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
            for (int n = 1; n < kKeys / 8; n++)
                top = fmaxf(top, fmaxf(score[n * 4 + 2 * h], score[n * 4 + 2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
            const float peak = fmaxf(sums.peak[h], ceilf(top * scale_log2));
            grew |= peak != sums.peak[h];
            by[h] = power_of_two(sums.peak[h] - peak);
            sums.peak[h] = peak;
            sums.weight[h] *= by[h];
        }
        return __any_sync(kAllLanes, grew);
    }

    // Turns scores into weights 2^(score - maximum), rounded to bf16, in place: the registers of the
    // previous weights are still being read.
    __device__ __forceinline__ void weigh(Sums<D>& sums, float (&score)[kKeys / 2],
                                          float scale_log2) const {
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 2) {
            const float peak = sums.peak[i >> 1 & 1];
            const float low = exp2f(fmaf(score[i], scale_log2, -peak));
            const float high = exp2f(fmaf(score[i + 1], scale_log2, -peak));
            const unsigned pair = pack_bf16(low, high);
            score[i] = low_bf16(pair), score[i + 1] = high_bf16(pair);
            sums.weight[i >> 1 & 1] += score[i] + score[i + 1];
        }
    }

    // Two adjacent score fragments form a weight fragment.
    __device__ __forceinline__ void pack(Weights& weights, const float (&score)[kKeys / 2]) const {
#pragma unroll
        for (int i = 0; i < kKeys / 4; i++)
            weights.pair[i / 4][i % 4] = __byte_perm(__float_as_uint(score[2 * i]),
                                                     __float_as_uint(score[2 * i + 1]), 0x7632);
    }

    __device__ __forceinline__ void rescale(Sums<D>& sums, const float (&by)[2]) const {
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.out[n * 4 + i] *= by[i >> 1];
    }

    __device__ __forceinline__ void write(Sums<D>& sums, const Call& call, const Job& job,
                                          int kv_head) const {
        const int heads = call.kv_heads * call.group;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float weight = sums.weight[h];
            weight += __shfl_xor_sync(kAllLanes, weight, 1);
            weight += __shfl_xor_sync(kAllLanes, weight, 2);
            const float by = weight > 0.0f ? 1.0f / weight : 0.0f;
            const int row = row_of(h);
            if (row >= job.rows * call.group) continue;
            const int token = row / call.group;
            const long long at = static_cast<long long>(job.first_row + token) * heads +
                                 kv_head * call.group + (row - token * call.group);
            unsigned* to = (unsigned*)(call.out + at * D) + (lane & 3);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                to[n * 4] = pack_bf16(sums.out[n * 4 + 2 * h] * by, sums.out[n * 4 + 2 * h + 1] * by);
        }
    }

    __device__ __forceinline__ int row_of(int h) const {
        return consumer * 64 + warp * 16 + h * 8 + (lane >> 2);
    }

    // One arrival per warp, after all its lanes.
    __device__ __forceinline__ void leave(unsigned barrier) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void my_turn() const {
        turn_wait(1 + consumer, kConsumers * kWarpgroup);
    }
    __device__ __forceinline__ void your_turn() const {
        turn_give(1 + (consumer ^ 1), kConsumers * kWarpgroup);
    }

    // Adds the values of tile `count`, whose weights are known, and weighs the scores of the next, whose
    // keys begin at `first`.
    template <bool kMasked>
    __device__ __forceinline__ void step(Sums<D>& sums, Weights& weights,
                                         const Queries<D>& queries, const int (&seen)[2], int first,
                                         const Call& call, unsigned count) const {
        float score[kKeys / 2], by[2];
        const unsigned stage = count % kStages, next = (count + 1) % kStages;
#ifndef BATON_PLANT_ARRIVED
        barrier_wait(places.keys_full(next), (count + 1) / kStages & 1);
#endif
        barrier_wait(places.values_full(stage), count / kStages & 1);
        shared_fence_for_wgmma();
        my_turn();
        wgmma_fence();
        scores(score, queries, next);
        add_values(sums, weights, stage);
        your_turn();
#ifndef BATON_PLANT_SCORES_WAIT
        wgmma_wait<1>();
#endif
        keep_order(score);
        leave(places.keys_empty(next));
        if (kMasked) mask(score, seen, first, call.window);
        const bool grew = raise(sums, score, by, call.scale_log2);
        weigh(sums, score, call.scale_log2);
        // The compiler moves this wait up to the shuffles of the maxima. Held back until the scores were
        // weighed, it took 6 % longer on an H200: the place of the values was free later.
        wgmma_wait<0>();
        keep_order(sums.out);
        leave(places.values_empty(stage));
        if (grew) rescale(sums, by);
        pack(weights, score);
    }

    __device__ __forceinline__ void run(const Call& call) const {
        unsigned count = 0;
        if (consumer == 1) your_turn();
        for (int round = 0, item; (item = item_of(round)) < call.items; round++) {
            const Job job = job_of(call, item);
            const int kv_head = item % call.kv_heads;
            int seen[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = row_of(h);
                seen[h] = row < job.rows * call.group
                              ? call.positions[job.first_row + row / call.group] : -1;
            }
            Sums<D> sums;
#pragma unroll
            for (int i = 0; i < D / 2; i++) sums.out[i] = 0.0f;
            sums.peak[0] = sums.peak[1] = kLowest, sums.weight[0] = sums.weight[1] = 0.0f;
            Weights weights;
            float score[kKeys / 2], by[2];
            const int tiles = (job.end + kKeys - 1) / kKeys;
            int tile = job.begin / kKeys;
            const auto at_edge = [&] {
                const int first = tile * kKeys;
                return first < job.common_begin || first + kKeys > job.common_end;
            };

            Queries<D> queries;
            barrier_wait(places.queries_full(), round & 1);
            load(queries);
            leave(places.queries_empty());
            barrier_wait(places.keys_full(count % kStages), count / kStages & 1);
            shared_fence_for_wgmma();
            my_turn();
            wgmma_fence();
            scores(score, queries, count % kStages);
            your_turn();
            wgmma_wait<0>();
            keep_order(score);
            leave(places.keys_empty(count % kStages));
            if (at_edge()) mask(score, seen, tile * kKeys, call.window);
            raise(sums, score, by, call.scale_log2);
            weigh(sums, score, call.scale_log2);
            pack(weights, score);
            for (tile++; tile < tiles; tile++) {
                if (at_edge())
                    step<true>(sums, weights, queries, seen, tile * kKeys, call, count++);
                else
                    step<false>(sums, weights, queries, seen, tile * kKeys, call, count++);
            }
            const unsigned stage = count % kStages;
            barrier_wait(places.values_full(stage), count / kStages & 1);
            count++;
            shared_fence_for_wgmma();
            my_turn();
            wgmma_fence();
            add_values(sums, weights, stage);
            your_turn();
            wgmma_wait<0>();
            keep_order(sums.out);
            leave(places.values_empty(stage));
            write(sums, call, job, kv_head);
        }
        if (consumer == 0) my_turn();  // takes the last turn that was given
    }
};

template <int D, bool kBulk>
__device__ __forceinline__ void prefill_attention(const Call& call, const TensorMap* map) {
    DYNAMIC_SHARED(shared);
    const unsigned base = shared_address(shared);
    const Places<D> places = {(base + kSwizzleAtom - 1) / kSwizzleAtom * kSwizzleAtom};
    if (threadIdx.x == 0) {
        barrier_init(places.queries_full(), kWarpgroup);
        barrier_init(places.queries_empty(), kConsumers * kWarpgroup / kWarp);
        for (int s = 0; s < kStages; s++) {
            barrier_init(places.keys_full(s), kWarpgroup);
            barrier_init(places.values_full(s), kWarpgroup);
            barrier_init(places.keys_empty(s), kConsumers * kWarpgroup / kWarp);
            barrier_init(places.values_empty(s), kConsumers * kWarpgroup / kWarp);
        }
        barriers_ready();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
    if (warpgroup == kConsumers) {
        fewer_registers<kCopyRegisters>();
        const Copier<D, kBulk> copier = {places, map, thread};
        copier.run(call);
    } else {
        more_registers<kComputeRegisters>();
        const Computer<D> computer = {places, warpgroup, thread / kWarp, thread % kWarp};
        computer.run(call);
    }
}

#endif
