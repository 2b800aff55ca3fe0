// Kernels that walk rows: embedding, norms, rotary embedding with the append to the KV pool, SwiGLU.
//
// Rows are bf16 in memory, 16 bytes a load; sums are float32 in a fixed order, so that a row has the
// same bits whatever else is in the batch.
#include "device.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// out[t][i] = silu(gate_up[t][i]) * gate_up[t][width + i]; words of 8 values, `words` per row.
extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const uint4* __restrict__ gate_up, uint4* __restrict__ out, int words, long long total) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < total;
         i += step) {
        const long long row = i / words;
        const uint4* gate = gate_up + row * words + i;  // row * 2 * words + i % words
        float g[8], u[8];
        unpack8(gate[0], g);
        unpack8(gate[words], u);
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = silu(g[j]) * u[j];
        out[i] = pack8(g);
    }
}
