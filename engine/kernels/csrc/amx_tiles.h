/* The matrix tiles of AMX: instructions, shapes and detection.
 *
 * TILE_INSTRUCTIONS names a header with functions in place of the instructions; tests compute them on
 * processors without AMX (tests/engine/kernels/emulated/instructions.h).
 *
 * All kernels use the tiles alike: 0..3 hold sums, 4 and 5 rows, 6 and 7 weights, keys or values.
 */
#include <immintrin.h>
#include <stdint.h>

#ifdef TILE_INSTRUCTIONS
#include TILE_INSTRUCTIONS
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define tile_configure(CONFIG) _tile_loadconfig(CONFIG)
#define tile_release() _tile_release()
#define tile_zero(T) _tile_zero(T)
#define tile_load(T, FROM, STRIDE) _tile_loadd(T, FROM, STRIDE)
/* Bypasses the first-level cache. */
#define tile_stream(T, FROM, STRIDE) _tile_stream_loadd(T, FROM, STRIDE)
#define tile_store(T, TO, STRIDE) _tile_stored(T, TO, STRIDE)
/* T += A times B of bfloat16, of int8 with int8, of int8 with uint8 */
#define tile_halves(T, A, B) _tile_dpbf16ps(T, A, B)
#define tile_signed(T, A, B) _tile_dpbssd(T, A, B)
#define tile_unsigned(T, A, B) _tile_dpbsud(T, A, B)

/* Whether the processor has tiles of bfloat16 and int8, and the system lets this process and all its
 * threads use them. */
static inline int may_use_tiles(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return 0; /* amx-bf16, -tile, -int8 */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
}
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row */

/* Without a barrier, the compiler moves plain loads and stores past tile instructions. */
#define FENCE() __asm__ volatile("" ::: "memory")

/* `tall` rows of `bytes`, and weights for so many bytes of a row. */
static inline void configure(int64_t tall, int64_t bytes) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.bytes[t] = (uint16_t)(t == 4 || t == 5 ? bytes : TILE_BYTES);
        config.rows[t] = (uint8_t)(t < 6 ? tall : bytes / 4);
    }
    __asm__ volatile("" ::"r"(&config) : "memory");
    tile_configure(&config);
}
