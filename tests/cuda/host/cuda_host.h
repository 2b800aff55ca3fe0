// Executes unchanged CUDA sources on the CPU: every CUDA thread is a fiber with a stack of its own.
//
// The blocks of a grid run one after the other. Within a block a fiber runs until it waits: for its
// block, for lanes of its warp, or for a turn after an atomic operation. What lanes exchange
// (shuffles, votes, matrix fragments) is put down by each of them and worked out here when the last
// has come. Order of threads, warps and blocks follow from a seed; seed 0 is ascending order.
//
// Shared memory and the target of an asynchronous copy hold 0xff bytes (a NaN in every float
// format) until something is written. What a GPU would leave undefined or wait for without end is
// an error that names the kernel and the line. A limit of processor time ends a loop without end.
// With BATON_RACES, accesses to shared memory that no barrier orders are errors too.
//
// Hopper's products (wgmma) are executed at once or as late as the wait that covers them, by the
// seed: see hopper_words.h.
//
// x86-64 Linux, g++. Not modelled: the memory model between blocks, timing, bank conflicts, TMA; the
// hardware's exponential and reciprocals are those of the C library.
#pragma once
#define BATON_CUDA_HOST 1
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#ifdef BATON_SCAN  // the builder reads the names of the kernels from the preprocessed source
#define __global__ BATON_GLOBAL
#define __launch_bounds__(...) BATON_BOUNDS(__VA_ARGS__)
#else
#define __global__ inline  // a kernel that the launcher does not list is not compiled
#define __launch_bounds__(...)
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define __shared__ static  // guarded by red zones instead of poison
#else
#include <link.h>
#define __shared__ static thread_local  // one segment, so that it can be poisoned as a whole
#endif

struct dim3 {
    unsigned x, y, z;
};
typedef dim3 uint3;
#define CUDA_HOST_VECTOR(T, name)                   \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };   \
    struct name##3 { T x, y, z; };                       \
    struct alignas(sizeof(T) > 4 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }             \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_HOST_VECTOR(float, float)
CUDA_HOST_VECTOR(int, int)
CUDA_HOST_VECTOR(unsigned short, ushort)
CUDA_HOST_VECTOR(unsigned char, uchar)
CUDA_HOST_VECTOR(double, double)
CUDA_HOST_VECTOR(long long, longlong)
CUDA_HOST_VECTOR(unsigned long long, ulonglong)
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace cuda_host {

constexpr unsigned kMaxThreads = 1024, kWarp = 32, kFull = 0xffffffffu;
constexpr size_t kPage = 4096, kStack = 32 * kPage, kGuard = 64, kMaxCopies = 256;

// ---------------------------------------------------------------- threads

enum class Wait : unsigned char { kNone, kWarp, kBlock, kPoll, kEnded };  // kPoll: for some barrier's phase
enum class Op : unsigned char {
    kSyncThreads, kSyncThreadsCount, kSyncThreadsAnd, kSyncThreadsOr,
    kSyncWarp, kShuffle, kBallot, kAll, kAny, kMatchAny, kReduceAdd, kReduceMin, kReduceMax,
    kReduceAnd, kReduceOr, kReduceXor, kLdmatrix, kLdmatrixTrans, kMma, kProduct, kProductWait,
    kPhase, kTurn,
};
inline const char* name_of(Op op) {
    static const char* const names[] = {
        "__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
        "__syncwarp", "__shfl_sync", "__ballot_sync", "__all_sync", "__any_sync",
        "__match_any_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync", "ldmatrix", "ldmatrix.trans",
        "mma.sync", "wgmma", "wgmma.wait_group", "mbarrier.try_wait", "bar.sync"};
    return names[static_cast<int>(op)];
}

struct Place {  // where in the source a thread waits
    Op op;
    int line;
    const char* file;
    bool operator==(const Place& o) const {
        return op == o.op && line == o.line && (file == o.file || !strcmp(file, o.file));
    }
};

struct Copy {  // cp.async in flight
    void* to;
    const void* from;
    unsigned bytes, filled, group;
};

struct Thread;
struct Bulk {  // bulk copy in flight
    unsigned to;  // in dynamic shared memory
    const unsigned char* from;
    size_t stride;
    unsigned rows, filled, barrier;
    const Thread* by;
};
constexpr unsigned kMaxBulks = 512;

struct Product {  // wgmma in flight, d[16][n] of a warp
    float* d;
    const unsigned* a;
    uint64_t b;  // descriptor
    unsigned n, group;
    bool keep, by_rows;  // by_rows: b has rows of n elements
};
constexpr unsigned kMaxProducts = 64;

struct Thread {
    void* stack;  // saved stack pointer
    char* bottom;
    void* fake;  // the address sanitizer's
    dim3 index;
    Wait wait;
    Place place;
    unsigned mask;      // lanes of the warp that take part
    int source;         // shuffle: lane to read; reduce: 1 if signed; ldmatrix: matrices
    uint64_t value;     // operand, then result
    const void *row, *pc;  // ldmatrix
    unsigned a[4], b[2];
    float d[4];
    unsigned commits, copies, atomics;
    Copy copy[kMaxCopies];
    unsigned products, groups;
    bool begun;  // has waited for the kernel before
    Product product[kMaxProducts];
};

struct State {
    Thread* threads;  // all zero at the start
    Thread* current;
    void* main_stack;
    const void* main_bottom;
    size_t main_size;
    void* main_fake;
    unsigned count, warps;
    unsigned ready[kMaxThreads / kWarp];  // lanes that may run, per warp
    dim3 block, grid, block_index;
    void (*call)(void*, void**);
    void* kernel;
    void** arguments;
    const char *name, *signature;
    struct { unsigned count, phase; } turns[16];  // barriers by number
    unsigned bulks;
    Bulk bulk[kMaxBulks];
    unsigned char* dynamic;
    size_t dynamic_bytes;
    char *shared, *shared_end;
    uint64_t random, seed;
    volatile sig_atomic_t expired;
    bool failed;
    char error[600];
};
static State S;

inline uint64_t draw() {  // splitmix64
    uint64_t z = (S.random += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
inline unsigned draw(unsigned below) { return static_cast<unsigned>((draw() >> 32) * below >> 32); }

extern "C" void baton_switch_stack(void** save, void* to) __attribute__((visibility("hidden")));
__asm__(".text\n.hidden baton_switch_stack\n.globl baton_switch_stack\n"
        ".type baton_switch_stack,@function\nbaton_switch_stack:\n"
        "endbr64\npush %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
        ".size baton_switch_stack,.-baton_switch_stack\n");

inline void resume(Thread& t) {
    S.current = &t;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&S.main_fake, t.bottom, kStack);
#endif
    baton_switch_stack(&S.main_stack, t.stack);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(S.main_fake, nullptr, nullptr);
#endif
    S.current = nullptr;
}

inline __attribute__((noinline)) void suspend() {
    Thread& t = *S.current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(t.wait == Wait::kEnded ? nullptr : &t.fake, S.main_bottom,
                                   S.main_size);
#endif
    baton_switch_stack(&t.stack, S.main_stack);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(t.fake, nullptr, nullptr);
#endif
}

__attribute__((format(printf, 1, 2))) inline void report(const char* format, ...) {
    if (S.failed) return;
    S.failed = true;
    int n = snprintf(S.error, sizeof S.error, "%s, block (%u, %u, %u)", S.name, S.block_index.x,
                     S.block_index.y, S.block_index.z);
    if (S.current) {
        const dim3& i = S.current->index;
        n += snprintf(S.error + n, sizeof S.error - n, ", thread (%u, %u, %u)", i.x, i.y, i.z);
    }
    n += snprintf(S.error + n, sizeof S.error - n, ": ");
    va_list list;
    va_start(list, format);
    vsnprintf(S.error + n, sizeof S.error - n, format, list);
    va_end(list);
}
#define CUDA_HOST_FAIL(...) (cuda_host::report(__VA_ARGS__), cuda_host::suspend())

inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &S.main_bottom, &S.main_size);
#endif
    S.call(S.kernel, S.arguments);
    S.current->wait = Wait::kEnded;
    suspend();
    abort();
}

