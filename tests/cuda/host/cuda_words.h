// The words of CUDA C++ that kernels use, as functions of the fibers in cuda_host.h.
#pragma once

#define threadIdx (cuda_host::S.current->index)
#define blockIdx (cuda_host::S.block_index)
#define blockDim (cuda_host::S.block)
#define gridDim (cuda_host::S.grid)
#define warpSize 32

// Where in the source: default arguments are evaluated at the call.
#define CUDA_HOST_WHERE int line = __builtin_LINE(), const char* file = __builtin_FILE()
#define CUDA_HOST_AT(op) (cuda_host::Place{cuda_host::Op::op, line, file})

// ---------------------------------------------------------------- barriers, fences

static inline void __syncthreads(CUDA_HOST_WHERE) {
    cuda_host::wait_for_block(0, CUDA_HOST_AT(kSyncThreads));
}
static inline int __syncthreads_count(int p, CUDA_HOST_WHERE) {
    return static_cast<int>(cuda_host::wait_for_block(p != 0, CUDA_HOST_AT(kSyncThreadsCount)));
}
static inline int __syncthreads_and(int p, CUDA_HOST_WHERE) {
    return static_cast<int>(cuda_host::wait_for_block(p != 0, CUDA_HOST_AT(kSyncThreadsAnd)));
}
static inline int __syncthreads_or(int p, CUDA_HOST_WHERE) {
    return static_cast<int>(cuda_host::wait_for_block(p != 0, CUDA_HOST_AT(kSyncThreadsOr)));
}
static inline void __syncwarp(unsigned mask = cuda_host::kFull, CUDA_HOST_WHERE) {
    cuda_host::S.current->source = 0;
    cuda_host::wait_for_warp(mask, CUDA_HOST_AT(kSyncWarp));
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { cuda_host::suspend(); }
static inline unsigned __activemask() {  // what may run with this lane is not defined: itself
    return 1u << cuda_host::lane();
}

// ---------------------------------------------------------------- exchange within a warp

namespace cuda_host {
template <class T> static inline T shuffle(unsigned mask, T v, int source, Place place) {
    static_assert(sizeof(T) <= 8 && std::is_arithmetic_v<T>, "shuffles take numbers of 1 to 8 bytes");
    Thread& t = *S.current;
    t.value = 0, t.source = source;
    memcpy(&t.value, &v, sizeof v);
    wait_for_warp(mask, place);
    memcpy(&v, &t.value, sizeof v);
    return v;
}
static inline uint64_t vote(unsigned mask, uint64_t value, int source, Place place) {
    Thread& t = *S.current;
    t.value = value, t.source = source;
    wait_for_warp(mask, place);
    return t.value;
}
static inline int segment(int width) { return static_cast<int>(lane()) & ~(width - 1); }
}  // namespace cuda_host

template <class T>
static inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, CUDA_HOST_WHERE) {
    return cuda_host::shuffle(mask, v, cuda_host::segment(width) | (source & (width - 1)),
                              CUDA_HOST_AT(kShuffle));
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, CUDA_HOST_WHERE) {
    int me = static_cast<int>(cuda_host::lane()), from = me - static_cast<int>(delta);
    return cuda_host::shuffle(mask, v, from < cuda_host::segment(width) ? me : from,
                              CUDA_HOST_AT(kShuffle));
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32,
                                 CUDA_HOST_WHERE) {
    int me = static_cast<int>(cuda_host::lane()), from = me + static_cast<int>(delta);
    return cuda_host::shuffle(mask, v, from >= cuda_host::segment(width) + width ? me : from,
                              CUDA_HOST_AT(kShuffle));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, CUDA_HOST_WHERE) {
    int me = static_cast<int>(cuda_host::lane()), from = me ^ lanes;
    return cuda_host::shuffle(mask, v, from >= cuda_host::segment(width) + width ? me : from,
                              CUDA_HOST_AT(kShuffle));
}
static inline unsigned __ballot_sync(unsigned mask, int p, CUDA_HOST_WHERE) {
    return static_cast<unsigned>(cuda_host::vote(mask, p != 0, 0, CUDA_HOST_AT(kBallot)));
}
static inline int __all_sync(unsigned mask, int p, CUDA_HOST_WHERE) {
    return static_cast<int>(cuda_host::vote(mask, p != 0, 0, CUDA_HOST_AT(kAll)));
}
static inline int __any_sync(unsigned mask, int p, CUDA_HOST_WHERE) {
    return static_cast<int>(cuda_host::vote(mask, p != 0, 0, CUDA_HOST_AT(kAny)));
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T v, CUDA_HOST_WHERE) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return static_cast<unsigned>(cuda_host::vote(mask, bits, 0, CUDA_HOST_AT(kMatchAny)));
}
#define CUDA_HOST_REDUCE(word, op, T)                                                            \
    static inline T __reduce_##word##_sync(unsigned mask, T v, CUDA_HOST_WHERE) {                \
        return static_cast<T>(cuda_host::vote(mask, static_cast<unsigned>(v),                    \
                                              std::is_signed_v<T>, CUDA_HOST_AT(op)));           \
    }
