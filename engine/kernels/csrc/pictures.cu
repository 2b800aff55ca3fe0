// Kernels of text encoders and picture models: attention with a bias as two products and a softmax,
// group norm, patches of a convolution, elementwise steps, latents.
//
// Activations are bf16, read and written 16 bytes (a word of 8 values) at a time where their layout
// allows it. Latents and noise are float32. Sums have a fixed order, so results do not depend on the
// order of threads or blocks.
#include "device.cuh"

namespace {

constexpr int kThreads = 256;
constexpr float kLowest = -3.402823466e38f;

__device__ __forceinline__ uint4 zero_word() { return make_uint4(0, 0, 0, 0); }

// Returns the sum, or with kMax the maximum, over the block to each thread; all threads call it.
template <bool kMax> __device__ __forceinline__ float over_block(float v, float* part) {
    v = kMax ? warp_max(v) : warp_sum(v);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
#ifndef BATON_PLANT_SOFTMAX_BARRIER
    __syncthreads();
#endif
    const float rest = (threadIdx.x & 31) < kThreads / 32 ? part[threadIdx.x & 31]
                                                          : (kMax ? kLowest : 0.0f);
    return kMax ? warp_max(rest) : warp_sum(rest);
}

// Eight scaled scores with their bias; columns outside the row become -FLT_MAX.
__device__ __forceinline__ void read_scores(const float4* scores, const float* bias, int word,
                                            int columns, float scale, float* v) {
    const float4 low = scores[2 * word], high = scores[2 * word + 1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const int column = 8 * word + e;
        if (column >= columns)
            v[e] = kLowest;
        else
            v[e] = fmaf(v[e], scale, bias ? bias[column] : 0.0f);
    }
}

enum Step { kAddScaled, kMultiply };

}  // namespace

// q[H][P][D], k[H][P][D] and transposed v[H][D][P] of qkv[T][3][H][D]; P is T rounded up to 8, and rows
// from T on are zeros. `words` per head. blockIdx.y is 0 for q, 1 for k, 2 for v.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_heads(const uint4* __restrict__ qkv, uint4* __restrict__ q, uint4* __restrict__ k,
                uint4* __restrict__ v, int rows, int padded, int heads, int words) {
    const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= static_cast<long long>(padded) * heads * words) return;
    if (blockIdx.y < 2) {
        const int word = static_cast<int>(i % words);
        const int head = static_cast<int>(i / words % heads);
        const long long row = i / words / heads;
        const long long from = ((row * 3 + blockIdx.y) * heads + head) * words + word;
        uint4* to = blockIdx.y ? k : q;
        to[(static_cast<long long>(head) * padded + row) * words + word] =
            row < rows ? qkv[from] : zero_word();
        return;
    }
    // Threads of a warp read neighbouring channels of the same eight rows.
    const int channels = 8 * words;
    const int channel = static_cast<int>(i % channels);
    const int head = static_cast<int>(i / channels % heads);
    const long long group = i / channels / heads;
    const bf16* values = reinterpret_cast<const bf16*>(qkv);
    float f[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const long long row = 8 * group + e;
        const long long from = ((row * 3 + 2) * heads + head) * channels + channel;
        f[e] = row < rows ? bf16_to_float(values[from]) : 0.0f;
    }
    v[(static_cast<long long>(head) * channels + channel) * (padded / 8) + group] = pack8(f);
}

// out[T][H][D] of x[H][T][D], with `words` per head.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_heads(const uint4* __restrict__ x, uint4* __restrict__ out, int count, int rows, int heads,
                int words) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const int word = i % words, head = i / words % heads, row = i / words / heads;
    out[i] = x[(static_cast<long long>(head) * rows + row) * words + word];
}

// One block per row of scores[R][8 words]: softmax of scale * score + bias over the first `columns`,
// zeros after them. Rows of a head are `head_rows`; the bias of the next head is `head_stride` on.
extern "C" __global__ void __launch_bounds__(kThreads)
    softmax_rows(const float4* __restrict__ scores, const float* __restrict__ bias,
                 uint4* __restrict__ out, int columns, int words, float scale, int head_rows,
                 long long head_stride) {
    __shared__ float maxima[kThreads / 32], sums[kThreads / 32];
    const long long row = blockIdx.x;
    scores += row * 2 * words;
    if (bias) bias += row / head_rows * head_stride + row % head_rows * columns;
    float v[8], peak = kLowest, sum = 0.0f;
    for (int word = threadIdx.x; word < words; word += kThreads) {
        read_scores(scores, bias, word, columns, scale, v);
#pragma unroll
        for (int e = 0; e < 8; e++) peak = fmaxf(peak, v[e]);
    }
    peak = over_block<true>(peak, maxima);
    for (int word = threadIdx.x; word < words; word += kThreads) {
        read_scores(scores, bias, word, columns, scale, v);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += __expf(v[e] - peak);
    }
    const float inverse = __fdividef(1.0f, over_block<false>(sum, sums));
    for (int word = threadIdx.x; word < words; word += kThreads) {
        read_scores(scores, bias, word, columns, scale, v);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = __expf(v[e] - peak) * inverse;
        out[row * words + word] = pack8(v);
    }
}