inline unsigned number(const Thread& t) { return static_cast<unsigned>(&t - S.threads); }
inline unsigned lane() { return number(*S.current) % kWarp; }
inline Thread* warp_of(const Thread& t) { return S.threads + number(t) / kWarp * kWarp; }
inline unsigned lanes_in(unsigned warp) {
    unsigned n = S.count - warp * kWarp;
    return n >= kWarp ? kFull : (1u << n) - 1;
}

inline void wait_for_warp(unsigned mask, Place place) {
    Thread& t = *S.current;
    if (!(mask >> lane() & 1u))
        CUDA_HOST_FAIL("%s at %s:%d: lane %u is not in its own mask %08x", name_of(place.op),
                       place.file, place.line, lane(), mask);
    t.wait = Wait::kWarp, t.place = place, t.mask = mask;
    suspend();
}
inline uint64_t wait_for_block(uint64_t value, Place place) {
    Thread& t = *S.current;
    t.wait = Wait::kBlock, t.place = place, t.value = value;
    suspend();
    return t.value;
}
// Wait until somebody ends a phase; then look again.
inline void poll(Place place) {
    Thread& t = *S.current;
    t.wait = Wait::kPoll, t.place = place;
    suspend();
}
inline void wake_polling() {
    for (unsigned i = 0; i < S.count; i++)
        if (S.threads[i].wait == Wait::kPoll)
            S.threads[i].wait = Wait::kNone, S.ready[i / kWarp] |= 1u << i % kWarp;
}
// Atomic operations are where threads meet without waiting: others may come first. A thread that
// spins on one lets the others go on.
inline void may_yield() {
    if ((S.seed && !(draw() & 3)) || ++S.current->atomics % 4096 == 0) suspend();
}

// ---------------------------------------------------------------- races in shared memory

#if defined(BATON_RACES)
// g++ reports every access (its thread sanitizer's calls, answered here). Two accesses to a byte of
// shared memory by different threads, one of them a write, need a __syncthreads or a __syncwarp of
// both in between; exchanges of values order no memory. Time counts these meetings.
struct Access {
    uint32_t time;
    uint16_t thread;
    bool atomic, collective;  // collective: by all lanes of the warp at once, as ldmatrix reads
    const char* pc;
};
struct Byte {
    Access write, reads[4];  // the last of other threads each
};
struct Races {
    uint32_t now, block;                                     // the last meeting, the last barrier
    uint32_t warp[kMaxThreads / kWarp][kWarp][kWarp];        // last __syncwarp of two lanes
    Byte *fixed, *dynamics;
    size_t dynamic_room;
    const char* base;                                        // where this library is loaded
    bool in_atomic;
};
static Races R;
#define CUDA_HOST_QUIET __attribute__((no_sanitize("thread")))