CUDA_HOST_REDUCE(add, kReduceAdd, int)
CUDA_HOST_REDUCE(add, kReduceAdd, unsigned)
CUDA_HOST_REDUCE(min, kReduceMin, int)
CUDA_HOST_REDUCE(min, kReduceMin, unsigned)
CUDA_HOST_REDUCE(max, kReduceMax, int)
CUDA_HOST_REDUCE(max, kReduceMax, unsigned)
CUDA_HOST_REDUCE(and, kReduceAnd, unsigned)
CUDA_HOST_REDUCE(or, kReduceOr, unsigned)
CUDA_HOST_REDUCE(xor, kReduceXor, unsigned)

// ---------------------------------------------------------------- atomics

namespace cuda_host {
template <class T, class F> static __forceinline__ T atomically(T* at, F next) {
    T old;
    {
        Atomically marked;
        old = *at;
        *at = next(old);
    }
    may_yield();
    return old;
}
template <class T> static inline T wrapping_add(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
        return a + b;
    } else {
        using U = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    }
}
template <class T> static inline T negated(T a) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(U(0) - static_cast<U>(a));
}
template <class T> struct Same { using type = T; };
template <class T> using As = typename Same<T>::type;  // only the address decides the type
}  // namespace cuda_host
#define CUDA_HOST_ATOMIC(name, expression)                                            \
    template <class T> static __forceinline__ T name(T* at, cuda_host::As<T> v) {              \
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");             \
        return cuda_host::atomically(at, [v](T old) -> T { return (expression); });   \
    }
CUDA_HOST_ATOMIC(atomicAdd, cuda_host::wrapping_add(old, v))
CUDA_HOST_ATOMIC(atomicSub, cuda_host::wrapping_add(old, cuda_host::negated(v)))
CUDA_HOST_ATOMIC(atomicMin, v < old ? v : old)
CUDA_HOST_ATOMIC(atomicMax, v > old ? v : old)
CUDA_HOST_ATOMIC(atomicAnd, old & v)
CUDA_HOST_ATOMIC(atomicOr, old | v)
CUDA_HOST_ATOMIC(atomicXor, old ^ v)
CUDA_HOST_ATOMIC(atomicExch, (static_cast<void>(old), v))
CUDA_HOST_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
CUDA_HOST_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T>
static __forceinline__ T atomicCAS(T* at, cuda_host::As<T> expected, cuda_host::As<T> desired) {
    return cuda_host::atomically(at, [=](T old) { return old == expected ? desired : old; });
}

// ---------------------------------------------------------------- memory

template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldca(const T* p) { return *p; }
template <class T> static inline T __ldlu(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }
template <class T> static inline void __stwb(T* p, T v) { *p = v; }

// ---------------------------------------------------------------- integers and bits

template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
    return static_cast<T>(a) > static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
namespace cuda_host {
template <class To, class From> static inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace cuda_host
static inline float __uint_as_float(unsigned u) { return cuda_host::bits<float>(u); }
static inline unsigned __float_as_uint(float f) { return cuda_host::bits<unsigned>(f); }
static inline float __int_as_float(int i) { return cuda_host::bits<float>(i); }
static inline int __float_as_int(float f) { return cuda_host::bits<int>(f); }
static inline double __longlong_as_double(long long i) { return cuda_host::bits<double>(i); }
static inline long long __double_as_longlong(double d) { return cuda_host::bits<long long>(d); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) {
    return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
static inline int __mulhi(int a, int b) {
    return static_cast<int>(static_cast<int64_t>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline long long __mul64hi(long long a, long long b) {
    return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    return static_cast<unsigned>(both >> (shift & 31));
}
// Ignores bit 3 of each selector, unlike the instruction prmt.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = static_cast<uint64_t>(y) << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = selector >> (4 * i) & 7;
        r |= static_cast<unsigned>(both >> (8 * s) & 0xffu) << (8 * i);
    }
    return r;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++)
        c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    return c;
}

// ---------------------------------------------------------------- floats

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1) : 0; }
static inline float __int2float_rn(int i) { return static_cast<float>(i); }
static inline float __uint2float_rn(unsigned i) { return static_cast<float>(i); }
namespace cuda_host {  // a float outside the range of the integer goes to its end, NaN to 0
template <class T> static inline T to_integer(float rounded, float low, float beyond) {
    if (!(rounded == rounded)) return 0;
    if (rounded < low) return static_cast<T>(low);
    if (rounded >= beyond) return static_cast<T>(std::is_signed_v<T> ? 0x7fffffffu : 0xffffffffu);
    return static_cast<T>(rounded);
}
static inline int to_int(float rounded) { return to_integer<int>(rounded, -0x1p31f, 0x1p31f); }
static inline unsigned to_unsigned(float rounded) {
    return to_integer<unsigned>(rounded, 0.0f, 0x1p32f);
}
}  // namespace cuda_host
static inline int __float2int_rn(float a) { return cuda_host::to_int(nearbyintf(a)); }
static inline int __float2int_rz(float a) { return cuda_host::to_int(truncf(a)); }
static inline int __float2int_rd(float a) { return cuda_host::to_int(floorf(a)); }
static inline int __float2int_ru(float a) { return cuda_host::to_int(ceilf(a)); }
static inline unsigned __float2uint_rn(float a) {
    return cuda_host::to_unsigned(nearbyintf(a));
}
static inline unsigned __float2uint_rz(float a) { return cuda_host::to_unsigned(truncf(a)); }
// The C library declares some of these names itself, hence macros.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)

