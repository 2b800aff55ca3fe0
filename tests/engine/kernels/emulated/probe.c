/* Single tile instructions for tests: computed ones, or those of the processor. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512bf16,amx-tile,amx-bf16,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512bf16,amx-tile,amx-bf16,amx-int8")
#endif
#include "../../../../engine/kernels/csrc/amx_tiles.h"

int permitted(void) { return may_use_tiles(); }

/* sums[tall, 16] += a[tall, bytes] times b[bytes / 4, 64]; kind as in emulated_products */
void multiply(int64_t kind, int64_t tall, int64_t bytes, const void *a, const void *b, void *sums) {
    configure(tall, bytes);
    tile_load(0, sums, TILE_BYTES);
    tile_load(4, a, bytes);
    tile_load(6, b, TILE_BYTES);
    if (kind == 0) tile_halves(0, 4, 6);
    else if (kind == 1) tile_signed(0, 4, 6);
    else tile_unsigned(0, 4, 6);
    tile_store(0, sums, TILE_BYTES);
    tile_release();
}

#ifdef TILE_INSTRUCTIONS
/* sum += a times b, all zero, after a configuration of 64 bytes, or without one */
void attempt(const void *config, int sum, int a, int b) {
    if (config) tile_configure(config);
    tile_signed(sum, a, b);
}
#endif