CUDA_HOST_QUIET inline bool in_order(const Access& before, unsigned thread) {
    if (!before.time || before.thread == thread || R.block > before.time) return true;
    return before.thread / kWarp == thread / kWarp &&
           (before.collective ||
            R.warp[thread / kWarp][before.thread % kWarp][thread % kWarp] > before.time);
}
CUDA_HOST_QUIET inline Byte* shadow_of(const char* at) {
    if (S.shared && at >= S.shared && at < S.shared_end) return R.fixed + (at - S.shared);
    const char* dynamic = reinterpret_cast<const char*>(S.dynamic);
    if (at >= dynamic && at < dynamic + S.dynamic_bytes) return R.dynamics + (at - dynamic);
    return nullptr;
}
CUDA_HOST_QUIET inline bool touch(Byte& b, Access a, bool write) {
    const bool fine = in_order(b.write, a.thread) || (a.atomic && b.write.atomic);
    const Access* other = fine ? nullptr : &b.write;
    unsigned slot = 0;
    for (unsigned i = 0; i < 4; i++) {
        if (write && !in_order(b.reads[i], a.thread) && !(a.atomic && b.reads[i].atomic))
            other = &b.reads[i];
        if (b.reads[i].thread == a.thread) slot = i;
        else if (b.reads[slot].thread != a.thread && b.reads[i].time < b.reads[slot].time) slot = i;
    }
    if (other) {
        report("race in shared memory: a %s of thread %u at <%zx> and the %s of thread %u at <%zx> "
               "have no barrier between them", write ? "write" : "read", a.thread,
               static_cast<size_t>(a.pc - R.base), other == &b.write ? "write" : "read",
               other->thread, static_cast<size_t>(other->pc - R.base));
        return false;
    }
    if (write) b.write = a;
    else b.reads[slot] = a;
    return true;
}
// An access of a thread, which the schedule may make for it.
CUDA_HOST_QUIET inline void note(const Thread& t, const void* p, size_t bytes, bool write,
                                 const void* pc, bool collective = false) {
    const char* at = static_cast<const char*>(p);
    if (!shadow_of(at)) return;
    Access a = {R.now, static_cast<uint16_t>(&t - S.threads), R.in_atomic, collective,
                static_cast<const char*>(pc)};
    for (size_t i = 0; i < bytes && !S.failed; i++)
        if (Byte* b = shadow_of(at + i)) touch(*b, a, write);
}
CUDA_HOST_QUIET inline void note_meeting(unsigned warp, unsigned group) {
    R.now++;
    for (unsigned i = 0; i < kWarp; i++)
        for (unsigned j = 0; j < kWarp; j++)
            if (group >> i & group >> j & 1u) R.warp[warp][i][j] = R.now;
}
CUDA_HOST_QUIET inline void note_barrier() { R.block = ++R.now; }
#if defined(BATON_DEPENDENT)
// Whether an address is of the kernel's arguments, which are there before it begins.
CUDA_HOST_QUIET inline bool is_argument(const char* p) {
    unsigned i = 0;
    const char* list = reinterpret_cast<const char*>(S.arguments);
    for (const char* at = S.signature; *at; i++) {
        const unsigned declared = static_cast<unsigned>(strtoul(at + 1, nullptr, 10));
        const unsigned bytes = *at == 'p' ? 8 : declared;
        const char* value = static_cast<const char*>(S.arguments[i]);
        if (p >= value && p < value + bytes) return true;
        if (!(at = strchr(at, ' '))) break;
        at++;
    }
    return p >= list && p < list + 8 * (i + 1);
}
CUDA_HOST_QUIET inline void note_beginning(const void* address, bool write, const void* pc) {
    const Thread& t = *S.current;
    const char* p = static_cast<const char*>(address);
    if (t.begun || (p >= t.bottom && p < t.bottom + kStack) || is_argument(p)) return;
    if (p >= reinterpret_cast<const char*>(&S) && p < reinterpret_cast<const char*>(&S + 1)) return;
    const char* threads = reinterpret_cast<const char*>(S.threads);
    if (p >= threads && p < threads + kMaxThreads * sizeof(Thread)) return;
    report("a %s at <%zx> does not wait for the kernel before", write ? "write" : "read",
           static_cast<size_t>(static_cast<const char*>(pc) - R.base));
}
#else
inline void note_beginning(const void*, bool, const void*) {}
#endif
CUDA_HOST_QUIET inline void note_access(const void* p, size_t bytes, bool write, const void* pc) {
    if (!S.current || S.failed) return;
    note_beginning(p, write, pc);
    note(*S.current, p, bytes, write, pc);
    if (S.failed) suspend();
}
inline void make_shadows() {
    if (!R.now) R.now = 1;
    const auto size = static_cast<size_t>(S.shared_end - S.shared);
    if (!R.fixed && S.shared) R.fixed = static_cast<Byte*>(calloc(size, sizeof(Byte)));
    if (S.dynamic_bytes > R.dynamic_room) {
        free(R.dynamics);
        R.dynamics = static_cast<Byte*>(calloc(R.dynamic_room = S.dynamic_bytes, sizeof(Byte)));
    }
}
struct Atomically {
    CUDA_HOST_QUIET Atomically() { R.in_atomic = true; }
    CUDA_HOST_QUIET ~Atomically() { R.in_atomic = false; }
};
#define CUDA_HOST_HOOK(name, bytes, write)                                                       \
    extern "C" CUDA_HOST_QUIET __attribute__((noinline)) void name(void* p) {                    \
        note_access(p, bytes, write, __builtin_return_address(0));                               \
    }
