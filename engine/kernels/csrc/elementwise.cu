// Kernels that process rows: embedding, rows put in place, norms, rotary embedding with the append to
// the KV pool, activations, and blocks of an int8 pool as bf16.
//
// Rows are bf16 in memory and read once, 16 bytes (a word of 8 values) per load. Sums are float32 in a
// fixed order that depends only on the width: a row has the same bits whatever else is in the batch.
#include "device.cuh"
#include "int8_rows.cuh"

namespace {

// Returns to each thread the sum over the block's words, of which a thread has sums[j] of word
// threadIdx.x + j blockDim.x. Neighbouring 32 words are added first, so that the bits do not depend on
// how many words a thread has. `part` has 64 entries, used for one sum only.
template <int kWords> __device__ __forceinline__ float block_sum(const float (&sums)[kWords], float* part) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll
    for (int j = 0; j < kWords; j++) {
        const float v = warp_sum(sums[j]);
        if (lane == 0) part[(threadIdx.x >> 5) + j * warps] = v;
    }
#ifndef BATON_PLANT_NORM_BARRIER
    __syncthreads();
#endif
    float v = lane < kWords * warps ? part[lane] : 0.0f;
    if (kWords > 1) v += lane + 32 < kWords * warps ? part[lane + 32] : 0.0f;
    return warp_sum(v);
}

__device__ __forceinline__ void store8(uint4* out, long long word, const float* f) {
    out[word] = pack8(f);
}
__device__ __forceinline__ void store8(float4* out, long long word, const float* f) {
    out[2 * word] = make_float4(f[0], f[1], f[2], f[3]);
    out[2 * word + 1] = make_float4(f[4], f[5], f[6], f[7]);
}

// One block per row, with the row's words in registers. With a residual, the row is the sum of both,
// rounded to bf16, and also replaces the residual. With kCentre (LayerNorm) the row's mean is
// subtracted before the sum of squares, and `bias` is added at the end. With kModulated the weight is
// what is added to one.
template <bool kAdd, bool kCentre, bool kModulated = false, int kWords = 2, class Out>
__device__ __forceinline__ void norm_row(const uint4* __restrict__ x, uint4* __restrict__ residual,
                                         const uint4* __restrict__ weight,
                                         const uint4* __restrict__ bias, Out* __restrict__ out,
                                         int words, float inverse_width, float eps) {
    __shared__ float part[64];
    const long long base = static_cast<long long>(blockIdx.x) * words;
    uint4 row[kWords], other[kWords], scales[kWords];
#pragma unroll
    for (int j = 0; j < kWords; j++) {  // load weights now too, to wait for memory only once
        const int i = threadIdx.x + j * blockDim.x;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        row[j] = i < words ? x[base + i] : zero;
        if (kAdd) other[j] = i < words ? residual[base + i] : zero;
        scales[j] = i < words ? weight[i] : zero;
    }
    float sums[kWords];
#pragma unroll
    for (int j = 0; j < kWords; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        float v[8];
        unpack8(row[j], v);
        sums[j] = 0.0f;
        if (kAdd) {
            float r[8];
            unpack8(other[j], r);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] += r[e];
            row[j] = pack8(v);
            if (i < words) residual[base + i] = row[j];
            unpack8(row[j], v);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) sums[j] = kCentre ? sums[j] + v[e] : fmaf(v[e], v[e], sums[j]);
    }
    float mean = 0.0f;
    if (kCentre) {
        __shared__ float means[64];
        mean = block_sum<kWords>(sums, means) * inverse_width;
#pragma unroll
        for (int j = 0; j < kWords; j++) {
            sums[j] = 0.0f;
#ifndef BATON_PLANT_VARIANCE
            if (threadIdx.x + j * blockDim.x >= words) continue;  // zeros outside the row are not centred
#endif
            float v[8];
            unpack8(row[j], v);
#pragma unroll
            for (int e = 0; e < 8; e++) sums[j] = fmaf(v[e] - mean, v[e] - mean, sums[j]);
        }
    }
    const float scale = rsqrtf(block_sum<kWords>(sums, part) * inverse_width + eps);
