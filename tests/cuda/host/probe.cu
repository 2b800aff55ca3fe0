// What host execution promises, word by word; test_host_execution.py says what must come out.
#include "device.cuh"

extern "C" __global__ void shuffles(int* out) {
    const int lane = threadIdx.x;
    out[lane] = __shfl_sync(0xffffffffu, lane * 10, 5);
    out[32 + lane] = __shfl_up_sync(0xffffffffu, lane, 3);
    out[64 + lane] = __shfl_down_sync(0xffffffffu, lane, 4, 8);
    out[96 + lane] = __shfl_xor_sync(0xffffffffu, lane, 9);
    out[128 + lane] = __shfl_sync(0xffffffffu, lane, 9, 8);
    // Halves of the warp go through different numbers of exchanges of their own.
    int v = lane;
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    for (int i = 0; i < (lane < 16 ? 1 : 4); i++) v += __shfl_xor_sync(half, v, 1);
    out[160 + lane] = __shfl_xor_sync(0xffffffffu, v, 16);
    const double d = __shfl_sync(0xffffffffu, lane + 0.5, 31);
    const long long l = __shfl_xor_sync(0xffffffffu, static_cast<long long>(lane) << 40, 1);
    out[192 + lane] = static_cast<int>(d * 2) + static_cast<int>(l >> 40);
}

extern "C" __global__ void votes(unsigned* out) {
    const int lane = threadIdx.x;
    out[lane] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    out[32 + lane] = __all_sync(0xffffffffu, lane < 32) * 2 + __any_sync(0xffffffffu, lane == 7);
    out[64 + lane] = __match_any_sync(0xffffffffu, lane / 5);
    out[96 + lane] = static_cast<unsigned>(__reduce_add_sync(0xffffffffu, lane - 16));
    out[128 + lane] = static_cast<unsigned>(__reduce_min_sync(0xffffffffu, lane - 16));
    out[160 + lane] = __reduce_max_sync(0xffffffffu, static_cast<unsigned>(lane - 16));
    if (lane % 2) out[192 + lane] = __ballot_sync(0xaaaaaaaau, lane > 16);
    else out[192 + lane] = __reduce_xor_sync(0x55555555u, 1u << lane);
}

// A grid and blocks of three axes, early exits, barriers that count, shared memory of both kinds.
extern "C" __global__ void shape(int* out, int* poisoned) {
    __shared__ int all[64];
    __shared__ __align__(16) unsigned short spare[8];
    DYNAMIC_SHARED(raw);
    int* dynamic = reinterpret_cast<int*>(raw);
    const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int n = blockDim.x * blockDim.y * blockDim.z;
    if (all[t] != -1 || dynamic[t] != -1 || spare[t % 8] != 0xffff) poisoned[0] = 0;
    __syncthreads();
    all[t] = t, dynamic[t] = b;
    if (t < 8) spare[t] = 1;
    const int odd = __syncthreads_count(t & 1);
    const int every = __syncthreads_and(t >= 0) * 2 + __syncthreads_or(t == 3);
    out[b * n + t] = all[n - 1 - t] + 1000 * dynamic[(t + 1) % n] + 100 * odd + 10000 * every;
    if (t > 3) return;
    out[b * n + t] += 1;
}

extern "C" __global__ void integers(const unsigned* in, long long* out) {
    const unsigned x = in[0], y = in[1];
    const int i = static_cast<int>(x);
    long long* o = out;
    *o++ = __popc(x), *o++ = __clz(i), *o++ = __clz(0), *o++ = __ffs(i), *o++ = __ffs(0);
    *o++ = __umulhi(x, y), *o++ = __mulhi(i, static_cast<int>(y)), *o++ = __brev(x);
    const long long wide = static_cast<long long>(static_cast<unsigned long long>(x) << 32 | y);
    *o++ = __mul64hi(wide, wide + 1), *o++ = __popcll(wide), *o++ = __clzll(wide >> 40 & 0xff);
    *o++ = static_cast<long long>(__umul64hi(static_cast<unsigned long long>(wide), ~0ull));
    *o++ = __funnelshift_l(x, y, 7), *o++ = __funnelshift_r(x, y, 39);
    *o++ = __byte_perm(x, y, 0x7412), *o++ = __byte_perm(x, y, 0x8b3f);
    *o++ = min(-3, i), *o++ = max(3u, y), *o++ = __float2int_rn(2.5f), *o++ = __float2int_rz(-2.9f);
    *o++ = __float2int_rn(3e9f), *o++ = __float2uint_rn(-1.0f), *o++ = __float_as_uint(-0.0f);
    *o++ = __dp4a(0x01ff7f80, 0x02030405, 7);
}

