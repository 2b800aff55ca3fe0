// The words of engine/kernels/csrc/hopper.cuh as functions of the fibers in cuda_host.h.
//
// A product is executed when its warp has issued it, or, with an odd seed, as late as the wait for its group: what is
// overwritten too early, or read too early, gives other numbers. Until then its results are NaN.
// Copies that a barrier waits for land when their thread arrives, after others had their turn. Bulk copies
// land at once or, with an odd seed, one by one in any order while a thread waits for a barrier. A phase
// of a barrier orders all accesses before it, also those that only another barrier orders.
#pragma once
#ifndef CUDA_HOST_QUIET  // else: not watched for races, as the words of barriers are
#define CUDA_HOST_QUIET
#endif

namespace cuda_host {
struct Phase {  // 8 bytes of shared memory
    uint16_t pending, arrivals;
    int32_t bytes : 24;  // of bulk copies that it waits for
    uint32_t ended : 8;
};
CUDA_HOST_QUIET static inline __attribute__((always_inline)) Phase& phase_at(unsigned barrier, Place place) {
    if (barrier % 8 || barrier + 8 > S.dynamic_bytes)
        CUDA_HOST_FAIL("%s at %s:%d: no place for a barrier", name_of(place.op), place.file, place.line);
    return *reinterpret_cast<Phase*>(S.dynamic + barrier);
}
CUDA_HOST_QUIET static inline void settle(Phase& p) {
    if (p.pending || p.bytes) return;
    p.pending = p.arrivals, p.ended++;
    note_barrier();
    wake_polling();
}
CUDA_HOST_QUIET static __attribute__((noinline)) void arrive(unsigned barrier, Place place) {
    Phase& p = phase_at(barrier, place);
    if (p.pending == 0 || p.pending > p.arrivals)
        CUDA_HOST_FAIL("%s at %s:%d: no barrier there", name_of(place.op), place.file, place.line);
    p.pending--;
    settle(p);
}
CUDA_HOST_QUIET static __attribute__((noinline)) void set_up(unsigned barrier, unsigned arrivals,
                                                             Place place) {
    const uint16_t n = static_cast<uint16_t>(arrivals);
    phase_at(barrier, place) = {n, n, 0, 0};
}
CUDA_HOST_QUIET static __attribute__((noinline)) bool is_over(unsigned barrier, unsigned parity,
                                                              Place place) {
    return (phase_at(barrier, place).ended & 1) != parity;
}
static inline void let_others_run() {
    for (unsigned i = S.seed ? draw(3) : 0; i; i--) suspend();
}
// A map as HostDevice.tensor_map makes it.
constexpr uint64_t kMapMagic = 0x70616d5f6f746162ull;
struct HostMap {
    uint64_t magic, address, rows, columns, box_rows;
};
constexpr unsigned kBoxBytes = 128;  // of a row
// Row r of a box goes to the place where its 16-byte pieces are swizzled by bits of the address.
CUDA_HOST_QUIET static __attribute__((noinline)) void land_bulk(unsigned which, Place place) {
    const Bulk b = S.bulk[which];
    S.bulk[which] = S.bulk[--S.bulks];
    for (unsigned row = 0; row < b.rows; row++)
        for (unsigned piece = 0; piece < kBoxBytes; piece += 16) {
            const unsigned at = b.to + row * kBoxBytes + piece;
            unsigned char* to = S.dynamic + (at ^ (at >> 3 & 0x70));
            note(*b.by, to, 16, true, __builtin_return_address(0));
            if (row < b.filled) memcpy(to, b.from + row * b.stride + piece, 16);
            else memset(to, 0, 16);
        }
    Phase& p = phase_at(b.barrier, place);
    p.bytes -= static_cast<int>(b.rows * kBoxBytes);
    settle(p);
}
CUDA_HOST_QUIET static __attribute__((noinline)) void copy_box(unsigned to, const void* map, int column,
                                                               int row, unsigned barrier, Place place) {
    HostMap m;
    memcpy(&m, map, sizeof m);
    if (m.magic != kMapMagic || column < 0 || row < 0 || column * 2u + kBoxBytes > m.columns * 2u)
        CUDA_HOST_FAIL("bulk copy at %s:%d: no map, or a box outside of it", place.file, place.line);
    const unsigned rows = static_cast<unsigned>(m.box_rows), bytes = rows * kBoxBytes;
    if (to % 128 || to + bytes > S.dynamic_bytes)
        CUDA_HOST_FAIL("bulk copy at %s:%d: the target is not aligned, or outside", place.file, place.line);
    if (S.bulks == kMaxBulks)
        CUDA_HOST_FAIL("bulk copy at %s:%d: more than %u in flight", place.file, place.line, kMaxBulks);
    const uint64_t left = static_cast<uint64_t>(row) < m.rows ? m.rows - static_cast<uint64_t>(row) : 0;
    const size_t stride = m.columns * 2;
    const unsigned char* from = reinterpret_cast<const unsigned char*>(m.address) +
                                static_cast<uint64_t>(row) * stride + static_cast<unsigned>(column) * 2;
    for (unsigned i = 0; i < bytes; i += 16)
        note(*S.current, S.dynamic + to + i, 16, true, __builtin_return_address(0));
    memset(S.dynamic + to, 0xff, bytes);  // from now on the old bytes may be gone
    S.bulk[S.bulks++] = {to, from, stride, rows, left < rows ? static_cast<unsigned>(left) : rows, barrier,
                         S.current};
    if (S.seed % 2 == 0) land_bulk(S.bulks - 1, place);
    else wake_polling();
}
static __attribute__((noinline)) void issue(float* d, const unsigned* a, uint64_t b, unsigned n, bool keep,
                                            bool by_rows, Place place) {
    Thread& t = *S.current;
    if (t.products == kMaxProducts)
        CUDA_HOST_FAIL("wgmma at %s:%d: more than %u products in flight", place.file, place.line,
                       kMaxProducts);
    if (!keep) memset(d, 0xff, n / 2 * sizeof(float));
    t.product[t.products++] = {d, a, b, n, t.groups, keep, by_rows};
    t.source = 0;
    wait_for_warp(kFull, place);
}
}  // namespace cuda_host

