// Kernels of audio decoders: codebook entries, dense and depthwise convolutions, snake, tanh.
//
// All values are float32; rows are instants, columns channels, and a word is 4 channels. Every sum has
// an order that depends neither on the number of rows nor on a row's place in its block, so a row has
// the same bits in every window of the audio. cuBLAS chooses the order of its sums by the shape.
#include "device.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;          // rows and columns of a block's output
constexpr int kDepth = 16;         // columns of x of one step
constexpr int kPitch = kTile + 4;  // of transposed rows: aligned to words, fewer bank conflicts

__device__ __forceinline__ float4 zero_word() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

__device__ __forceinline__ float4 fma_word(float4 a, float4 b, float4 c) {
    return make_float4(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z),
                       __fmaf_rn(a.w, b.w, c.w));
}
__device__ __forceinline__ float4 fma_word(float a, float4 b, float4 c) {
    return fma_word(make_float4(a, a, a, a), b, c);
}
__device__ __forceinline__ float4 add_word(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
}

// sin(x)^2 to 2e-7 for |x| < 1e5. Its period is pi: x is reduced by whole multiples in three parts.
// sinf would be as accurate, but reduces large arguments in local memory.
__device__ __forceinline__ float sin_squared(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23 rounds to a whole number
    const float n = __fsub_rn(__fmaf_rn(x, 0.318309886f, magic), magic);
    float r = __fmaf_rn(n, -3.140625f, x);
    r = __fmaf_rn(n, -9.67502593994e-4f, r);
    r = __fmaf_rn(n, -1.50995799098e-7f, r);
    const float square = __fmul_rn(r, r);
    float p = __fmaf_rn(-2.38893847e-08f, square, 2.75252819e-06f);
    p = __fmaf_rn(p, square, -0.000198408612f);
    p = __fmaf_rn(p, square, 0.00833333097f);
    p = __fmaf_rn(p, square, -0.166666672f);
    p = __fmaf_rn(p, square, 1.0f);
    const float sine = __fmul_rn(r, p);
    return __fmul_rn(sine, sine);
}

// x + sin(alpha * x)^2 * inverse
__device__ __forceinline__ float snake_of(float x, float alpha, float inverse) {
    return __fmaf_rn(inverse, sin_squared(__fmul_rn(alpha, x)), x);
}
__device__ __forceinline__ float4 snake_of(float4 v, float4 alpha, float4 inverse) {
    return make_float4(snake_of(v.x, alpha.x, inverse.x), snake_of(v.y, alpha.y, inverse.y),
                       snake_of(v.z, alpha.z, inverse.z), snake_of(v.w, alpha.w, inverse.w));
}

}  // namespace

// out[t] = table[ids[t / stride]] w + bias, plus out[t] if `add`, of `width` words. table[V][dim],
// w[dim][width].
extern "C" __global__ void __launch_bounds__(kThreads)
    look_up(const int* __restrict__ ids, const float* __restrict__ table,
            const float4* __restrict__ w, const float4* __restrict__ bias, float4* __restrict__ out,
            int count, int width, int dim, int stride, int add) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const int word = i % width;
    const float* vector = table + static_cast<long long>(ids[i / width / stride]) * dim;
    float4 sum = zero_word();
    for (int d = 0; d < dim; d++) sum = fma_word(vector[d], w[d * width + word], sum);
    if (bias) sum = add_word(sum, bias[word]);
    if (add) sum = add_word(out[i], sum);
    out[i] = sum;
}

