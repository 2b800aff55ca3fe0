// Kernels that process rows: embedding, rows put in place, norms, rotary embedding with the append to
// the KV pool, activations.
//
// Rows are bf16 in memory and read once, 16 bytes (a word of 8 values) per load. Sums are float32 in a
// fixed order that depends only on the width: a row has the same bits whatever else is in the batch.
#include "device.cuh"

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

// kLanes threads per head: each holds 8 values of the first half and their partners of the second.
// A norm needs heads whose lanes are a power of two, as partners of the shuffles.
template <int kLanes>
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
    if (!live) return;

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
        float x[8], y[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            x[e] = fmaf(a[e], cosine[e], -b[e] * sine[e]);
            y[e] = fmaf(b[e], cosine[e], a[e] * sine[e]);
        }
        first = pack8(x), second = pack8(y);
    }

    uint4* to;
    if (is_query) {
        to = q_out + (static_cast<long long>(row) * h.queries + head) * (2 * kLanes) + part;
    } else {
        const long long slot = slots[row];
        if (slot < 0 || slot >= pool.slots) return;
        const unsigned block = static_cast<unsigned>(slot) / pool.block_size;
#ifdef BATON_PLANT_SLOT
        const unsigned offset = static_cast<unsigned>(slot) % pool.block_size ^ 1u;
#else
        const unsigned offset = static_cast<unsigned>(slot) % pool.block_size;
#endif
        // Keys and values are adjacent: [2, keys] is addressed as [2 keys].
        const long long plane = static_cast<long long>(block) * (2 * h.keys) + (head - h.queries);
        to = kv + (plane * pool.block_size + offset) * (2 * kLanes) + part;
    }
    to[0] = first;
    to[kLanes] = second;
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

#define BATON_ROPE_APPEND(dim)                                                                     \
    extern "C" __global__ void __launch_bounds__(128, 8) qk_norm_rope_append_##dim(                \
        const uint4* __restrict__ qkv, const int* __restrict__ positions,                          \
        const long long* __restrict__ slots, const float4* __restrict__ cos_sin, int max_position, \
        const uint4* __restrict__ q_norm, const uint4* __restrict__ k_norm, float eps,             \
        uint4* __restrict__ kv, uint4* __restrict__ q_out, int rows, int queries, int keys,        \
        int block_size, int pool_slots) {                                                          \
        begin_after_previous();                                                                    \
        rope_append<dim / 16>(qkv, positions, slots, cos_sin, max_position, q_norm, k_norm, eps,   \
                              kv, q_out, rows, Heads{queries, keys}, Pool{block_size, pool_slots});\
    }
BATON_ROPE_APPEND(16)
BATON_ROPE_APPEND(32)
BATON_ROPE_APPEND(64)
BATON_ROPE_APPEND(80)
BATON_ROPE_APPEND(128)
BATON_ROPE_APPEND(256)

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
