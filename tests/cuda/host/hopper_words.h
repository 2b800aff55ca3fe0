// The words of engine/kernels/csrc/hopper.cuh as functions of the fibers in cuda_host.h.
//
// A product is executed when its warp has issued it, or, with an odd seed, as late as the wait for its group: what is
// overwritten too early, or read too early, gives other numbers. Until then its results are NaN.
// Copies that a barrier waits for land when their thread arrives, after others had their turn. A phase
// of a barrier orders all accesses before it, also those that only another barrier orders.
#pragma once
#ifndef CUDA_HOST_QUIET  // else: not watched for races, as the words of barriers are
#define CUDA_HOST_QUIET
#endif

namespace cuda_host {
struct Phase {  // 8 bytes of shared memory
    uint16_t pending, arrivals;
    uint32_t ended;
};
CUDA_HOST_QUIET static inline __attribute__((always_inline)) Phase& phase_at(unsigned barrier, Place place) {
    if (barrier % 8 || barrier + 8 > S.dynamic_bytes)
        CUDA_HOST_FAIL("%s at %s:%d: no place for a barrier", name_of(place.op), place.file, place.line);
    return *reinterpret_cast<Phase*>(S.dynamic + barrier);
}
CUDA_HOST_QUIET static __attribute__((noinline)) void arrive(unsigned barrier, Place place) {
    Phase& p = phase_at(barrier, place);
    if (p.pending == 0 || p.pending > p.arrivals)
        CUDA_HOST_FAIL("%s at %s:%d: no barrier there", name_of(place.op), place.file, place.line);
    if (--p.pending) return;
    p.pending = p.arrivals, p.ended++;
    note_barrier();
    wake_polling();
}
CUDA_HOST_QUIET static __attribute__((noinline)) void set_up(unsigned barrier, unsigned arrivals,
                                                             Place place) {
    const uint16_t n = static_cast<uint16_t>(arrivals);
    phase_at(barrier, place) = {n, n, 0};
}
CUDA_HOST_QUIET static __attribute__((noinline)) bool is_over(unsigned barrier, unsigned parity,
                                                              Place place) {
    return (phase_at(barrier, place).ended & 1) != parity;
}
static inline void let_others_run() {
    for (unsigned i = S.seed ? draw(3) : 0; i; i--) suspend();
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
static inline void barrier_wait(unsigned barrier, unsigned parity, CUDA_HOST_WHERE) {
    while (!cuda_host::is_over(barrier, parity, CUDA_HOST_AT(kPhase)))
        cuda_host::poll(CUDA_HOST_AT(kPhase));
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