#pragma unroll
    for (int j = 0; j < kWords; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= words) break;
        float v[8], w[8];
        unpack8(row[j], v);
        unpack8(scales[j], w);
        if (kModulated) {
#pragma unroll
            for (int e = 0; e < 8; e++) w[e] += 1.0f;
        }
        if (kCentre) {
            float shift[8];
            unpack8(bias[i], shift);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = fmaf((v[e] - mean) * scale, w[e], shift[e]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = v[e] * scale * w[e];
        }
        store8(out, base + i, v);
    }
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

enum Activation { kSilu, kGelu, kGeluTanh, kQuickGelu, kTanh };

template <int kKind> __device__ __forceinline__ float activated(float x) {
    // erfc keeps the relative accuracy of small results, which 1 + erf loses.
    if (kKind == kGelu) return 0.5f * x * erfcf(x * -0.70710678f);
    if (kKind == kTanh) return tanhf(x);
    // x (1 + tanh(u)) / 2 = x sigmoid(2 u)
    float inner = x;
    if (kKind == kGeluTanh) inner = 1.5957691f * fmaf(0.044715f * x * x, x, x);
    if (kKind == kQuickGelu) inner = 1.702f * x;
    return __fdividef(x, 1.0f + __expf(-inner));
}

// Each thread reads its word before it writes it, so `out` may be `x`.
template <int kKind> __device__ __forceinline__ void activate(const uint4* x, uint4* out, int words) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    float v[8];
    unpack8(x[i], v);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = activated<kKind>(v[e]);
    out[i] = pack8(v);
}

// out[rows[i]] = x[i], or their rounded sum; rows outside `out` are left out. A block has 512 words.
template <bool kAdd>
__device__ __forceinline__ void put_row(const uint4* __restrict__ x, const int* __restrict__ rows,
                                        uint4* __restrict__ out, int words, int count) {
    const int row = rows[blockIdx.x], start = blockIdx.y * 512 + threadIdx.x;
    if (static_cast<unsigned>(row) >= static_cast<unsigned>(count)) return;
    const uint4* from = x + static_cast<long long>(blockIdx.x) * words;
#ifdef BATON_PLANT_PUT
    uint4* to = out + static_cast<long long>(blockIdx.x) * words;
#else
    uint4* to = out + static_cast<long long>(row) * words;
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int i = start + j * 128;
        if (i >= words) break;
        uint4 word = from[i];
        if (kAdd) {
            float a[8], b[8];
            unpack8(word, a);
            unpack8(to[i], b);
#pragma unroll
            for (int e = 0; e < 8; e++) a[e] += b[e];
            word = pack8(a);
        }
        to[i] = word;
    }
}

struct Heads {  // of one row of qkv: queries, then keys, then values
    int queries, keys;
};
struct Pool {
    int block_size, slots;
};

// Hadamard transform of a head of which each of kLanes neighbouring threads holds two parts of 8 values, in
// the order of `spread` in engine/kernels/kv_rows.py. Lanes that do not `take` the result keep theirs.
template <int kLanes>
__device__ __forceinline__ void spread(float (&a)[8], float (&b)[8], int part, bool take) {
    float x[8], y[8];
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = a[e] + b[e], y[e] = a[e] - b[e];
#pragma unroll
    for (int lanes = kLanes / 2; lanes; lanes >>= 1) {
        const bool second = part & lanes;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float p = __shfl_xor_sync(0xffffffffu, x[e], lanes);
            const float q = __shfl_xor_sync(0xffffffffu, y[e], lanes);
            x[e] = second ? p - x[e] : x[e] + p;
            y[e] = second ? q - y[e] : y[e] + q;
        }
    }