extern "C" __global__ void atomics(int* sums, unsigned* wide, unsigned long long* big) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&sums[0], t), atomicSub(&sums[1], t), atomicMax(&sums[2], t), atomicMin(&sums[3], -t);
    atomicOr(&wide[0], 1u << t % 32), atomicAnd(&wide[1], ~(1u << t % 8)), atomicXor(&wide[2], t);
    atomicInc(&wide[3], 9u), atomicAdd(&big[0], 1ull << 40), atomicMax(&big[1], 1ull * t << 33);
    unsigned old = wide[4], seen;
    do {
        seen = old;
        old = atomicCAS(&wide[4], seen, seen + 3);
    } while (old != seen);
    while (atomicExch(&sums[4], 1)) {}  // a lock held over a turn: the others must get theirs
    volatile int* guarded = &sums[5];
    *guarded = *guarded + 1;
    __threadfence();
    atomicExch(&sums[4], 0);
}

// in: float bits; out: bf16 alone and in pairs with the values from the end; back.
extern "C" __global__ void conversions(const float* in, unsigned short* bf, unsigned* pairs, float* back,
                                       int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    bf[i] = float_to_bf16(in[i]), back[i] = bf16_to_float(bf[i]);
    pairs[i] = pack_bf16(in[i], in[n - 1 - i]);
}

// codes: two of e4m3 in a word.
extern "C" __global__ void pairs(const unsigned* codes, float* back, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float2 two = unpack_fp8(codes[i]);
    back[2 * i] = two.x, back[2 * i + 1] = two.y;
}

// Copies 0 to 16 bytes and fills the rest of 16 with zeros.
extern "C" __global__ void fills(const uint4* in, uint4* out) {
    __shared__ uint4 held[64];
    cp_async16_fill(&held[threadIdx.x], in + threadIdx.x, threadIdx.x % 17);
    cp_async_wait_all();
    out[threadIdx.x] = held[threadIdx.x];
}

