/* The kernels for AVX2 with FMA (Haswell, Zen and later). */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,bmi2")
#endif

#include "lanes_avx2.h"

#define TABLE kernels_avx2
#define TABLE_NAME "avx2"
#include "body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