#pragma unroll
    for (int span = 4; span; span >>= 1)
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (e & span) continue;
            const float p = x[e], q = y[e];
            x[e] = p + x[e + span], x[e + span] = p - x[e + span];
            y[e] = q + y[e + span], y[e + span] = q - y[e + span];
        }
    // 1 / sqrt(16 kLanes) as the nearest float
    constexpr float kScale = kLanes == 2 ? 0.17677669f : kLanes == 4 ? 0.125f : 0.088388346f;
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (take) a[e] = __fmul_rn(x[e], kScale), b[e] = __fmul_rn(y[e], kScale);
}

// Eight codes of each half of a row, in the order of the pool: neighbouring lanes share 16 dims.
__device__ __forceinline__ uint2 in_pool_order(uint2 codes, int part) {
    const bool odd = part & 1;
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? codes.x : codes.y, 1);
    const unsigned low = odd ? got : codes.x, high = odd ? codes.y : got;
    return make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

// Writes a row of an int8 pool; `row` counts all rows of the layer. Whole warps.
template <int kLanes>
__device__ __forceinline__ void store_row(unsigned char* kv, long long row, const float (&a)[8],
                                          const float (&b)[8], int part, bool wanted) {
    constexpr int D = 16 * kLanes;
    unsigned top = 0;
#pragma unroll
    for (int e = 0; e < 8; e++)
        top = max(top, max(__float_as_uint(a[e]) & 0x7fffffffu, __float_as_uint(b[e]) & 0x7fffffffu));
#pragma unroll
    for (int lanes = kLanes / 2; lanes; lanes >>= 1)
        top = max(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    const unsigned magnitude = magnitude_of(top);
    const bool finite = magnitude != 0x7fffu;
    const float inverse =
        magnitude && finite ? __fdiv_rn(kCodes, __uint_as_float(magnitude << 16)) : 0.0f;
    uint2 codes[2] = {make_uint2(four_codes(a, inverse), four_codes(a + 4, inverse)),
                      make_uint2(four_codes(b, inverse), four_codes(b + 4, inverse))};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!finite) codes[i] = make_uint2(0x81818181u, 0x81818181u);
        codes[i] = in_pool_order(codes[i], part);
    }
    if (!wanted) return;
    const int token = static_cast<int>(row % kCodeGroup);
    unsigned char* group = kv + (row - token) * (D + 2);
    uint2* to = reinterpret_cast<uint2*>(group + token * D) + part;
    to[0] = codes[0], to[kLanes] = codes[1];
#ifdef BATON_PLANT_NEIGHBOUR
    const int place = token ^ 1;
#else
    const int place = token;
#endif
    if (part == 0)
        reinterpret_cast<bf16*>(group + kCodeGroup * D)[place] = static_cast<bf16>(magnitude);
}

