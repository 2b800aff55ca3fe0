// Hopper's asynchronous tensor cores and barriers (sm_90a only); inline PTX as in device.cuh.
//
// wgmma is issued by the four warps of a warpgroup together and reads shared memory through another
// path ("proxy") than ordinary accesses. Tiles are stored in rows of 128 bytes, 64 elements of
// bf16; the 16-byte piece c of row r is at c ^ (r % 8) ("128-byte swizzle"), and a tile begins at a multiple
// of 1,024 bytes. A descriptor names a tile for wgmma.
#pragma once
#include "device.cuh"

constexpr int kSwizzleBytes = 128;  // of a row in shared memory
constexpr int kSwizzleAtom = 1024;  // eight rows: the pattern repeats

// A tile in shared memory: its address, the distance between groups of eight rows (always 1,024
// bytes) and, for tiles read transposed, the distance between parts of 64 columns. In units of 16 bytes.
__device__ __forceinline__ unsigned long long tile_descriptor(unsigned address, unsigned part_bytes) {
    return static_cast<unsigned long long>((address & 0x3ffffu) >> 4) |
           static_cast<unsigned long long>(part_bytes >> 4) << 16 |
           static_cast<unsigned long long>(kSwizzleAtom >> 4) << 32 | 1ull << 62;
}

// Names a matrix in global memory, and boxes of it, for the bulk copy engine; made by the driver.
#ifdef BATON_CUDA_HOST
#define __grid_constant__
struct TensorMap {
#else
struct __align__(64) TensorMap {
#endif
    unsigned long long words[16];
};

#ifndef BATON_CUDA_HOST

// Orders accesses to registers and shared memory before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all groups of this warpgroup except the last kKeep are done.
template <int kKeep> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kKeep) : "memory");
}
// Keeps the compiler from moving what computes `d` below, and what uses it above: a wait is no obstacle
// to it.
template <int N> __device__ __forceinline__ void keep_order(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The registers of the sums, in the text of an instruction and as its operands.
#define WGMMA_REGISTERS_32                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_64                                                                        \
    WGMMA_REGISTERS_32                                                                            \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_16(d, i)                                                                       \
    WGMMA_SUMS_4(d, i), WGMMA_SUMS_4(d, i + 4), WGMMA_SUMS_4(d, i + 8), WGMMA_SUMS_4(d, i + 12)
#define WGMMA_SUMS_32(d, i) WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, i + 16)

// d[64][N] (+)= a[64][16] b[N][16]^T: a in registers, as for mma_bf16_16816, b in shared memory; rows of b
// are the N columns of d. Without `keep`, d is overwritten. Warp w of the warpgroup holds rows 16 w to
// 16 w + 15; of each eight columns a lane holds what mma_bf16_16816 gives it.
__device__ __forceinline__ void wgmma_scores(float (&d)[64], const unsigned* a,
                                             unsigned long long b, int keep) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        WGMMA_REGISTERS_64
        "}, {%64, %65, %66, %67}, %68, keep, 1, 1, 0;\n}\n"
        : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// d[64][N] += a[64][16] b[16][N]: the same with rows of N elements in b, in parts of 64.
__device__ __forceinline__ void wgmma_values(float (&d)[64], const unsigned* a,
                                             unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        WGMMA_REGISTERS_64
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_values(float (&d)[32], const unsigned* a,
                                             unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        WGMMA_REGISTERS_32
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : WGMMA_SUMS_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// ---------------------------------------------------------------- barriers

// A barrier in shared memory counts arrivals; its phase ends with the last one, and its parity flips.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when the copies (cp.async) that this thread has begun are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Arrives; the phase also waits for so many bytes of bulk copies.
__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
// Copies the box of the map at this column and row into shared memory, in rows of 128 bytes with their pieces
// swizzled as above. The barrier counts the bytes when they have arrived.
__device__ __forceinline__ void bulk_copy(unsigned to, const TensorMap* map, int column, int row,
                                          unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// Makes ordinary writes to shared memory, of all threads that this one has waited for, visible to wgmma and
// to bulk copies.
__device__ __forceinline__ void shared_fence_for_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Barriers of the hardware, by number (0 is __syncthreads): `threads` take part, of which some only
// arrive and go on.
__device__ __forceinline__ void turn_wait(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void turn_give(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers per thread of this warpgroup from here on.
template <int kRegisters> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---------------------------------------------------------------- addresses in shared memory

// As cp_async16_fill and ldmatrix_x4 of device.cuh, for a 32-bit address.
__device__ __forceinline__ void cp_async16_fill_at(unsigned to, const void* from, unsigned bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_at(unsigned* r, unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

#endif  // BATON_CUDA_HOST
