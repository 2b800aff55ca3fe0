// Prefill attention by wgmma, with tiles that threads copy (sm_90a).
#include "prefill_wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(BATON_CUDA_HOST)

#define KERNEL(D)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill_wgmma_d##D(                  \
        const bf16* __restrict__ q, const bf16* __restrict__ kv_layer,                             \
        const int* __restrict__ tables, const int* __restrict__ positions,                         \
        const Job* __restrict__ plan, bf16* __restrict__ out, int table_width, int kv_heads,       \
        int group, int block_size, int window, float scale_log2, int items) {                      \
        prefill_attention<D, false>({q, kv_layer, tables, positions, plan, out, table_width,       \
                                     kv_heads, group, block_size, window, scale_log2, items},      \
                                    nullptr);                                                      \
    }

KERNEL(64)
KERNEL(128)

#endif
