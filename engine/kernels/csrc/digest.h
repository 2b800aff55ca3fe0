/* The digest of payloads packed or unpacked by GPUs; engine/kernels/digest.py defines it.
 *
 * The words' terms may be added in any order, so the compiler can vectorise the loop.
 */
#define DIGEST_PLACE 0x9E3779B185EBCA87
#define DIGEST_START 0x27D4EB2F165667C5
#define DIGEST_MIX_1 0xC2B2AE3D27D4EB4F
#define DIGEST_MIX_2 0x165667B19E3779F9
#define DIGEST_LENGTH 0x85EBCA77C2B2AE63

static inline __attribute__((always_inline)) uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 33) * DIGEST_MIX_1;
    x = (x ^ x >> 29) * DIGEST_MIX_2;
    return x ^ x >> 32;
}

static uint64_t payload_digest(const char *data, int64_t bytes) {
    const uint8_t *at = (const uint8_t *)data;
    int64_t words = bytes / 8;
    uint64_t sum = 0, key = DIGEST_START, last = 0;
    for (int64_t i = 0; i < words; i++, key += DIGEST_PLACE) sum += mixed(word(at + 8 * i) ^ key);
    if (bytes % 8) {
        memcpy(&last, at + 8 * words, (size_t)(bytes % 8));
        sum += mixed(last ^ key);
    }
    return mixed(sum + (uint64_t)bytes * DIGEST_LENGTH);
}