// residual[i] += x[i] * scale[i % words], without a scale += x[i]; or residual[i] *= x[i].
template <int kStep>
__device__ __forceinline__ void step_words(const uint4* __restrict__ x,
                                           const uint4* __restrict__ scale,
                                           uint4* __restrict__ residual, int count, int words) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    float a[8], r[8], s[8];
    unpack8(x[i], a);
    unpack8(residual[i], r);
    if (kStep == kAddScaled && scale) {
#ifdef BATON_PLANT_GATE
        unpack8(scale[0], s);
#else
        unpack8(scale[i % words], s);
#endif
#pragma unroll
        for (int e = 0; e < 8; e++) r[e] = fmaf(a[e], s[e], r[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++) r[e] = kStep == kMultiply ? r[e] * a[e] : r[e] + a[e];
    }
    residual[i] = pack8(r);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_scaled(const uint4* __restrict__ x, const uint4* __restrict__ scale,
               uint4* __restrict__ residual, int count, int words) {
    step_words<kAddScaled>(x, scale, residual, count, words);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    multiply(const uint4* __restrict__ x, uint4* __restrict__ residual, int count) {
    step_words<kMultiply>(x, nullptr, residual, count, 1);
}

// Copies x[T][words] into columns of out[T][out_words], from word `first` on.
extern "C" __global__ void __launch_bounds__(kThreads)
    put_columns(const uint4* __restrict__ x, uint4* __restrict__ out, int count, int words,
                int out_words, int first) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < count) out[static_cast<long long>(i / words) * out_words + first + i % words] = x[i];
}

// Sums of each channel over the rows of a chunk, relative to the channel's first value, which keeps the
// sum of squares exact: sums[chunk][C][2]. A thread has a word of 8 channels; C is at most 2,048.
extern "C" __global__ void __launch_bounds__(kThreads)
    group_sums(const uint4* __restrict__ x, float* __restrict__ sums, int rows, int words,
               int chunk) {
    __shared__ float part[kThreads * 17];  // 17: neighbours are in different banks
    const int lanes = kThreads / words, word = threadIdx.x % words, lane = threadIdx.x / words;
    float total[8] = {}, squares[8] = {}, pivot[8], v[8];
    if (lane < lanes) {
        unpack8(x[word], pivot);
        const int end = min(rows, static_cast<int>(blockIdx.x + 1) * chunk);
        for (int row = blockIdx.x * chunk + lane; row < end; row += lanes) {
            unpack8(x[static_cast<long long>(row) * words + word], v);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const float d = v[e] - pivot[e];
                total[e] += d;
                squares[e] = fmaf(d, d, squares[e]);
            }
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            part[threadIdx.x * 17 + 2 * e] = total[e];
            part[threadIdx.x * 17 + 2 * e + 1] = squares[e];
        }
    }
#ifndef BATON_PLANT_GROUP_BARRIER
    __syncthreads();
#endif
    for (int i = threadIdx.x; i < words * 16; i += kThreads) {
        float sum = 0.0f;
        for (int l = 0; l < lanes; l++) sum += part[(l * words + i / 16) * 17 + i % 16];
        sums[static_cast<long long>(blockIdx.x) * words * 16 + i] = sum;
    }
}