// c[16][8] = a[16][16] b[8][16]^T through ldmatrix: rows of a, rows of b; b also transposed twice.
extern "C" __global__ void tensor(const uint4* a, const uint4* b, const uint4* b_transposed, float* c,
                                  float* c_transposed, unsigned* single,
                                  unsigned* single_transposed) {
    __shared__ __align__(16) bf16 rows[16 * 16], columns[8 * 16], turned[16 * 8];
    const int l = threadIdx.x;
    reinterpret_cast<uint4*>(rows)[l] = a[l];
    if (l < 16) {
        reinterpret_cast<uint4*>(columns)[l] = b[l];
        reinterpret_cast<uint4*>(turned)[l] = b_transposed[l];
    }
    __syncwarp();
    unsigned fa[4], fb[2], ft[2];
    ldmatrix_x4(fa, rows + l % 16 * 16 + l / 16 * 8);
    ldmatrix_x2(fb, columns + l % 8 * 16 + l / 8 % 2 * 8);
    ldmatrix_x2_trans(ft, turned + l % 16 * 8);
    ldmatrix_x1(single + l, rows + l % 8 * 16);
    single_transposed[l] = transpose_8x8(single[l]);
    float d[4] = {0, 0, 0, 0}, e[4] = {1, 1, 1, 1};
    mma_bf16_16816(d, fa, fb);
    mma_bf16_16816(e, fa, ft);
    for (int i = 0; i < 4; i++) {
        const int at = (l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2;
        c[at] = d[i], c_transposed[at] = e[i] - 1;
    }
}

// Rows of 64 words through a ring of three stages; sums of what another thread has copied.
extern "C" __global__ void __launch_bounds__(64)
    pipeline(const uint4* in, const uint2* tail, uint4* out, unsigned* rest, int rows) {
    __shared__ uint4 ring[3][64];
    __shared__ __align__(16) uint4 filled[64];
    __shared__ uint2 small[64];
    __shared__ unsigned tiny[64];
    const int t = threadIdx.x;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int r = 0; r < 2; r++) {
        if (r < rows) cp_async16(&ring[r][t], in + r * 64 + t);
        cp_async_commit();
    }
    for (int r = 0; r < rows; r++) {
#ifdef BATON_PLANT_LAX_WAIT
        cp_async_wait<2>();
#else
        cp_async_wait<1>();
#endif
#ifndef BATON_PLANT_NO_BARRIER
        __syncthreads();
#endif
        if (r + 2 < rows) cp_async16(&ring[(r + 2) % 3][t], in + (r + 2) * 64 + t);
        cp_async_commit();
        const uint4 w = ring[r % 3][63 - t];
        sum.x += w.x, sum.y += w.y, sum.z += w.z, sum.w += w.w;
    }
    out[t] = sum;
    cp_async16_fill(&filled[t], in + t, t % 17);
    cp_async8(&small[t], tail + t);
    cp_async4(&tiny[t], tail + t);
    cp_async_wait_all();
    __syncthreads();
    rest[t] = filled[t].x + 3 * filled[t].w + 5 * small[63 - t].y + 7 * tiny[63 - t];
}

template <int kWidth> __device__ int folded(int v) {
    __shared__ int part[kWidth];  // each instance has its own
    part[threadIdx.x % kWidth] = v;
    __syncwarp();
    return part[(threadIdx.x + 1) % kWidth];
}
extern "C" __global__ void templates(int* out) {
    out[threadIdx.x] = folded<32>(threadIdx.x) + 100 * folded<8>(threadIdx.x % 8);
}

// ---------------------------------------------------------------- what must be refused

extern "C" __global__ void divergent_barrier(int* out) {
    if (threadIdx.x < 32) {
        out[0] = 1;
        __syncthreads();
    } else {
        out[1] = 1;
        __syncthreads();
    }
}
extern "C" __global__ void barrier_after_exit(int* out) {
    if (threadIdx.x == 40) return;
    __syncthreads();
    out[0] = 1;
}
extern "C" __global__ void shuffle_with_exited(int* out) {
    if (threadIdx.x == 3) return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
extern "C" __global__ void shuffle_with_absent(int* out) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
extern "C" __global__ void shuffle_outside_mask(int* out) {
    out[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? 0xffffu : 0xffff0000u, 1, 20);
}
extern "C" __global__ void shuffle_without_self(int* out) {
    out[threadIdx.x] = __shfl_sync(0xffffu, 1, 1);
}
extern "C" __global__ void warps_wait_for_each_other(int* out) {
    if (threadIdx.x < 16) __syncwarp();
    else __syncthreads();
    out[threadIdx.x] = 1;
}
extern "C" __global__ void endless(volatile int* flag) {
    while (!flag[0]) {}
}
extern "C" __global__ void spins_on_another_block(int* flag) {
    if (blockIdx.x == 0) while (!atomicAdd(flag, 0)) {}
    if (blockIdx.x == 1) atomicExch(flag, 1);
}
extern "C" __global__ void wild(int* out) { out[1ll << 45] = 1; }
extern "C" __global__ void beside(int* out, int at) { out[at + static_cast<int>(threadIdx.x)] = 1; }
extern "C" __global__ void reads_beside(int* out, const int* in, int at) {
    out[threadIdx.x] = in[at + static_cast<int>(threadIdx.x)];
}
extern "C" __global__ void reads_behind_shared(int* out, int n) {
    DYNAMIC_SHARED(raw);
    int* values = reinterpret_cast<int*>(raw);
    values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x + n];
}
extern "C" __global__ void overflows(int* out, int by) {
    out[threadIdx.x] = (2147483647 - static_cast<int>(threadIdx.x)) + by;
}
extern "C" __global__ void behind_shared(int* out) {
    DYNAMIC_SHARED(raw);
    reinterpret_cast<int*>(raw)[threadIdx.x + 1] = 1;
    out[threadIdx.x] = 1;
}
extern "C" __global__ void past_static(int* out, int n) {
    __shared__ int part[32];
    part[(threadIdx.x + n) % 64] = 1;
    __syncthreads();
    out[threadIdx.x] = part[threadIdx.x];
}
__device__ __noinline__ int frames(int n) {
    volatile char frame[4096];
    frame[n % 4096] = static_cast<char>(n);
    return n ? frames(n - 1) + frame[n % 4096] : 0;
}
extern "C" __global__ void deep(int* out, int n) { out[0] = frames(n); }
extern "C" __global__ void divides(int* out, int by) { out[0] = 7 / by; }
extern "C" __global__ void misaligned_copy(const uint4* in) {
    __shared__ uint4 buffer[4];
    cp_async16(reinterpret_cast<char*>(buffer) + 8, in);
}
extern "C" __global__ void __launch_bounds__(64) bounded(long long wide, float f, unsigned u, const uint4* p) {}