// kLanes threads per head: each holds 8 values of the first half and their partners of the second.
// A norm needs heads whose lanes are a power of two, as partners of the shuffles. With kInt8 the pool has
// rows of codes (int8_rows.cuh), and queries and keys are transformed before they are rounded.
template <int kLanes, bool kInt8 = false>
__device__ __forceinline__ void rope_append(const uint4* __restrict__ qkv,
                                            const int* __restrict__ positions,
                                            const long long* __restrict__ slots,
                                            const float4* __restrict__ cos_sin, int max_position,
                                            const uint4* __restrict__ q_norm,
                                            const uint4* __restrict__ k_norm, float eps,
                                            uint4* __restrict__ kv, uint4* __restrict__ q_out,
                                            int rows, Heads h, Pool pool) {
    const int heads = h.queries + 2 * h.keys;
    constexpr bool kHasNorm = (kLanes & (kLanes - 1)) == 0;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const int item = thread / kLanes, part = thread % kLanes;
    const bool live = item < rows * heads;  // all lanes take part in the sums
    const int row = live ? item / heads : 0, head = live ? item % heads : 0;
    const bool is_query = head < h.queries, is_value = head >= h.queries + h.keys;

    const uint4* in = qkv + (static_cast<long long>(row) * heads + head) * (2 * kLanes) + part;
    const uint4 words[2] = {in[0], in[kLanes]};
    float a[8], b[8];
    unpack8(words[0], a);
    unpack8(words[1], b);

    const uint4* weight = is_query ? q_norm : k_norm;
    float sum = 0.0f;
    if (kHasNorm) {
#pragma unroll
        for (int e = 0; e < 8; e++) sum = fmaf(a[e], a[e], fmaf(b[e], b[e], sum));
#pragma unroll
        for (int lanes = kLanes / 2; lanes; lanes >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (!kInt8 && !live) return;

    uint4 first = words[0], second = words[1];
    if (!is_value) {
        if (kHasNorm && weight) {
            const float scale = rsqrtf(sum * (1.0f / (16 * kLanes)) + eps);
            float wa[8], wb[8];
            unpack8(weight[part], wa);
            unpack8(weight[part + kLanes], wb);
#pragma unroll
            for (int e = 0; e < 8; e++) a[e] *= scale * wa[e], b[e] *= scale * wb[e];
        }
        // A position outside the table would give an address outside the table.
        const int position = min(max(positions[row], 0), max_position - 1);
        const float4* angle = cos_sin + static_cast<long long>(position) * (4 * kLanes) + part * 2;
        const float4 c[2] = {angle[0], angle[1]};
        const float4 s[2] = {angle[2 * kLanes], angle[2 * kLanes + 1]};
        const float* cosine = &c[0].x;
        const float* sine = &s[0].x;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float x = a[e], y = b[e];
            a[e] = fmaf(x, cosine[e], -y * sine[e]);
            b[e] = fmaf(y, cosine[e], x * sine[e]);
        }
        if (!kInt8) first = pack8(a), second = pack8(b);
    }

    // Keys and values are adjacent: [2, keys] is addressed as [2 keys].
    const long long slot = is_query ? -1 : slots[row];
    const bool kept = slot >= 0 && slot < pool.slots;
    const unsigned block = static_cast<unsigned>(kept ? slot : 0) / pool.block_size;
#ifdef BATON_PLANT_SLOT
    const unsigned offset = static_cast<unsigned>(kept ? slot : 0) % pool.block_size ^ 1u;
#else
    const unsigned offset = static_cast<unsigned>(kept ? slot : 0) % pool.block_size;
#endif
    const long long plane = static_cast<long long>(block) * (2 * h.keys) + (head - h.queries);
    const long long pool_row = plane * pool.block_size + offset;
    if (kInt8) {
#ifdef BATON_PLANT_HADAMARD
        spread<kLanes>(a, b, part, !is_value && !is_query);
#else
        spread<kLanes>(a, b, part, !is_value);
#endif
        store_row<kLanes>(reinterpret_cast<unsigned char*>(kv), pool_row, a, b, part, live && kept);
        if (!live || !is_query) return;
        first = pack8(a), second = pack8(b);
    }
    uint4* to;
    if (is_query) {
        to = q_out + (static_cast<long long>(row) * h.queries + head) * (2 * kLanes) + part;
    } else {
        if (!kept) return;
        to = kv + pool_row * (2 * kLanes) + part;
    }
    to[0] = first;
    to[kLanes] = second;
}

template <int D>
__device__ __forceinline__ void widen_block(const unsigned char* __restrict__ kv,
                                            const int* __restrict__ tables,
                                            const int* __restrict__ entries,
                                            uint4* __restrict__ out, int pieces) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pieces) return;
    const int row = i / (D / 16), piece = i % (D / 16), token = row % kCodeGroup;
    const long long block = tables[entries[blockIdx.y]];
    const long long rows = pieces / (D / 16);
    const unsigned char* group = kv + (block * rows + row - token) * (D + 2);
    const uint4 codes = reinterpret_cast<const uint4*>(group + token * D)[piece];
    const bf16 magnitude = reinterpret_cast<const bf16*>(group + kCodeGroup * D)[token];
    const Step step = step_of(static_cast<unsigned>(magnitude) << 16);
    uint4* to = out + (blockIdx.y * rows + row) * (D / 8) + piece * 2;
    to[0] = make_uint4(two_values<0, 1>(codes.x, step, step), two_values<0, 1>(codes.y, step, step),
                       two_values<0, 1>(codes.z, step, step), two_values<0, 1>(codes.w, step, step));
    to[1] = make_uint4(two_values<2, 3>(codes.x, step, step), two_values<2, 3>(codes.y, step, step),
                       two_values<2, 3>(codes.z, step, step), two_values<2, 3>(codes.w, step, step));
}

}  // namespace

