/* The blocks of a GGUF file as panels; see quantized.h. The products are in quantized_body.h. */
#include "quantized.h"

#include <string.h>

#include "quantized_values.h"

/* Bytes of 32 weights of a panel; the scales before them: d, minimum, and 6 bits or 8 per part. */
#define BODY(BITS) (64 * (BITS))
#define WIDE_HEAD (64 + 256)

const QuantizedKind quantized_kinds[QUANTIZED_KINDS] = {
    [Q4_K] = {"Q4_K", 256, 144, 256, WIDE_HEAD + 8 * BODY(4)},
    [Q5_K] = {"Q5_K", 256, 176, 256, WIDE_HEAD + 8 * BODY(5)},
    [Q6_K] = {"Q6_K", 256, 210, 256, WIDE_HEAD + 8 * BODY(6)},
    [Q3_K] = {"Q3_K", 256, 110, 256, WIDE_HEAD + 8 * BODY(3)},
    [Q8_0] = {"Q8_0", 32, 34, 64, 64 + 2 * BODY(8)},
    [Q5_0] = {"Q5_0", 32, 22, 64, 64 + 2 * BODY(5)},
    [Q4_0] = {"Q4_0", 32, 18, 64, 64 + 2 * BODY(4)},
    [IQ4_NL] = {"IQ4_NL", 32, 18, 64, 64 + 2 * BODY(4)},
    [Q4_1] = {"Q4_1", 32, 20, 64, 128 + 2 * BODY(4)},
    [Q5_1] = {"Q5_1", 32, 24, 64, 128 + 2 * BODY(5)},
};

int64_t quantized_x_bytes(const QuantizedRows *r) {
    int64_t rows = (r->rows + 2 * TOGETHER - 1) / (2 * TOGETHER) * (2 * TOGETHER);
    return rows * (r->wide ? r->in / 256 * X_WIDE : r->in / 32 * X_NARROW);
}

/* One block of a file: weights as unsigned numbers, scales of parts. */
typedef struct {
    uint8_t q[256];
    uint8_t d[2], min[2];   /* float16 */
    uint8_t scales[16], mins[8];
} Decoded;

/* Scale j of eight 6-bit scales and minimums in 12 bytes. */
static void six_bits(const uint8_t *s, int j, uint8_t *scale, uint8_t *min) {
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
    *min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6 << 4);
}

static void decode_45_k(const uint8_t *b, int five, Decoded *to) {
    const uint8_t *high = b + 16, *low = b + (five ? 48 : 16);
    memcpy(to->d, b, 2);
    memcpy(to->min, b + 2, 2);
    for (int j = 0; j < 8; j++) {
        six_bits(b + 4, j, &to->scales[j], &to->mins[j]);
        for (int l = 0; l < 32; l++) {
            int q = low[j / 2 * 32 + l] >> j % 2 * 4 & 15;
            to->q[32 * j + l] = (uint8_t)(q | (five ? (high[l] >> j & 1) << 4 : 0));
        }
    }
}

static void decode_6_k(const uint8_t *b, Decoded *to) {
    const uint8_t *low = b, *high = b + 128;
    memcpy(to->scales, b + 192, 16);
    memcpy(to->d, b + 208, 2);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, part = i % 128 / 32, l = i % 32;
        int q = low[half * 64 + part % 2 * 32 + l] >> part / 2 * 4 & 15;
        to->q[i] = (uint8_t)(q | (high[half * 32 + l] >> part * 2 & 3) << 4);
    }
}

static void decode_3_k(const uint8_t *b, Decoded *to) {
    const uint8_t *high = b, *low = b + 32, *s = b + 96;
    memcpy(to->d, b + 108, 2);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, part = i % 128 / 32, l = i % 32;
        int q = low[half * 32 + l] >> part * 2 & 3;
        to->q[i] = (uint8_t)(q | (high[l] >> (half * 4 + part) & 1) << 2);
    }
    for (int i = 0; i < 16; i++) {
        int six = (s[i % 8] >> i / 8 * 4 & 15) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4;
        to->scales[i] = (uint8_t)(six - 32);
    }
}

/* Blocks of 32: d, a minimum, fifth bits, nibbles. */
static void decode_narrow(int kind, const uint8_t *b, Decoded *to) {
    uint32_t high = 0;
    memcpy(to->d, b, 2);
    b += 2;
    if (kind == Q8_0) {
        for (int l = 0; l < 32; l++) to->q[l] = b[l] ^ 0x80;
        return;
    }
    if (kind == Q4_1 || kind == Q5_1) {
        memcpy(to->min, b, 2);
        b += 2;
    }
    if (kind == Q5_0 || kind == Q5_1) {
        for (int i = 0; i < 4; i++) high |= (uint32_t)b[i] << 8 * i;
        b += 4;
    }
    for (int l = 0; l < 32; l++)
        to->q[l] = (uint8_t)((b[l % 16] >> l / 16 * 4 & 15) | (high >> l & 1) << 4);
}

