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
        const int found = first_beyond(values, n, *before, thresholds[i], reach != 0, sum);
        if (threadIdx.x == 0) at[i] = found, until[i] = sum;
    }
    const double end = chain_total(values, n);
    if (threadIdx.x == 0) *total = end;
}