// out[t] = table[ids[t]]; an id outside the table gives a row of zeros. A block copies 512 words.
extern "C" __global__ void __launch_bounds__(128)
    embed(const int* __restrict__ ids, const uint4* __restrict__ table, uint4* __restrict__ out,
          int words, int vocabulary) {
    begin_after_previous();
    const int id = ids[blockIdx.x], start = blockIdx.y * 512 + threadIdx.x;
    const bool known = static_cast<unsigned>(id) < static_cast<unsigned>(vocabulary);
    const uint4* from = table + static_cast<long long>(known ? id : 0) * words;
    uint4 kept[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int i = start + j * 128;
        kept[j] = known && i < words ? from[i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int i = start + j * 128;
        if (i < words) out[static_cast<long long>(blockIdx.x) * words + i] = kept[j];
    }
}

extern "C" __global__ void __launch_bounds__(128)
    put_rows(const uint4* __restrict__ x, const int* __restrict__ rows, uint4* __restrict__ out,
             int words, int count) {
    begin_after_previous();
    put_row<false>(x, rows, out, words, count);
}
extern "C" __global__ void __launch_bounds__(128)
    put_rows_add(const uint4* __restrict__ x, const int* __restrict__ rows, uint4* __restrict__ out,
                 int words, int count) {
    begin_after_previous();
    put_row<true>(x, rows, out, words, count);
}

#define BATON_RMS_NORM(words_each, suffix, Out)                                                    \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        rms_norm##suffix(const uint4* __restrict__ x, const uint4* __restrict__ weight,            \
                         Out* __restrict__ out, int words, float inverse_width, float eps) {       \
        begin_after_previous();                                                                    \
        norm_row<false, false, false, words_each>(x, static_cast<uint4*>(nullptr), weight,         \
                                                  nullptr, out, words, inverse_width, eps);        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        add_rms_norm##suffix(const uint4* __restrict__ x, uint4* __restrict__ residual,            \
                             const uint4* __restrict__ weight, Out* __restrict__ out, int words,   \
                             float inverse_width, float eps) {                                     \
        begin_after_previous();                                                                    \
        norm_row<true, false, false, words_each>(x, residual, weight, nullptr, out, words,         \
                                                 inverse_width, eps);                              \
    }
BATON_RMS_NORM(2, , uint4)
BATON_RMS_NORM(2, _f32, float4)
// With a word per thread: twice the threads for a row, with the same bits.
BATON_RMS_NORM(1, _one, uint4)

extern "C" __global__ void __launch_bounds__(1024)
    layer_norm(const uint4* __restrict__ x, const uint4* __restrict__ weight,
               const uint4* __restrict__ bias, uint4* __restrict__ out, int words,
               float inverse_width, float eps) {
    begin_after_previous();
    norm_row<false, true>(x, static_cast<uint4*>(nullptr), weight, bias, out, words, inverse_width,
                          eps);
}
// layer_norm with 1 + scale as its weight and the shift as its bias.
extern "C" __global__ void __launch_bounds__(1024)
    modulated_norm(const uint4* __restrict__ x, const uint4* __restrict__ scale,
                   const uint4* __restrict__ shift, uint4* __restrict__ out, int words,
                   float inverse_width, float eps) {
    begin_after_previous();
    norm_row<false, true, true>(x, static_cast<uint4*>(nullptr), scale, shift, out, words,
                                inverse_width, eps);
}
extern "C" __global__ void __launch_bounds__(1024)
    add_layer_norm(const uint4* __restrict__ x, uint4* __restrict__ residual,
                   const uint4* __restrict__ weight, const uint4* __restrict__ bias,
                   uint4* __restrict__ out, int words, float inverse_width, float eps) {
    begin_after_previous();
    norm_row<true, true>(x, residual, weight, bias, out, words, inverse_width, eps);
}