// ---------------------------------------------------------------- races in shared memory

// None: barriers, a warp's own barrier, atomics, and a byte beside another thread's.
extern "C" __global__ void ordered(int* out) {
    __shared__ int part[64], sum;
    __shared__ unsigned char bytes[64];
    const int t = threadIdx.x;
    part[t] = t, bytes[t] = static_cast<unsigned char>(t);
    if (t == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, part[63 - t]);
    __syncthreads();
    part[t] = sum;
    __syncwarp();
    if (t % 32 < 16) {
        bytes[t] = static_cast<unsigned char>(part[t ^ 1]);
        __syncwarp(0x0000ffffu);
        out[t] = bytes[t ^ 1] + part[t ^ 16];
    }
}
extern "C" __global__ void read_before_write(int* out) {
    __shared__ int part[64];
    part[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = part[threadIdx.x ^ 1];
}
extern "C" __global__ void write_before_read(int* out) {
    __shared__ int part[64];
    part[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const int v = part[63 - threadIdx.x];
    part[threadIdx.x] = v;
    out[threadIdx.x] = v;
}
extern "C" __global__ void warps_without_barrier(int* out) {
    DYNAMIC_SHARED(raw);
    int* part = reinterpret_cast<int*>(raw);
    part[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = part[threadIdx.x ^ 32];
}
extern "C" __global__ void lanes_outside_the_mask(int* out) {
    __shared__ int part[64];
    part[threadIdx.x] = threadIdx.x;
    __syncwarp(threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u);
    out[threadIdx.x] = part[threadIdx.x ^ 16];
}
extern "C" __global__ void matrix_before_write(int* out) {
    __shared__ __align__(16) bf16 rows[2][64];
    rows[threadIdx.x / 32][threadIdx.x % 32 * 2] = 1, rows[threadIdx.x / 32][threadIdx.x % 32 * 2 + 1] = 2;
    unsigned r;
    ldmatrix_x1(&r, &rows[threadIdx.x / 32][threadIdx.x % 8 * 8]);
    out[threadIdx.x] = static_cast<int>(r);
}
extern "C" __global__ void copy_before_read(int* out) {
    __shared__ int part[64];
    part[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const int v = part[63 - threadIdx.x];
    cp_async4(&part[threadIdx.x], out + threadIdx.x);
    cp_async_wait_all();
    out[threadIdx.x] = v;
}
extern "C" __global__ void plain_beside_atomic(int* out) {
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, 1);
    out[threadIdx.x] = sum;
}
