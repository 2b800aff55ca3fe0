/* The kernels for AVX-512 (Skylake-X, Zen 4 and later). */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")
#endif

#include "lanes_avx512.h"

#define TABLE kernels_avx512
#define TABLE_NAME "avx512"
#include "body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
