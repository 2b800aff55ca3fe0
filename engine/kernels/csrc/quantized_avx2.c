/* Quantized products with AVX2. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "lanes_int256.h"

#define TABLE products_avx2
#define TABLE_NAME "avx2"
#include "quantized_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
