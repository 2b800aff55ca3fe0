/* Quantized products with the integer dot products of AVX (AVX-VNNI), on processors without AVX-512. */
#include "quantized.h"

#ifdef HAVE_VNNI256
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#define DPBUSD _mm256_dpbusd_avx_epi32
#include "lanes_int256.h"

#define TABLE products_vnni256
#define TABLE_NAME "vnni256"
#include "quantized_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