struct TensorMap;

static inline unsigned shared_address(const void* p) {
    return static_cast<unsigned>(static_cast<const unsigned char*>(p) - cuda_host::S.dynamic);
}
static inline void wgmma_fence() {}
static inline void wgmma_commit() { cuda_host::S.current->groups++; }
template <int kKeep> static __forceinline__ void wgmma_wait(CUDA_HOST_WHERE) {
    cuda_host::S.current->source = kKeep;
    cuda_host::wait_for_warp(cuda_host::kFull, CUDA_HOST_AT(kProductWait));
}
template <int N> static inline void keep_order(float (&)[N]) {}
static __forceinline__ void wgmma_scores(float (&d)[64], const unsigned* a, unsigned long long b, int keep,
                                         CUDA_HOST_WHERE) {
    cuda_host::issue(d, a, b, 128, keep != 0, false, CUDA_HOST_AT(kProduct));
}
template <int N> static __forceinline__ void wgmma_values(float (&d)[N], const unsigned* a,
                                                          unsigned long long b, CUDA_HOST_WHERE) {
    cuda_host::issue(d, a, b, 2 * N, true, true, CUDA_HOST_AT(kProduct));
}

static inline void barrier_init(unsigned barrier, unsigned arrivals, CUDA_HOST_WHERE) {
    cuda_host::set_up(barrier, arrivals, CUDA_HOST_AT(kPhase));
}
static inline void barrier_arrive(unsigned barrier, CUDA_HOST_WHERE) {
    cuda_host::arrive(barrier, CUDA_HOST_AT(kPhase));
}
static inline void barrier_arrive_after_copies(unsigned barrier, CUDA_HOST_WHERE) {
    cuda_host::let_others_run();
    cp_async_wait_all();
    cuda_host::arrive(barrier, CUDA_HOST_AT(kPhase));
}
static inline void barrier_arrive_expecting(unsigned barrier, unsigned bytes, CUDA_HOST_WHERE) {
    cuda_host::phase_at(barrier, CUDA_HOST_AT(kPhase)).bytes += static_cast<int>(bytes);
    cuda_host::arrive(barrier, CUDA_HOST_AT(kPhase));
}
static inline void bulk_copy(unsigned to, const TensorMap* map, int column, int row, unsigned barrier,
                             CUDA_HOST_WHERE) {
    cuda_host::copy_box(to, map, column, row, barrier, CUDA_HOST_AT(kPhase));
}
static inline void barrier_wait(unsigned barrier, unsigned parity, CUDA_HOST_WHERE) {
    while (!cuda_host::is_over(barrier, parity, CUDA_HOST_AT(kPhase))) {
        if (cuda_host::S.bulks) cuda_host::let_others_run();
        if (cuda_host::S.bulks)
            cuda_host::land_bulk(cuda_host::draw(cuda_host::S.bulks), CUDA_HOST_AT(kPhase));
        else if (!cuda_host::is_over(barrier, parity, CUDA_HOST_AT(kPhase)))
            cuda_host::poll(CUDA_HOST_AT(kPhase));
    }
}
static inline void shared_fence_for_wgmma() {}
static inline void barriers_ready() {}

static inline void turn_give(int number, int threads) {
    auto& turn = cuda_host::S.turns[number];
    if (++turn.count < static_cast<unsigned>(threads)) return;
    turn.count = 0, turn.phase++;
    cuda_host::note_barrier();
    cuda_host::wake_polling();
}
static inline void turn_wait(int number, int threads, CUDA_HOST_WHERE) {
    const unsigned phase = cuda_host::S.turns[number].phase;
    turn_give(number, threads);
    while (cuda_host::S.turns[number].phase == phase) cuda_host::poll(CUDA_HOST_AT(kTurn));
}
template <int kRegisters> static inline void fewer_registers() {}
template <int kRegisters> static inline void more_registers() {}

static inline void cp_async16_fill_at(unsigned to, const void* from, unsigned bytes) {
    cp_async16_fill(cuda_host::S.dynamic + to, from, bytes);
}
static inline void ldmatrix_x4_at(unsigned* r, unsigned row) {
    ldmatrix_x4(r, cuda_host::S.dynamic + row);
}