// One block per group: the mean of its channels and rows, and 1 / sqrt(variance + eps), from the sums of
// all chunks. `width`: channels of a group. In double, because the means of channels are subtracted.
extern "C" __global__ void __launch_bounds__(kThreads)
    group_stats(const bf16* __restrict__ x, const float* __restrict__ sums,
                float2* __restrict__ stats, int rows, int chunks, int channels, int width,
                float eps) {
    __shared__ double part[kThreads][2];
    double means = 0.0, inner = 0.0, outer = 0.0;
    for (int c = 0; c < width; c++) {
        const int channel = blockIdx.x * width + c;
        double total = 0.0, squares = 0.0;
        for (int i = threadIdx.x; i < chunks; i += kThreads) {
            const float* sum = sums + (static_cast<long long>(i) * channels + channel) * 2;
            total += sum[0], squares += sum[1];
        }
        part[threadIdx.x][0] = total, part[threadIdx.x][1] = squares;
        for (int half = kThreads / 2; half; half >>= 1) {
            __syncthreads();
            if (threadIdx.x < half) {
                part[threadIdx.x][0] += part[threadIdx.x + half][0];
                part[threadIdx.x][1] += part[threadIdx.x + half][1];
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            total = part[0][0] / rows;
            const double mean = static_cast<double>(bf16_to_float(x[channel])) + total;
            means += mean, outer += mean * mean;
            inner += part[0][1] / rows - total * total;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        const double mean = means / width;
        const double variance = inner / width + (outer / width - mean * mean);
        stats[blockIdx.x] = make_float2(static_cast<float>(mean),
                                        rsqrtf(static_cast<float>(variance) + eps));
    }
}

// out = (x - mean) * inverse * weight + bias with the group's statistics, then silu; out may be x.
extern "C" __global__ void __launch_bounds__(kThreads)
    group_apply(const uint4* x, const float2* __restrict__ stats, const uint4* __restrict__ weight,
                const uint4* __restrict__ bias, uint4* out, int count, int words, int width,
                int silu) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const int word = i % words;
    float v[8], w[8], b[8];
    unpack8(x[i], v);
    unpack8(weight[word], w);
    unpack8(bias[word], b);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float2 stat = stats[(8 * word + e) / width];
        v[e] = fmaf((v[e] - stat.x) * stat.y, w[e], b[e]);
        if (silu) v[e] = __fdividef(v[e], 1.0f + __expf(-v[e]));
    }
    out[i] = pack8(v);
}

// Patches [count][kernel][kernel][words] of an image x[height][width][words] that is enlarged `scale`
// times, with zeros around it; the first patch belongs to the first pixel of row `top`.
extern "C" __global__ void __launch_bounds__(kThreads)
    patches(const uint4* __restrict__ x, uint4* __restrict__ out, long long count, int height,
            int width, int words, int kernel, int scale, int top) {
    const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= count) return;
    const int word = static_cast<int>(i % words);
    const int tap = static_cast<int>(i / words % (kernel * kernel));
    const int pixel = static_cast<int>(i / words / (kernel * kernel));
    const int row = top + pixel / (width * scale) + tap / kernel - kernel / 2;
    const int column = pixel % (width * scale) + tap % kernel - kernel / 2;
    uint4 found = zero_word();
#ifdef BATON_PLANT_EDGE
    if (row >= 0 && row < height * scale && column >= 0 && column < width * scale - 1)
#else
    if (row >= 0 && row < height * scale && column >= 0 && column < width * scale)
#endif
        found = x[(static_cast<long long>(row / scale) * width + column / scale) * words + word];
    out[i] = found;
}

// Three channels of each pixel, from -1..1 to 0..255; `channels` floats per pixel.
extern "C" __global__ void __launch_bounds__(kThreads)
    pixels(const float* __restrict__ image, unsigned char* __restrict__ out, int count,
           int channels) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const float v = image[static_cast<long long>(i / 3) * channels + i % 3];
    out[i] = static_cast<unsigned char>(rintf(fminf(fmaxf(v * 0.5f + 0.5f, 0.0f), 1.0f) * 255.0f));
}

// out = y + scale * (x - base), in float32; without a base y + scale * x. out may be y.
extern "C" __global__ void __launch_bounds__(kThreads)
    mix(const float* x, const float* base, const float* y, float* out, float scale, int count) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < count) out[i] = fmaf(scale, x[i] - (base ? base[i] : 0.0f), y[i]);
}

// Rounds words of 8 floats to bf16.
extern "C" __global__ void __launch_bounds__(kThreads)
    rounded(const float4* __restrict__ x, uint4* __restrict__ out, int words) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= words) return;
    const float4 low = x[2 * i], high = x[2 * i + 1];
    const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    out[i] = pack8(v);
}

// Sets the flag if any of the floats is infinite or NaN; threads that set it write the same value.
extern "C" __global__ void __launch_bounds__(kThreads)
    find_infinite(const unsigned* __restrict__ x, int* __restrict__ flag, int count) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < count && (x[i] & 0x7f800000u) == 0x7f800000u) flag[0] = 1;
}