// ---------------------------------------------------------------- what device.cuh writes in PTX

typedef unsigned short bf16;

static inline void begin_after_previous() { cuda_host::S.current->begun = true; }

#define DYNAMIC_SHARED(name) unsigned char* const name = cuda_host::S.dynamic

namespace cuda_host {
static __attribute__((noinline)) void copy_async(void* to, const void* from, unsigned bytes, unsigned filled,
                              Place place) {
    Thread& t = *S.current;
    if (!is_shared(to, bytes))
        CUDA_HOST_FAIL("cp.async at %s:%d: the target is not shared memory", place.file, place.line);
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
        CUDA_HOST_FAIL("cp.async at %s:%d: an address is not aligned to %u bytes", place.file,
                       place.line, bytes);
    if (t.copies == kMaxCopies)
        CUDA_HOST_FAIL("cp.async at %s:%d: more than %zu copies in flight", place.file, place.line,
                       kMaxCopies);
    note(t, to, bytes, true, __builtin_return_address(0));
    t.copy[t.copies++] = {to, from, bytes, filled < bytes ? filled : bytes, t.commits};
    memset(to, 0xff, bytes);  // from now on the old bytes may be gone
}
// The bytes land here and not before, those of the last `keep` groups not yet.
static __attribute__((noinline)) void land(unsigned keep) {
    Thread& t = *S.current;
    unsigned left = 0;
    for (unsigned i = 0; i < t.copies; i++) {
        Copy& c = t.copy[i];
        if (c.group + keep < t.commits) {
            note(t, c.to, c.bytes, true, __builtin_return_address(0));
            memcpy(c.to, c.from, c.filled);
            memset(static_cast<char*>(c.to) + c.filled, 0, c.bytes - c.filled);
        } else {
            t.copy[left++] = c;
        }
    }
    t.copies = left;
}
static __attribute__((noinline)) void load_matrices(unsigned* r, const void* row, int matrices, Place place) {
    Thread& t = *S.current;
    t.row = row, t.source = matrices, t.pc = __builtin_return_address(0);
    wait_for_warp(kFull, place);
    for (int i = 0; i < matrices; i++) r[i] = t.a[i];
}
}  // namespace cuda_host