// out[t] = x[t * pitch ...] w + bias for `rows` rows of `depth` words each, w[4 depth][width]. With a
// pitch below the depth, rows overlap: a convolution. All sizes but `rows` are in words. Each block
// computes a tile of out, each thread 4 rows and 4 columns of it; the columns of x are added in order.
extern "C" __global__ void __launch_bounds__(kThreads)
    product(const float4* __restrict__ x, const float4* __restrict__ w,
            const float4* __restrict__ bias, float4* __restrict__ out, int rows, int width,
            int depth, int pitch) {
    __shared__ __align__(16) float xs[2][kDepth][kPitch];
    __shared__ float4 ws[2][kDepth][kTile / 4];
    const int tid = threadIdx.x, lane = tid % 16, group = tid / 16;
    const int first = blockIdx.x * kTile, column = blockIdx.y * (kTile / 4) + lane;
    const int row = first + tid / 4, part = tid % 4;
    const float4* own = x + static_cast<long long>(row) * pitch;
    const auto load_x = [&](int word) {
        if (row >= rows || word >= depth) return zero_word();
#ifdef BATON_PLANT_TAP
        return own[word >= pitch ? word - pitch : word];
#else
        return own[word];
#endif
    };
    const auto load_w = [&](int line) {
        if (line >= 4 * depth || column >= width) return zero_word();
        return w[static_cast<long long>(line) * width + column];
    };
    float4 next_x = load_x(part), next_w = load_w(group);
    float4 sums[4] = {zero_word(), zero_word(), zero_word(), zero_word()};
    const int steps = (4 * depth + kDepth - 1) / kDepth;
    for (int step = 0; step < steps; step++) {
        // Two tiles in turn: all threads have left a tile when the next but one is written.
        const int turn = step & 1;
        xs[turn][4 * part][tid / 4] = next_x.x;
        xs[turn][4 * part + 1][tid / 4] = next_x.y;
        xs[turn][4 * part + 2][tid / 4] = next_x.z;
        xs[turn][4 * part + 3][tid / 4] = next_x.w;
        ws[turn][group][lane] = next_w;
#ifndef BATON_PLANT_PRODUCT_BARRIER
        __syncthreads();
#endif
        next_x = load_x((step + 1) * (kDepth / 4) + part);
        next_w = load_w((step + 1) * kDepth + group);
#pragma unroll
        for (int k = 0; k < kDepth; k++) {
            const float4 a = *reinterpret_cast<const float4*>(&xs[turn][k][4 * group]);
            const float4 b = ws[turn][k][lane];
            sums[0] = fma_word(a.x, b, sums[0]);
            sums[1] = fma_word(a.y, b, sums[1]);
            sums[2] = fma_word(a.z, b, sums[2]);
            sums[3] = fma_word(a.w, b, sums[3]);
        }
    }
    if (column >= width) return;
    const float4 shift = bias ? bias[column] : zero_word();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int t = first + 4 * group + i;
        if (t < rows) out[static_cast<long long>(t) * width + column] = add_word(sums[i], shift);
    }
}

// The product with one column of weights: a thread per row.
extern "C" __global__ void __launch_bounds__(kThreads)
    narrow_product(const float4* __restrict__ x, const float4* __restrict__ w,
                   const float* __restrict__ bias, float* __restrict__ out, int rows, int depth,
                   int pitch) {
    const int row = blockIdx.x * kThreads + threadIdx.x;
    if (row >= rows) return;
    const float4* own = x + static_cast<long long>(row) * pitch;
    float sum = 0.0f;
    for (int word = 0; word < depth; word++) {
        const float4 a = own[word], b = w[word];
        sum = __fmaf_rn(a.x, b.x, sum);
        sum = __fmaf_rn(a.y, b.y, sum);
        sum = __fmaf_rn(a.z, b.z, sum);
        sum = __fmaf_rn(a.w, b.w, sum);
    }
    out[row] = bias ? __fadd_rn(sum, bias[0]) : sum;
}

// out[first + t] = snake(x[t]) for `rows` rows, zeros in the other rows of out; `count` words of out.
// With a residual, residual += x first, and the activation is that of the new residual. out may be x
// if `first` is 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    snake(const float4* x, float4* __restrict__ residual, const float4* __restrict__ scales,
          float4* out, int count, int width, int first, int rows) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const int row = i / width - first, word = i % width;
    if (row < 0 || row >= rows) {
#ifndef BATON_PLANT_MARGIN
        out[i] = zero_word();
#endif
        return;
    }
    const int at = row * width + word;
    float4 v = x[at];
    if (residual) {
        v = add_word(residual[at], v);
        residual[at] = v;
    }
    out[i] = snake_of(v, scales[word], scales[width + word]);
}

// out[t] = bias + the sum over j of x[t + (j - taps / 2) * dilation] * weight[j], of each column by
// itself, with zeros outside x; then snake if there are scales.
extern "C" __global__ void __launch_bounds__(kThreads)
    depthwise(const float4* __restrict__ x, const float4* __restrict__ weight,
              const float4* __restrict__ bias, const float4* __restrict__ scales,
              float4* __restrict__ out, int count, int width, int rows, int taps, int dilation) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const int word = i % width;
#ifdef BATON_PLANT_DILATION
    dilation = 1;
#endif
    int row = i / width - taps / 2 * dilation;
    float4 sum = bias[word];
    for (int tap = 0; tap < taps; tap++, row += dilation)
        if (row >= 0 && row < rows)
            sum = fma_word(x[row * width + word], weight[tap * width + word], sum);
    if (scales) sum = snake_of(sum, scales[word], scales[width + word]);
    out[i] = sum;
}

// tanh(x) = 1 - 2 / (e^2x + 1)
extern "C" __global__ void __launch_bounds__(kThreads)
    soft_clip(const float* __restrict__ x, float* __restrict__ out, int count) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < count)
        out[i] = __fsub_rn(1.0f, __fdividef(2.0f, __fadd_rn(expf(__fmul_rn(2.0f, x[i])), 1.0f)));
}
