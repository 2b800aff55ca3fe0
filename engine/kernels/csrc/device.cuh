// Device primitives of all kernels: with hopper.cuh the only file with inline PTX and differences between targets.
//
// Floats in memory are bf16 (`bf16`, bits in an unsigned short), fp16 (unsigned short), fp8 e4m3
// (unsigned char); arithmetic is float32. Reductions use a fixed tree, so their bits do not depend
// on scheduling. NVRTC compiles these files without any header. When the sources run on the CPU
// (BATON_CUDA_HOST), the functions written in PTX are replaced by host versions.
#pragma once

#ifndef BATON_CUDA_HOST

// With BATON_DEPENDENT a kernel of a graph may begin before the one before it has ended (programmatic
// dependent launch, sm_90 and later). Every kernel that is launched so begins with this: it waits for the end
// of the kernel before and for what that wrote, and lets the next one begin. So of two kernels only the
// launch of one and the end of the other overlap.
__device__ __forceinline__ void begin_after_previous() {
#if defined(BATON_DEPENDENT) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Arrays then change while their reader already runs: no load may take the path for constants.
#ifdef BATON_DEPENDENT
#define __restrict__
#define __ldg(p) (*(p))
#endif

typedef unsigned short bf16;

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// ---------------------------------------------------------------- asynchronous copies to shared

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void cp_async16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void cp_async8(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void cp_async4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
// Copies `bytes` (0..16) and fills the rest with zeros; 0 bytes read nothing.
__device__ __forceinline__ void cp_async16_fill(void* to, const void* from, unsigned bytes) {
#ifdef BATON_PLANT_PTX_FILL
    cp_async16(to, from);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all groups of this thread except the last kKeep have arrived.
template <int kKeep> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kKeep) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---------------------------------------------------------------- tensor cores

// Lane 8 m + r gives row r (16 bytes in shared memory) of the 8x8 matrix m; lane l gets the elements
// 2 (l % 4) and the next of row l / 4, with _trans of the transposed matrix. Whole warps only.
#define BATON_LDMATRIX_1(name, form)                                                              \
    __device__ __forceinline__ void name(unsigned* r, const void* row) {                          \
        asm volatile("ldmatrix.sync.aligned.m8n8.x1" form ".shared.b16 {%0}, [%1];"               \
                     : "=r"(r[0])                                                                 \
                     : "r"(shared_address(row))                                                   \
                     : "memory");                                                                 \
    }
#define BATON_LDMATRIX_2(name, form)                                                              \
    __device__ __forceinline__ void name(unsigned* r, const void* row) {                          \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" form ".shared.b16 {%0, %1}, [%2];"           \
                     : "=r"(r[0]), "=r"(r[1])                                                     \
                     : "r"(shared_address(row))                                                   \
                     : "memory");                                                                 \
    }
#define BATON_LDMATRIX_4(name, form)                                                              \
    __device__ __forceinline__ void name(unsigned* r, const void* row) {                          \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0, %1, %2, %3}, [%4];"   \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                             \
                     : "r"(shared_address(row))                                                   \
                     : "memory");                                                                 \
    }
BATON_LDMATRIX_1(ldmatrix_x1, "")
BATON_LDMATRIX_1(ldmatrix_x1_trans, ".trans")
BATON_LDMATRIX_2(ldmatrix_x2, "")
BATON_LDMATRIX_2(ldmatrix_x2_trans, ".trans")
BATON_LDMATRIX_4(ldmatrix_x4, "")
BATON_LDMATRIX_4(ldmatrix_x4_trans, ".trans")
#undef BATON_LDMATRIX_1
#undef BATON_LDMATRIX_2
#undef BATON_LDMATRIX_4

// Transposes the 8x8 matrix of 16-bit elements; lane l holds elements 2 (l % 4) and the next of row
// l / 4, before and after. Whole warps only.
__device__ __forceinline__ unsigned transpose_8x8(unsigned pair) {
#ifdef BATON_PLANT_PTX_TRANSPOSE
    return pair;
#else
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
#endif
}

// d[16][8] += a[16][16] b[16][8], bf16 in, float32 out. With g = lane / 4, t = 2 (lane % 4): a[0] holds
// row g, columns t and t+1; a[1] row g+8; a[2], a[3] the same rows at columns t+8. b[0] holds column g,
// rows t and t+1, b[1] rows t+8. d[0], d[1] are row g, columns t and t+1; d[2], d[3] row g+8.
__device__ __forceinline__ void mma_bf16_16816(float* d, const unsigned* a, const unsigned* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---------------------------------------------------------------- fp16

__device__ __forceinline__ float half_to_float(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

#endif  // BATON_CUDA_HOST

// ---------------------------------------------------------------- bf16

__device__ __forceinline__ float bf16_to_float(bf16 bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}
// Rounds to nearest even. NaN is handled separately: rounding could turn its bits into infinity.
__device__ __forceinline__ bf16 float_to_bf16(float f) {
#if defined(__CUDA_ARCH__)
    unsigned short h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
#else
    const unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<bf16>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
#endif
}
__device__ __forceinline__ float low_bf16(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_bf16(unsigned word) {
    return __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
    unsigned word;
#ifdef BATON_PLANT_PTX_ROUND
    asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
#else
    return float_to_bf16(low) | static_cast<unsigned>(float_to_bf16(high)) << 16;
#endif
}
// Unpacks the 8 values of a 16-byte word, and packs them again.
__device__ __forceinline__ void unpack8(const uint4& word, float* f) {
    f[0] = low_bf16(word.x), f[1] = high_bf16(word.x), f[2] = low_bf16(word.y);
    f[3] = high_bf16(word.y), f[4] = low_bf16(word.z), f[5] = high_bf16(word.z);
    f[6] = low_bf16(word.w), f[7] = high_bf16(word.w);
}
__device__ __forceinline__ uint4 pack8(const float* f) {
    return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]),
                      pack_bf16(f[6], f[7]));
}

// ---------------------------------------------------------------- fp8 e4m3

__device__ __forceinline__ float fp8_to_float(unsigned char bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(bits)));
    return half_to_float(static_cast<unsigned short>(pair));
#else
    const unsigned sign = bits & 0x80u, size = bits & 0x7fu;
    if (size == 0x7fu) return __uint_as_float(0x7fffffffu);
    return half_to_float(static_cast<unsigned short>(sign << 8 | size << 7)) * 256.0f;
#endif
}

// Two codes as floats, that in the low byte first.
__device__ __forceinline__ float2 unpack_fp8(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
    return make_float2(half_to_float(static_cast<unsigned short>(halves)),
                       half_to_float(static_cast<unsigned short>(halves >> 16)));
#else
    return make_float2(fp8_to_float(static_cast<unsigned char>(pair)),
                       fp8_to_float(static_cast<unsigned char>(pair >> 8)));
#endif
}

// ---------------------------------------------------------------- memory

// Loads and stores of 16 bytes that are used once: caches evict them first.
__device__ __forceinline__ uint4 ldg16(const void* p) {
    return __ldcs(static_cast<const uint4*>(p));
}
__device__ __forceinline__ void stg16(void* p, const uint4& word) {
    __stcs(static_cast<uint4*>(p), word);
}

// ---------------------------------------------------------------- reductions

// Reductions over all 32 lanes, with the result in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, lanes));
    return v;
}