static __forceinline__ void cp_async16(void* to, const void* from, CUDA_HOST_WHERE) {
    cuda_host::copy_async(to, from, 16, 16, CUDA_HOST_AT(kSyncWarp));
}
static __forceinline__ void cp_async8(void* to, const void* from, CUDA_HOST_WHERE) {
    cuda_host::copy_async(to, from, 8, 8, CUDA_HOST_AT(kSyncWarp));
}
static __forceinline__ void cp_async4(void* to, const void* from, CUDA_HOST_WHERE) {
    cuda_host::copy_async(to, from, 4, 4, CUDA_HOST_AT(kSyncWarp));
}
static __forceinline__ void cp_async16_fill(void* to, const void* from, unsigned bytes, CUDA_HOST_WHERE) {
    cuda_host::copy_async(to, from, 16, bytes, CUDA_HOST_AT(kSyncWarp));
}
static inline void cp_async_commit() { cuda_host::S.current->commits++; }
template <int kKeep> static __forceinline__ void cp_async_wait() { cuda_host::land(kKeep); }
static __forceinline__ void cp_async_wait_all() {
    cp_async_commit();
    cuda_host::land(0);
}

static __forceinline__ void ldmatrix_x1(unsigned* r, const void* row, CUDA_HOST_WHERE) {
    cuda_host::load_matrices(r, row, 1, CUDA_HOST_AT(kLdmatrix));
}
static __forceinline__ void ldmatrix_x2(unsigned* r, const void* row, CUDA_HOST_WHERE) {
    cuda_host::load_matrices(r, row, 2, CUDA_HOST_AT(kLdmatrix));
}
static __forceinline__ void ldmatrix_x4(unsigned* r, const void* row, CUDA_HOST_WHERE) {
    cuda_host::load_matrices(r, row, 4, CUDA_HOST_AT(kLdmatrix));
}
static __forceinline__ void ldmatrix_x1_trans(unsigned* r, const void* row, CUDA_HOST_WHERE) {
    cuda_host::load_matrices(r, row, 1, CUDA_HOST_AT(kLdmatrixTrans));
}
static __forceinline__ void ldmatrix_x2_trans(unsigned* r, const void* row, CUDA_HOST_WHERE) {
    cuda_host::load_matrices(r, row, 2, CUDA_HOST_AT(kLdmatrixTrans));
}
static __forceinline__ void ldmatrix_x4_trans(unsigned* r, const void* row, CUDA_HOST_WHERE) {
    cuda_host::load_matrices(r, row, 4, CUDA_HOST_AT(kLdmatrixTrans));
}
static inline unsigned transpose_8x8(unsigned pair) {
    const int row = static_cast<int>(cuda_host::lane()) / 4, column = cuda_host::lane() % 4 * 2;
    const int shift = row % 2 * 16;
    const unsigned low = __shfl_sync(cuda_host::kFull, pair, column * 4 + row / 2) >> shift;
    const unsigned high = __shfl_sync(cuda_host::kFull, pair, column * 4 + 4 + row / 2) >> shift;
    return (low & 0xffffu) | high << 16;
}
static inline void mma_bf16_16816(float* d, const unsigned* a, const unsigned* b, CUDA_HOST_WHERE) {
    cuda_host::Thread& t = *cuda_host::S.current;
    memcpy(t.a, a, 16), memcpy(t.b, b, 8), memcpy(t.d, d, 16);
    t.source = 0;
    cuda_host::wait_for_warp(cuda_host::kFull, CUDA_HOST_AT(kMma));
    memcpy(d, t.d, 16);
}

static inline float half_to_float(unsigned short h) {
    return static_cast<float>(cuda_host::bits<_Float16>(h));
}
