/* Moves KV blocks: every byte is read once, copied and included in the checksum in the same pass.
 *
 * The checksum is XXH3-64 for inputs of more than 240 bytes, seed 0, as its public specification
 * defines it: 64-byte stripes are multiplied into eight accumulators, which are scrambled after
 * every 16 stripes; the last stripe uses a different key. Blocks are whole stripes, so no stripe
 * straddles two blocks.
 */
#define STRIPE 64
#define ROUND 16 /* stripes between two scrambles */
#define AHEAD 2048 /* bytes to prefetch; the hardware does not prefetch across pages */

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
#define KEY_SCRAMBLE (SECRET + sizeof SECRET - STRIPE)
#define KEY_LAST (SECRET + sizeof SECRET - STRIPE - 7)
#define KEY_MERGE (SECRET + 11)

static const uint64_t SUM_START[8] = {
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
};

typedef struct {
    Sum sum;
    int stripe; /* of the current round */
} Running;

static inline uint64_t word(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint64_t sum_finish(Sum sum, uint64_t bytes) {
    uint64_t part[8], result = bytes * SUM_START[1];
    sum_store(part, sum);
    for (int i = 0; i < 4; i++) {
        unsigned __int128 product = (unsigned __int128)(part[2 * i] ^ word(KEY_MERGE + 16 * i)) *
                                    (part[2 * i + 1] ^ word(KEY_MERGE + 16 * i + 8));
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9;
    return result ^ result >> 32;
}

/* How a stripe is written. */
enum { NOWHERE, CACHED, PAST_CACHE };

static inline __attribute__((always_inline)) Stripe pass(char *to, const char *from, int how) {
    Stripe s = s_load(from);
    if (how == CACHED) s_store(to, s);
    if (how == PAST_CACHE) s_stream(to, s);
    return s;
}

/* Move `count` stripes and add them to the checksum. Prefetching continues at `next`, which is read
 * afterwards: consecutive blocks are rarely adjacent. */
static inline __attribute__((always_inline)) Running take_in(Running r, char *to, const char *from,
                                                             int64_t count, const char *next,
                                                             int how) {
    while (count) {
        if (r.stripe == 0 && count >= ROUND) {
            int64_t left = STRIPE * count;
            const char *ahead = left > AHEAD ? from + AHEAD : next + (AHEAD - left);
            for (int i = 0; i < ROUND; i++) {
                __builtin_prefetch(ahead + STRIPE * i);
                Stripe s = pass(to + STRIPE * i, from + STRIPE * i, how);
                r.sum = sum_add(r.sum, s, SECRET + 8 * i);
            }
            r.stripe = ROUND;
            to += STRIPE * ROUND, from += STRIPE * ROUND, count -= ROUND;
        } else {
            r.sum = sum_add(r.sum, pass(to, from, how), SECRET + 8 * r.stripe++);
            to += STRIPE, from += STRIPE, count--;
        }
        if (r.stripe == ROUND) {
            r.sum = sum_scramble(r.sum, KEY_SCRAMBLE);
            r.stripe = 0;
        }
    }
    return r;
}

/* Address of block `i` at one end of the move. */
static inline char *block_at(const Move *m, End end, int64_t i) {
    int64_t block = end.ids ? i / m->count * end.blocks + end.ids[i % m->count] : i;
    return end.data + block * (int64_t)m->bytes;
}

static inline __attribute__((always_inline)) uint64_t move_all(const Move *m, int how) {
    int64_t stripes = (int64_t)(m->bytes / STRIPE), all = m->layers * m->count;
    Running r = {sum_load(SUM_START), 0};
    const char *from = block_at(m, m->from, 0);
    for (int64_t i = 0; i < all - 1; i++) {
        const char *next = block_at(m, m->from, i + 1);
        r = take_in(r, how == NOWHERE ? NULL : block_at(m, m->to, i), from, stripes, next, how);
        from = next;
    }
    char *to = how == NOWHERE ? NULL : block_at(m, m->to, all - 1);
    int64_t at = STRIPE * (stripes - 1);
    r = take_in(r, to, from, stripes - 1, from + at, how);
    r.sum = sum_add(r.sum, pass(to + at, from + at, how), KEY_LAST);
    if (how == PAST_CACHE) s_fence();
    return sum_finish(r.sum, (uint64_t)all * m->bytes);
}

/* Received blocks are read milliseconds later, by another thread. Writing them past the
 * cache halves the cost, because a plain store first reads the line it overwrites. A payload is
 * sent immediately, so it is written through the cache. */
#define STREAM_MIN (256 << 10)

static uint64_t move(const Move *m) {
    if (!m->to.data) return move_all(m, NOWHERE);
    int aligned = (uintptr_t)m->to.data % STRIPE == 0;
    int large = m->layers * m->count * (int64_t)m->bytes >= STREAM_MIN;
    return m->to.ids && aligned && large ? move_all(m, PAST_CACHE) : move_all(m, CACHED);
}

static uint64_t checksum(const char *data, int64_t bytes) {
    Running r = {sum_load(SUM_START), 0};
    int64_t count = (bytes - 1) / STRIPE;
    r = take_in(r, NULL, data, count, data + STRIPE * count, NOWHERE);
    return sum_finish(sum_add(r.sum, s_load(data + bytes - STRIPE), KEY_LAST), (uint64_t)bytes);
}