#define BATON_ROPE_APPEND(dim, suffix, is_int8)                                                    \
    extern "C" __global__ void __launch_bounds__(128, 8) qk_norm_rope_append##suffix##_##dim(      \
        const uint4* __restrict__ qkv, const int* __restrict__ positions,                          \
        const long long* __restrict__ slots, const float4* __restrict__ cos_sin, int max_position, \
        const uint4* __restrict__ q_norm, const uint4* __restrict__ k_norm, float eps,             \
        uint4* __restrict__ kv, uint4* __restrict__ q_out, int rows, int queries, int keys,        \
        int block_size, int pool_slots) {                                                          \
        begin_after_previous();                                                                    \
        rope_append<dim / 16, is_int8>(qkv, positions, slots, cos_sin, max_position, q_norm,       \
                                       k_norm, eps, kv, q_out, rows, Heads{queries, keys},         \
                                       Pool{block_size, pool_slots});                              \
    }
BATON_ROPE_APPEND(16, , false)
BATON_ROPE_APPEND(32, , false)
BATON_ROPE_APPEND(64, , false)
BATON_ROPE_APPEND(80, , false)
BATON_ROPE_APPEND(128, , false)
BATON_ROPE_APPEND(256, , false)
BATON_ROPE_APPEND(32, _int8, true)
BATON_ROPE_APPEND(64, _int8, true)
BATON_ROPE_APPEND(128, _int8, true)

// Blocks of an int8 pool's layer as bf16: block i of `out` [n, 2, Hk, BS, D] gets block tables[entries[i]].
// A thread takes 16 codes; a grid of any width takes the `pieces` of a block.
#define BATON_WIDEN_KV(D)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) widen_kv_##D(                                \
        const unsigned char* __restrict__ kv, const int* __restrict__ tables,                      \
        const int* __restrict__ entries, uint4* __restrict__ out, int pieces) {                    \
        begin_after_previous();                                                                    \
        widen_block<D>(kv, tables, entries, out, pieces);                                          \
    }
BATON_WIDEN_KV(32)
BATON_WIDEN_KV(64)
BATON_WIDEN_KV(128)

// out[t][i] = silu(gate_up[t][i]) * gate_up[t][width + i], with `words` words per row.
extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const uint4* __restrict__ gate_up, uint4* __restrict__ out, int words, int rows) {
    begin_after_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        const uint4* gate = gate_up + static_cast<long long>(row) * 2 * words + i;
        const uint4 both[2] = {gate[0], gate[words]};
        float g[8], u[8];
        unpack8(both[0], g);
        unpack8(both[1], u);
#pragma unroll
        for (int e = 0; e < 8; e++) g[e] = silu(g[e]) * u[e];
        out[static_cast<long long>(row) * words + i] = pack8(g);
    }
}

#define BATON_ACTIVATE(name, kind)                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        activate_##name(const uint4* x, uint4* out, int words) {                                   \
        begin_after_previous();                                                                    \
        activate<kind>(x, out, words);                                                             \
    }
BATON_ACTIVATE(silu, kSilu)
BATON_ACTIVATE(gelu, kGelu)
BATON_ACTIVATE(gelu_tanh, kGeluTanh)
BATON_ACTIVATE(quick_gelu, kQuickGelu)
BATON_ACTIVATE(tanh, kTanh)
