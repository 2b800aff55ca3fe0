/* Processes queries over their tiles, from the first key to the output. */

#include "tiles.h"

/* Rows times heads of a group that are processed together. */
#define QUERIES_TOGETHER 96

typedef struct {
    const Attention *a;
    int64_t count;     /* queries: rows * group, row-major */
    int64_t padded;    /* dim rounded up to whole vectors */
    float *q;          /* [count, dim], scaled */
    float *keys;       /* transposed tile: [TILE_KEYS / STRIP, dim, STRIP] */
    float *values;     /* tile, [TILE_KEYS, padded], if it must be copied */
    float *scores;     /* [count, TILE_KEYS] */
    float *sums;       /* [count, padded] */
    float *weight;     /* [count, LANES] partial sums of the softmax */
    float *peak;       /* [count] largest score so far, or a score near it */
    float *rows;       /* keys and values of the tile, unless the cache has floats */
} Walk;

/* Start the queries of a head of the current rows. */
static void begin(Walk *w, const Place *at) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    w->count = at->rows * group;
    for (int64_t i = 0; i < w->count; i++) {
        int64_t head = at->kv_head * group + i % group;
        const float *q = a->q + ((at->row + i / group) * a->heads + head) * a->dim;
        for (int64_t d = 0; d < a->dim; d++) w->q[i * a->dim + d] = q[d] * a->scale;
        w->peak[i] = -INFINITY;
    }
    memset(w->sums, 0, (size_t)(w->count * w->padded) * sizeof(float));
    memset(w->weight, 0, (size_t)(w->count * LANES) * sizeof(float));
}

static void finish(const Walk *w, const Place *at) {
    const Attention *a = w->a;
    int64_t group = a->heads / a->kv_heads;
    for (int64_t i = 0; i < w->count; i++) {
        int64_t head = at->kv_head * group + i % group;
        float *out = a->out + ((at->row + i / group) * a->heads + head) * a->dim;
        float share = 1.0f / v_total(v_load(w->weight + i * LANES));
        for (int64_t d = 0; d < a->dim; d++) out[d] = w->sums[i * w->padded + d] * share;
    }
}

/* Opens and processes one tile, while `next` is prefetched. */
typedef void Visit(const Walk *, const Place *, Tile *, const Tile *next);

/* Units of a walk: the KV heads of the rows that are processed together. */
static int64_t units_of(const Attention *a, int64_t together) {
    int64_t units = 0;
    for (int64_t s = 0; s < a->sequences; s++)
        units += (a->offsets[s + 1] - a->offsets[s] + together - 1) / together * a->kv_heads;
    return units;
}

/* Go to the first tile of a unit. */
static void enter_unit(const Attention *a, int64_t unit, int64_t together, Place *p) {
    int64_t group = unit / a->kv_heads, s = 0, groups;
    for (;; s++, group -= groups) {
        groups = (a->offsets[s + 1] - a->offsets[s] + together - 1) / together;
        if (group < groups) break;
    }
    p->sequence = s;
    enter(a, a->offsets[s] + group * together, together, p);
    p->kv_head = unit % a->kv_heads;
}

/* Visit the tiles of the units from..to, located one ahead of use. `ready` is called for new
 * queries. */
static void walk(Walk *w, int64_t together, int64_t from, int64_t to,
                 void (*ready)(const Walk *, const Place *), Visit *visit) {
    const Attention *a = w->a;
    Place here = {0}, there;
    Tile tiles[2], *tile = tiles, *next = tiles + 1;
    enter_unit(a, from, together, &here);
    find_tile(a, &here, tile);
    for (int64_t left = to - from; left > 0; here = there) {
        int last = here.start + TILE_KEYS > here.high;
        there = here;
        left -= last;
        if (left > 0) {
            advance(a, together, &there);
            find_tile(a, &there, next);
        }
        if (here.start == first_start(&here)) {
            begin(w, &here);
            if (ready) ready(w, &here);
        }
        visit(w, &here, tile, left > 0 ? next : tile);
        if (last) finish(w, &here);
        Tile *done = tile;
        tile = next, next = done;
    }
}

static float *cut(float **from, int64_t floats) {
    float *piece = *from;
    *from += (floats + 15) / 16 * 16;
    return piece;
}

typedef int Attend(void *shared, int64_t from, int64_t to, int seat);
typedef struct {
    const Attention *a;
    int64_t together, most, padded;
    float *memory;
    int64_t floats; /* of each thread's memory */
} Shared;

/* Cut the memory of a walk, except tile and rows, from that of the thread. */
static Walk begin_walk(const Shared *s, int seat, float **more) {
    *more = s->memory + seat * s->floats;
    Walk w = {.a = s->a, .padded = s->padded};
    w.q = cut(more, s->most * s->a->dim);
    w.scores = cut(more, s->most * TILE_KEYS);
    w.sums = cut(more, s->most * s->padded);
    w.weight = cut(more, s->most * LANES);
    w.peak = cut(more, s->most);
    return w;
}
#define PIECES_OF_WALK 5

/* Divide the walk among threads. `most`: queries together; `floats`: a thread's memory beside its walk,
 * which `attend` cuts into so many `pieces`. -1 without memory. */
static int attend_all(const Attention *a, Attend *attend, int64_t together, int64_t most,
                      int64_t padded, int64_t floats, int64_t pieces) {
    floats += most * (a->dim + TILE_KEYS + padded + LANES + 1) + (PIECES_OF_WALK + pieces) * 16;
    Shared s = {a, together, most, padded, NULL, (floats + 15) / 16 * 16};
    void *memory = malloc((size_t)(s.floats * a->threads) * sizeof(float) + 64);
    if (!memory) return -1;
    s.memory = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    int failed = run(a->threads, units_of(a, together), 1, attend, &s);
    free(memory);
    return failed;
}
