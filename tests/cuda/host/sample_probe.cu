// Parts of the sampler by themselves, for tests.
#include "sample_select.cuh"

extern "C" __global__ void weigh(const float* below, float temperature, float* scores, float* weights,
                                 int n) {
    const Temperature t(temperature);
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        scores[i] = t.divide(below[i]), weights[i] = exp_weight(scores[i]);
}

extern "C" __global__ void random_numbers(const unsigned long long* seeds, const long long* positions,
                                          double* out) {
    out[threadIdx.x] = uniform(seeds[threadIdx.x], positions[threadIdx.x]);
}

// For each threshold: the first index beyond it, then the chain of additions before that index.
extern "C" __global__ void running_sums(const double* values, int n, const double* before,
                                        const double* thresholds, int count, int reach, int* at,
                                        double* until, double* total) {
    for (int i = 0; i < count; i++) {
        double sum;
        const RunningSums<double> running(values, n);
        const int found = running.first_beyond(*before, thresholds[i], reach != 0, sum);
        if (threadIdx.x == 0) at[i] = found, until[i] = sum;
    }
    const double end = RunningSums<double>(values, n).total();
    if (threadIdx.x == 0) *total = end;
}

// Sums of the blocks of 128 of weights[0 .. n-1], each by a warp; by four blocks at once if `four`.
extern "C" __global__ void block_sums(const float* weights, int n, int four, double* sums) {
    __shared__ __align__(16) float held[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) held[i] = i < n ? weights[i] : 0.0f;
    __syncthreads();
    if (!four) return sum_blocks<kWarps>(held, n, sums);
    for (int first = warp_id() * 4; first * kSumBlock < n; first += kWarps * 4) {
        const float4* at = reinterpret_cast<const float4*>(held) + first * 32 + lane_id();
        const float4 w[4] = {at[0], at[32], at[64], at[96]};
        const double sum = block_sums<4>(w);
        const int block = first + lane_id() / 8;
        if (lane_id() % 8 == 0 && block * kSumBlock < n) sums[block] = sum;
    }
}