static void decode(int kind, const uint8_t *b, Decoded *to) {
    if (kind == Q4_K || kind == Q5_K) decode_45_k(b, kind == Q5_K, to);
    else if (kind == Q6_K) decode_6_k(b, to);
    else if (kind == Q3_K) decode_3_k(b, to);
    else decode_narrow(kind, b, to);
}

/* 32 weights of one output; the bytes were zero before. */
static void put_body(int kind, const uint8_t *q, uint8_t *to) {
    for (int k = 0; k < 32; k++, q++) {
        int g = k / 4, at = k % 4;
        switch (kind) {
        case Q8_0:
            to[g * 64 + at] = *q;
            break;
        case Q3_K:
            to[g / 4 * 64 + at] |= (uint8_t)((*q & 3) << g % 4 * 2);
            to[128 + at] |= (uint8_t)(*q >> 2 << g);
            break;
        default:
            to[g / 2 * 64 + at] |= (uint8_t)((*q & 15) << g % 2 * 4);
            if (kind == Q5_K || kind == Q5_0 || kind == Q5_1)
                to[256 + at] |= (uint8_t)(*q >> 4 << g);
            if (kind == Q6_K) to[256 + g / 4 * 64 + at] |= (uint8_t)(*q >> 4 << g % 4 * 2);
        }
    }
}

static void put_wide(int kind, const Decoded *b, uint8_t *to, int64_t o) {
    int64_t body = (quantized_kinds[kind].step - WIDE_HEAD) / 8;
    memcpy(to + o * 2, b->d, 2);
    memcpy(to + 32 + o * 2, b->min, 2);
    int pairs = kind == Q4_K || kind == Q5_K; /* of minimums, after eight scales */
    for (int j = 0; j < (pairs ? 8 : 16); j++) to[64 + j * PANEL + o] = b->scales[j];
    for (int j = 0; j < (pairs ? 8 : 0); j++) to[192 + j / 2 * 32 + o * 2 + j % 2] = b->mins[j];
    for (int j = 0; j < 8; j++) put_body(kind, b->q + 32 * j, to + WIDE_HEAD + j * body + o * 4);
}

static void put_narrow(int kind, const Decoded *b, uint8_t *to, int64_t o, int64_t second) {
    int64_t head = kind == Q4_1 || kind == Q5_1 ? 128 : 64;
    int64_t body = (quantized_kinds[kind].step - head) / 2;
    memcpy(to + second * 32 + o * 2, b->d, 2);
    if (head == 128) memcpy(to + 64 + second * 32 + o * 2, b->min, 2);
    put_body(kind, b->q, to + head + second * body + o * 4);
}

void pack_quantized(int kind, const uint8_t *blocks, uint8_t *panels, int64_t start, int64_t out,
                    int64_t in) {
    const QuantizedKind *k = &quantized_kinds[kind];
    int64_t steps = (in + k->span - 1) / k->span, count = in / k->weights;
    int64_t each = k->span / k->weights;
    for (int64_t row = 0; row < out; row++) {
        int64_t c = start + row;
        uint8_t *panel = panels + c / PANEL * steps * k->step;
        for (int64_t i = 0; i < count; i++, blocks += k->bytes) {
            Decoded b = {.d = {0}};
            decode(kind, blocks, &b);
            uint8_t *to = panel + i / each * k->step;
            if (k->weights == 256) put_wide(kind, &b, to, c % PANEL);
            else put_narrow(kind, &b, to, c % PANEL, i % each);
        }
    }
}

static void wide_floats(int kind, const Decoded *b, float *y) {
    float d = of_half(b->d), min = of_half(b->min);
    for (int i = 0; i < 256; i++) {
        if (kind == Q6_K) y[i] = d * (int8_t)b->scales[i / 16] * (float)(b->q[i] - 32);
        else if (kind == Q3_K) y[i] = d * (int8_t)b->scales[i / 16] * (float)(b->q[i] - 4);
        else y[i] = d * b->scales[i / 32] * b->q[i] - min * b->mins[i / 32];
    }
}

static void narrow_floats(int kind, const Decoded *b, float *y) {
    float d = of_half(b->d), min = of_half(b->min);
    for (int i = 0; i < 32; i++) {
        if (kind == Q4_1 || kind == Q5_1) y[i] = d * b->q[i] + min;
        else if (kind == IQ4_NL) y[i] = d * (float)(iq4_nl[b->q[i]] - 128);
        else y[i] = d * (float)(b->q[i] - (kind == Q8_0 ? 128 : kind == Q5_0 ? 16 : 8));
    }
}

void dequantize_row(int kind, const uint8_t *blocks, float *y, int64_t in) {
    const QuantizedKind *k = &quantized_kinds[kind];
    for (int64_t i = 0; i < in; i += k->weights, blocks += k->bytes) {
        Decoded b = {.d = {0}};
        decode(kind, blocks, &b);
        if (k->weights == 256) wide_floats(kind, &b, y + i);
        else narrow_floats(kind, &b, y + i);
    }
}