#define CUDA_HOST_HOOKS(bytes)                                                                   \
    CUDA_HOST_HOOK(__tsan_read##bytes, bytes, false)                                             \
    CUDA_HOST_HOOK(__tsan_write##bytes, bytes, true)                                             \
    CUDA_HOST_HOOK(__tsan_volatile_read##bytes, bytes, false)                                    \
    CUDA_HOST_HOOK(__tsan_volatile_write##bytes, bytes, true)
CUDA_HOST_HOOKS(1)
CUDA_HOST_HOOKS(2)
CUDA_HOST_HOOKS(4)
CUDA_HOST_HOOKS(8)
CUDA_HOST_HOOKS(16)
extern "C" CUDA_HOST_QUIET __attribute__((noinline)) void __tsan_read_range(void* p, size_t n) {
    note_access(p, n, false, __builtin_return_address(0));
}
extern "C" CUDA_HOST_QUIET __attribute__((noinline)) void __tsan_write_range(void* p, size_t n) {
    note_access(p, n, true, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit(void*) {}
#else
inline void note(const Thread&, const void*, size_t, bool, const void*, bool = false) {}
inline void note_meeting(unsigned, unsigned) {}
inline void note_barrier() {}
struct Atomically {};
#endif

// ---------------------------------------------------------------- what lanes exchange

inline float bf16_half(unsigned word, unsigned half) {
    unsigned bits = half ? word & 0xffff0000u : word << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// d[16][8] += a[16][16] b[16][8]; the fragments as PTX lays them over the lanes.
inline void multiply(Thread* warp) {
    float a[16][16], b[8][16];
    for (unsigned l = 0; l < kWarp; l++) {
        unsigned g = l / 4, t = l % 4 * 2;
        for (unsigned h = 0; h < 2; h++) {
            for (unsigned r = 0; r < 4; r++)
                a[g + r % 2 * 8][t + r / 2 * 8 + h] = bf16_half(warp[l].a[r], h);
            for (unsigned r = 0; r < 2; r++) b[g][t + r * 8 + h] = bf16_half(warp[l].b[r], h);
        }
    }
    for (unsigned l = 0; l < kWarp; l++)
        for (unsigned r = 0; r < 4; r++) {
            unsigned row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
            float sum = warp[l].d[r];
            for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[column][k];
            warp[l].d[r] = sum;
        }
}

inline bool is_shared(const void* p, size_t bytes) {
    const char* at = static_cast<const char*>(p);
    const char* dynamic = reinterpret_cast<const char*>(S.dynamic);
    if (at >= dynamic && at + bytes <= dynamic + S.dynamic_bytes) return true;
    return !S.shared || (at >= S.shared && at + bytes <= S.shared_end);
}

// Lane 8 m + r names row r (8 elements, 16 bytes) of matrix m. A lane gets two neighbours of a row;
// of the transposed matrix with .trans.
inline void load_matrices(Thread* warp, unsigned matrices, bool transposed) {
    for (unsigned l = 0; l < matrices * 8; l++)
        if (reinterpret_cast<uintptr_t>(warp[l].row) % 16 || !is_shared(warp[l].row, 16)) {
            report("ldmatrix at %s:%d: the row of lane %u is not 16 aligned bytes of shared memory",
                   warp[l].place.file, warp[l].place.line, l);
            return;
        }
    for (unsigned l = 0; l < matrices * 8; l++)
        note(warp[l], warp[l].row, 16, false, warp[l].pc, true);
    for (unsigned l = 0; l < kWarp; l++)
        for (unsigned m = 0; m < matrices; m++) {
            uint16_t pair[2];
            for (unsigned h = 0; h < 2; h++) {
                unsigned row = l / 4, column = l % 4 * 2 + h;
                if (transposed) std::swap(row, column);
                memcpy(pair + h, static_cast<const char*>(warp[m * 8 + row].row) + column * 2, 2);
            }
            warp[l].a[m] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
        }
}

// ---------------------------------------------------------------- wgmma

// An element of b, [k][n], of a tile in rows of 128 bytes with their pieces swizzled.
inline const unsigned char* element_of(const Product& p, unsigned k, unsigned n) {
    const unsigned start = static_cast<unsigned>(p.b & 0x3fff) << 4;
    const unsigned parts = static_cast<unsigned>(p.b >> 16 & 0x3fff) << 4;
    const unsigned groups = static_cast<unsigned>(p.b >> 32 & 0x3fff) << 4;
    unsigned at = p.by_rows ? start + n / 64 * parts + k / 8 * groups + k % 8 * 128 + n % 64 * 2
                            : start + n / 8 * groups + n % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    return at + 2 <= S.dynamic_bytes ? S.dynamic + at : nullptr;
}
// The warp's part of its i-th product in flight: d[16][n] (+)= a[16][16] b[16][n].
__attribute__((optimize("O3"))) inline void compute(Thread* warp, unsigned i) {
    const Product& first = warp[0].product[i];
    static float a[16][16], b[16][256], d[16][256];
    for (unsigned k = 0; k < 16; k++)
        for (unsigned n = 0; n < first.n; n++) {
            const unsigned char* at = element_of(first, k, n);
            if (!at) return report("wgmma at %s:%d reads beyond the shared memory",
                                   warp[0].place.file, warp[0].place.line);
            uint16_t bits;
            memcpy(&bits, at, 2);
            b[k][n] = bf16_half(bits, 0);
        }
    for (unsigned l = 0; l < kWarp; l++) {
        const Product& p = warp[l].product[i];
        const unsigned g = l / 4, t = l % 4 * 2;
        for (unsigned r = 0; r < 4; r++)
            for (unsigned h = 0; h < 2; h++)
                a[g + r % 2 * 8][t + r / 2 * 8 + h] = bf16_half(p.a[r], h);
        for (unsigned n = 0; n < p.n; n += 8)
            for (unsigned r = 0; r < 4; r++)
                d[g + r / 2 * 8][n + t + r % 2] = p.keep ? p.d[n / 2 + r] : 0.0f;
    }
    for (unsigned row = 0; row < 16; row++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned n = 0; n < first.n; n++) d[row][n] += a[row][k] * b[k][n];
    for (unsigned l = 0; l < kWarp; l++) {
        const Product& p = warp[l].product[i];
        const unsigned g = l / 4, t = l % 4 * 2;
        for (unsigned n = 0; n < p.n; n += 8)
            for (unsigned r = 0; r < 4; r++) p.d[n / 2 + r] = d[g + r / 2 * 8][n + t + r % 2];
    }
}
// Executes the warp's products of all groups but the last `keep`; -1: also of the group that is open.
inline void finish_products(Thread* warp, int keep) {
    unsigned done = 0;
    const unsigned count = warp[0].products, groups = warp[0].groups;
    for (; done < count && !S.failed; done++) {
        if (keep >= 0 && warp[0].product[done].group + static_cast<unsigned>(keep) >= groups) break;
        compute(warp, done);
    }
    for (unsigned l = 0; l < kWarp; l++) {
        Thread& t = warp[l];
        for (unsigned i = done; i < count; i++) t.product[i - done] = t.product[i];
        t.products = count - done;
    }
}
inline void begin_product(Thread* warp) {
    const unsigned last = warp[0].products - 1;
    const Product& first = warp[0].product[last];
    for (unsigned l = 1; l < kWarp; l++) {
        const Product& p = warp[l].product[last];
        if (warp[l].products != last + 1 || p.b != first.b || p.n != first.n || p.keep != first.keep)
            return report("wgmma at %s:%d: lanes %u and 0 differ in what they ask for",
                          warp[l].place.file, warp[l].place.line, l);
    }
    if (first.b >> 62 != 1)
        return report("wgmma at %s:%d: the descriptor names another swizzle than of 128 bytes",
                      warp[0].place.file, warp[0].place.line);
    if (S.seed % 2 == 0) finish_products(warp, -1);  // at once, else at the wait
}

inline uint64_t reduce(Op op, bool is_signed, uint64_t x, uint64_t y) {
    unsigned a = static_cast<unsigned>(x), b = static_cast<unsigned>(y);
    int i = static_cast<int>(a), j = static_cast<int>(b);
    switch (op) {
        case Op::kReduceAdd: return a + b;
        case Op::kReduceAnd: return a & b;
        case Op::kReduceOr: return a | b;
        case Op::kReduceXor: return a ^ b;
        case Op::kReduceMin: return is_signed ? (i < j ? a : b) : (a < b ? a : b);
        default: return is_signed ? (i > j ? a : b) : (a > b ? a : b);
    }
}

// All lanes of `group` are here: work out what each of them gets.
inline void exchange(Thread* warp, unsigned group, Thread& first) {
    uint64_t in[kWarp], combined = 0;
    unsigned ballot = 0;
    bool started = false;
    const Op op = first.place.op;
    for (unsigned l = 0; l < kWarp; l++) {
        if (!(group >> l & 1u)) continue;
        in[l] = warp[l].value;
        ballot |= static_cast<unsigned>(in[l] != 0) << l;
        combined = started ? reduce(op, first.source, combined, in[l]) : in[l];
        started = true;
    }
    if (op == Op::kMma) return multiply(warp);
    if (op == Op::kProduct) return begin_product(warp);
    if (op == Op::kProductWait) return finish_products(warp, first.source);
    if (op == Op::kLdmatrix || op == Op::kLdmatrixTrans)
        return load_matrices(warp, first.source, op == Op::kLdmatrixTrans);
    for (unsigned l = 0; l < kWarp; l++) {
        if (!(group >> l & 1u)) continue;
        Thread& t = warp[l];
        switch (op) {
            case Op::kSyncWarp: break;
            case Op::kShuffle:
                if (!(group >> t.source & 1u))
                    return report("__shfl_sync at %s:%d: lane %u reads lane %d, which is not in the "
                                  "mask %08x", t.place.file, t.place.line, l, t.source, group);
                t.value = in[t.source];
                break;
            case Op::kBallot: t.value = ballot; break;
            case Op::kAll: t.value = ballot == group; break;
            case Op::kAny: t.value = ballot != 0; break;
            case Op::kMatchAny:
                t.value = 0;
                for (unsigned o = 0; o < kWarp; o++)
                    if (group >> o & 1u) t.value |= static_cast<uint64_t>(in[o] == in[l]) << o;
                break;
            default: t.value = combined;
        }
    }
}

// ---------------------------------------------------------------- the schedule

// Lane `l` of the warp keeps `t` waiting for ever: say why.
inline void report_stuck(const Thread& t, unsigned l, unsigned present) {
    const Place& p = t.place;
    const Thread& other = warp_of(t)[l];
    if (!(present >> l & 1u))
        return report("%s at %s:%d names lane %u, which the block does not have", name_of(p.op),
                      p.file, p.line, l);
    if (other.wait == Wait::kEnded)
        return report("%s at %s:%d names lane %u, which has ended", name_of(p.op), p.file, p.line,
                      l);
    report("%s at %s:%d with mask %08x waits for lane %u, which waits in %s at %s:%d with mask %08x",
           name_of(p.op), p.file, p.line, t.mask, l, name_of(other.place.op), other.place.file,
           other.place.line, other.wait == Wait::kWarp ? other.mask : kFull);
}

// No lane of this warp can run: release each group that is complete, or report.
inline void release_warp(unsigned w) {
    Thread* warp = S.threads + w * kWarp;
    const unsigned present = lanes_in(w);
    bool waits = false, released = false;
    for (unsigned l = 0; l < kWarp && !S.failed; l++) {
        if (!(present >> l & 1u) || warp[l].wait != Wait::kWarp) continue;
        waits = true;
        Thread& t = warp[l];
        unsigned group = 0;
        bool complete = true;
        for (unsigned o = 0; o < kWarp && complete; o++) {
            if (!(t.mask >> o & 1u)) continue;
            bool gone = !(present >> o & 1u) || warp[o].wait == Wait::kEnded;
            if (gone && t.place.op == Op::kSyncWarp) continue;  // means the lanes that still run
            complete = !gone && warp[o].wait == Wait::kWarp && warp[o].mask == t.mask &&
                       warp[o].place == t.place &&
                       (t.place.op == Op::kShuffle || warp[o].source == t.source);
            group |= 1u << o;
        }
        if (!complete) continue;
        exchange(warp, group, t);
        if (t.place.op == Op::kSyncWarp) note_meeting(w, group);
        for (unsigned o = 0; o < kWarp; o++)
            if (group >> o & 1u) warp[o].wait = Wait::kNone;
        S.ready[w] |= group, released = true;
    }
    if (!waits || released || S.failed) return;
    for (unsigned l = 0; l < kWarp; l++)
        if (present >> l & 1u && warp[l].wait == Wait::kPoll) return;  // it may still come
    for (unsigned l = 0; l < kWarp; l++) {
        if (!(present >> l & 1u) || warp[l].wait != Wait::kWarp) continue;
        const Thread& t = warp[l];
        for (unsigned o = 0; o < kWarp; o++)
            if (t.mask >> o & 1u &&
                (!(present >> o & 1u) || warp[o].wait != Wait::kWarp || warp[o].mask != t.mask ||
                 !(warp[o].place == t.place)))
                return report_stuck(t, o, present);
    }
    report("lanes of a warp differ in what they ask of %s", name_of(warp[0].place.op));
}

// No thread can run and none waits for its warp: the block barrier opens, or it never will.
inline void release_block() {
    const Thread* first = nullptr;
    const Thread* ended = nullptr;
    uint64_t trues = 0;
    for (unsigned i = 0; i < S.count; i++) {
        const Thread& t = S.threads[i];
        if (t.wait == Wait::kPoll)
            return report("thread %u waits in %s at %s:%d for a phase that nobody ends", i,
                          name_of(t.place.op), t.place.file, t.place.line);
        if (t.wait == Wait::kEnded) {
            ended = &t;
            continue;
        }
        if (!first) first = &t;
        trues += t.value != 0;
        if (!(t.place == first->place))
            return report("divergent barrier: thread %u waits in %s at %s:%d, thread %u in %s at "
                          "%s:%d", number(*first), name_of(first->place.op), first->place.file,
                          first->place.line, i, name_of(t.place.op), t.place.file, t.place.line);
    }
    if (!first) return;
    if (ended)
        return report("thread %u waits in %s at %s:%d, but thread %u has ended", number(*first),
                      name_of(first->place.op), first->place.file, first->place.line,
                      number(*ended));
    note_barrier();
    for (unsigned i = 0; i < S.count; i++) {
        Thread& t = S.threads[i];
        t.value = t.place.op == Op::kSyncThreadsAnd  ? trues == S.count
                  : t.place.op == Op::kSyncThreadsOr ? trues != 0
                                                     : trues;
        t.wait = Wait::kNone;
    }
    for (unsigned w = 0; w < S.warps; w++) S.ready[w] = lanes_in(w);
}

// One turn of a warp: its ready lanes, or with a seed some of them, in shuffled order.
inline void turn(unsigned w) {
    unsigned char order[kWarp];
    unsigned n = 0;
    for (unsigned l = 0; l < kWarp; l++)
        if (S.ready[w] >> l & 1u) order[n++] = static_cast<unsigned char>(l);
    if (S.seed) {
        for (unsigned i = n; i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
        if (!(draw() & 7)) n = 1 + draw(n);
    }
    for (unsigned i = 0; i < n && !S.failed; i++) {
        Thread& t = S.threads[w * kWarp + order[i]];
        resume(t);
        if (t.wait != Wait::kNone) S.ready[w] &= ~(1u << order[i]);
    }
}

inline int choose_warp(int last) {
    unsigned candidates[kMaxThreads / kWarp], n = 0;
    for (unsigned w = 0; w < S.warps; w++)
        if (S.ready[w]) candidates[n++] = w;
    if (!n) return -1;
    if (!S.seed) return static_cast<int>(candidates[0]);
    // Some schedules follow one warp as far as it goes, some change at every turn.
    bool follow = S.seed % 3 == 0 || (S.seed % 3 == 1 && draw() & 7);
    if (follow && last >= 0 && S.ready[last]) return last;
    return static_cast<int>(candidates[draw(n)]);
}

inline void prepare_block() {
    for (unsigned i = 0; i < S.count; i++) {
        Thread& t = S.threads[i];
        // Stacks start at different offsets of a page: equal ones would fight for cache lines.
        void** top = reinterpret_cast<void**>(t.bottom + kStack - (i % 11 * 320 + 64));
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&entry);
        t.stack = top - 6;
        memset(t.stack, 0, 6 * sizeof(void*));
        t.wait = Wait::kNone, t.copies = t.commits = t.atomics = 0, t.source = 0, t.value = 0;
        t.products = t.groups = 0, t.begun = false;
    }
    memset(S.turns, 0, sizeof S.turns);
    S.bulks = 0;
    note_barrier();
    for (unsigned w = 0; w < S.warps; w++) S.ready[w] = lanes_in(w);
    memset(S.dynamic, 0xff, S.dynamic_bytes);
    if (S.shared) memset(S.shared, 0xff, static_cast<size_t>(S.shared_end - S.shared));
}

inline void run_block() {
    prepare_block();
    for (int w = -1; !S.failed;) {
        if (S.expired) return report("does not end within its limit of processor time");
        w = choose_warp(w);
        if (w < 0) {
            release_block();
            if (choose_warp(-1) < 0) {
                if (S.bulks && !S.failed) report("ends while %u bulk copies are in flight", S.bulks);
                return;
            }
            continue;
        }
        turn(static_cast<unsigned>(w));
        if (!S.failed && !S.ready[w]) release_warp(static_cast<unsigned>(w));
    }
}

// ---------------------------------------------------------------- guards and limits

// A fault, or the end of the processor time: give the fiber up and go back to the schedule.
inline void on_signal(int signal, siginfo_t* info, void* context) {
    auto sp = reinterpret_cast<char*>(
        static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP]);
    Thread* t = S.current;
    bool inside = t && sp >= t->bottom - kStack && sp < t->bottom + kStack;
    bool fault = signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE;
    if (!inside) {
        if (!fault) {
            S.expired = 1;
            return;
        }
        ::signal(signal, SIG_DFL);  // not ours: let it happen again
        return;
    }
    char* address = static_cast<char*>(info->si_addr);
    if (!fault)
        report("does not end within its limit of processor time");
    else if (signal == SIGFPE)
        report("divides by zero");
    else if (address >= t->bottom - kPage && address < t->bottom)
        report("needs more than %zu bytes of stack", kStack);
    else
        report("touches the address %p, which is not its memory", info->si_addr);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(nullptr, S.main_bottom, S.main_size);
#endif
    void* dropped;
    baton_switch_stack(&dropped, S.main_stack);
}

class Limits {  // for the time of a launch
  public:
    explicit Limits(double seconds) {
        static char* alternate = static_cast<char*>(malloc(64 * 1024));
        stack_t stack = {alternate, 0, 64 * 1024};
        sigaltstack(&stack, &old_stack_);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
        for (int i = 0; i < kSignals; i++) sigaction(number(i), &action, &old_[i]);
        struct sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = number(0);
        event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_);
        struct itimerspec when = {};
        when.it_value.tv_sec = static_cast<time_t>(seconds);
        const double rest = seconds - static_cast<double>(when.it_value.tv_sec);
        when.it_value.tv_nsec = static_cast<long>(rest * 1e9) + 1;
        timer_settime(timer_, 0, &when, nullptr);
    }
    ~Limits() {
        timer_delete(timer_);
        for (int i = 0; i < kSignals; i++) sigaction(number(i), &old_[i], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }
    Limits(const Limits&) = delete;
    Limits& operator=(const Limits&) = delete;

  private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr int kSignals = 1;  // the sanitizer reports faults itself, with the line
#else
    static constexpr int kSignals = 4;
#endif
    static int number(int i) {
        const int numbers[] = {SIGRTMIN + 7, SIGSEGV, SIGBUS, SIGFPE};
        return numbers[i];
    }
    struct sigaction old_[4];
    stack_t old_stack_;
    timer_t timer_;
};

// The libraries of a process share one set of stacks: guard pages are many mappings, and a process
// may have 65,530. `stacks` is null the first time. Returns null without memory.
inline char* use_stacks(char* stacks) {
    const size_t stride = kStack + kPage, bytes = kMaxThreads * stride;
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!stacks) {
        void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind, -1, 0);
        if (made == MAP_FAILED) return nullptr;
        stacks = static_cast<char*>(made);
        for (size_t i = 0; i < kMaxThreads; i++) mprotect(stacks + i * stride, kPage, PROT_NONE);
    }
    void* threads = mmap(nullptr, kMaxThreads * sizeof(Thread), PROT_READ | PROT_WRITE, kind, -1, 0);
    if (threads == MAP_FAILED) return nullptr;
    S.threads = static_cast<Thread*>(threads);
    for (size_t i = 0; i < kMaxThreads; i++) S.threads[i].bottom = stacks + i * stride + kPage;
    return stacks;
}

#if !defined(__SANITIZE_ADDRESS__)
thread_local char anchor = 0;  // makes sure that this library has a segment of this kind

inline int find_shared(struct dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        auto start = static_cast<char*>(info->dlpi_tls_data);
        if (header.p_type != PT_TLS || !start) continue;
        if (&anchor < start || &anchor >= start + header.p_memsz) continue;
        S.shared = start, S.shared_end = start + header.p_memsz;
#if defined(BATON_RACES)
        R.base = reinterpret_cast<const char*>(info->dlpi_addr);
#endif
        return 1;
    }
    return 0;
}
#endif

inline void number_threads(unsigned n) {
    for (unsigned i = 0; i < n; i++)
        S.threads[i].index = {i % S.block.x, i / S.block.x % S.block.y, i / S.block.x / S.block.y};
}

// Blocks in an order that follows from the seed.
inline void run_grid() {
    const uint64_t blocks = static_cast<uint64_t>(S.grid.x) * S.grid.y * S.grid.z;
    auto order = static_cast<uint32_t*>(malloc(blocks * sizeof(uint32_t)));
    for (uint64_t i = 0; i < blocks; i++) order[i] = static_cast<uint32_t>(i);
    if (S.seed)
        for (uint64_t i = blocks; i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
    for (uint64_t i = 0; i < blocks && !S.failed; i++) {
        S.block_index = {order[i] % S.grid.x, order[i] / S.grid.x % S.grid.y,
                         order[i] / S.grid.x / S.grid.y};
        run_block();
#if !defined(__SANITIZE_ADDRESS__)
        for (size_t g = 0; g < kGuard; g++)
            if (!S.failed && S.dynamic[S.dynamic_bytes + g] != 0xa5)
                report("writes behind its %zu bytes of dynamic shared memory", S.dynamic_bytes);
#endif
    }
    free(order);
}

// ---------------------------------------------------------------- kernels and their arguments

// One letter per parameter: p pointer, f float, i signed and u unsigned integer, s structure; and
// its bytes. For a pointer the bytes are the alignment of what it points to.
template <class A> struct Parameter {
    static constexpr char kind = std::is_floating_point_v<A> ? 'f'
                                 : std::is_integral_v<A>     ? (std::is_signed_v<A> ? 'i' : 'u')
                                                             : 's';
    static constexpr unsigned bytes = sizeof(A);
};
template <class T> struct Parameter<T*> {
    static constexpr char kind = 'p';
    using To = std::conditional_t<std::is_void_v<T>, char, T>;
    static constexpr unsigned bytes = std::alignment_of_v<To>;
};

struct Kernel {
    const char* name;
    unsigned max_threads;
    void* function;
    void (*call)(void*, void**);
    char signature[256];
};

template <class... A, size_t... I>
inline void call_with(void* f, void** values, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(A...)>(f)(*static_cast<std::remove_reference_t<A>*>(values[I])...);
}
template <class... A> inline void call_kernel(void* f, void** values) {
    call_with<A...>(f, values, std::index_sequence_for<A...>{});
}
template <class... A>
inline Kernel kernel(const char* name, void (*f)(A...), unsigned max_threads) {
    Kernel k = {name, max_threads, reinterpret_cast<void*>(f), &call_kernel<A...>, {0}};
    int n = 0;
    ((n += snprintf(k.signature + n, sizeof k.signature - n, "%c%u ", Parameter<A>::kind,
                    Parameter<A>::bytes)), ...);
    return k;
}
constexpr unsigned bounds(unsigned threads = kMaxThreads, ...) { return threads; }

inline const char* launch(const Kernel& k, const unsigned* grid, const unsigned* block,
                          size_t shared_bytes, void** values, uint64_t seed, double seconds) {
    S.failed = false, S.expired = 0, S.current = nullptr;
    S.name = k.name, S.signature = k.signature, S.kernel = k.function, S.call = k.call, S.arguments = values;
    S.grid = {grid[0], grid[1], grid[2]}, S.block = {block[0], block[1], block[2]};
    S.block_index = {0, 0, 0};
    S.count = block[0] * block[1] * block[2], S.warps = (S.count + kWarp - 1) / kWarp;
    S.seed = S.random = seed;
    if (!S.threads) return "no memory for the stacks of the threads";
#if !defined(__SANITIZE_ADDRESS__)
    anchor = 1;
    dl_iterate_phdr(find_shared, nullptr);
#endif
    number_threads(S.count);
    // Its exact size under the address sanitizer, which sees a read behind it too.
    const size_t room = (shared_bytes + kGuard + 127) / 128 * 128;
    S.dynamic = static_cast<unsigned char*>(aligned_alloc(128, room));
    if (!S.dynamic) return "no memory for dynamic shared memory";
    S.dynamic_bytes = shared_bytes;
    memset(S.dynamic + shared_bytes, 0xa5, kGuard);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(S.dynamic + shared_bytes, kGuard);
#endif
#if defined(BATON_RACES)
    make_shadows();
#endif
    unsigned control = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(control | 0x8040);  // denormals are zero, as under -ftz=true
    {
        Limits limits(seconds);
        run_grid();
    }
    __builtin_ia32_ldmxcsr(control);
#if defined(__SANITIZE_ADDRESS__)
    if (S.failed)  // threads that were given up have left their frames behind
        for (unsigned i = 0; i < kMaxThreads; i++)
            __asan_unpoison_memory_region(S.threads[i].bottom, kStack);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(S.dynamic + shared_bytes, kGuard);
#endif
    free(S.dynamic);
    return S.failed ? S.error : nullptr;
}

}  // namespace cuda_host
#include "cuda_words.h"
#include "hopper_words.h"
#endif
