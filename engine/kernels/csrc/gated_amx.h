/* The gated MLP on tiles: gate, up and intermediate results stay in the caches.
 *
 * A panel of gate and the same panel of up are multiplied with the same rows. The product of both,
 * rounded once, is stored directly in the tile layout of the last matrix. The arithmetic of a row
 * does not depend on the number of rows.
 */

/* Rows of x and their intermediate results that fit into the second-level cache beside the weights. */
#define GATED_BYTES (3 << 19)

/* 1 / d with a relative error of 2e-7, for d in 1..2^125: a first guess by mirroring the exponent
 * around 1, then three Newton steps. (The processors' own estimates differ between models.) */
static inline vf v_inverse(vf d) {
    vf y = _mm512_castsi512_ps(
        _mm512_sub_epi32(_mm512_set1_epi32(0x7ef311c7), _mm512_castps_si512(d)));
    for (int i = 0; i < 3; i++) y = v_fma(v_sub(v_set(1), v_mul(d, y)), y, y);
    return y;
}

/* silu(gate) * up */
static inline vf v_gated(vf gate, vf up) {
    vf x = v_min(v_set(125.0f), v_mul(gate, v_set(-LOG2_E))); /* NaN is kept through `gate` */
    return v_mul(v_mul(gate, v_inverse(v_add(v_set(1), v_exp2(x)))), up);
}

/* Like round_step, for 16 floats. */
static inline void round_half(vf x, uint16_t *to) {
    uint16_t both[TERMS];
    round_step(x, v_set(0), both);
    memcpy(to, both, COLUMNS * sizeof *to);
}

/* Turn rows of one panel of gate and of up, `ld` floats apart, into rows of a half tile. */
static void gate_panel(const float *gate, const float *up, int64_t ld, int64_t rows, uint16_t *to) {
    for (int64_t r = 0; r < rows; r++, gate += ld, up += ld, to += TERMS)
        round_half(v_gated(v_load(gate), v_load(up)), to);
}

typedef struct {
    const GatedMlp *m;
    const uint16_t *tiles; /* rows of x */
    uint16_t *active;      /* rows of the product */
    float *sums;           /* products with both matrices, of few rows */
    int64_t rows, tall, steps, active_steps;
} Gated;

/* Position of the rows from `row` on of a panel in `active`. */
static inline uint16_t *active_at(const Gated *g, int64_t row, int64_t panel) {
    int64_t tile = g->tall * TERMS;
    return g->active + (row / g->tall * g->active_steps + panel / 2) * tile + panel % 2 * COLUMNS;
}

/* All rows with one panel of each matrix. The next two panels are prefetched: that of gate by the
 * first half of the blocks, that of up by the others. */
static void gate_many(const Gated *g, int64_t panel) {
    const GatedMlp *m = g->m;
    int64_t size = g->steps * WEIGHT_TILE, up = m->width / COLUMNS * size;
    int64_t next = g->steps * g->tall * TERMS, pair = 2 * TILE_ROWS;
    int64_t blocks = (g->rows + pair - 1) / pair, half = (blocks + 1) / 2;
    int64_t share = (panel + 1) * COLUMNS < m->width ? (TILE_ROWS + half - 1) / half : 0;
    float sums[2 * TILE_ROWS * 2 * COLUMNS] __attribute__((aligned(64)));
    const uint16_t *panels = (const uint16_t *)m->gate_up + panel * size;
    Block b = {.tall = g->tall, .next = next, .panels = panels, .stride = up, .steps = g->steps,
               .init = m->gate_up_bias ? m->gate_up_bias + panel * COLUMNS : zeros,
               .apart = m->gate_up_bias ? m->width : COLUMNS, .y = sums, .ldy = 2 * COLUMNS,
               .share = share};
    for (int64_t i = 0; i < blocks; i++) {
        int64_t row = i * pair, tiles = g->rows - row > TILE_ROWS ? 2 : 1;
        b.tiles = g->tiles + row / g->tall * next;
        b.later = panels + size + (i < half ? 0 : up) + i % half * share * g->steps * 32;
        if (tiles == 2) two_by_two(&b);
        else one_by_two(&b);
        FENCE();
        for (int64_t t = 0; t < tiles; t++) {
            const float *from = sums + t * TILE_ROWS * b.ldy;
            gate_panel(from, from + COLUMNS, b.ldy, g->tall,
                       active_at(g, row + t * TILE_ROWS, panel));
        }
    }
}

/* Panels from..to of up to 16 rows, whose products with both matrices are in `sums`. */
static int gate_sums(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Gated *g = at;
    int64_t width = g->m->width;
    for (int64_t panel = from; panel < to; panel++) {
        const float *gate = g->sums + panel * COLUMNS;
        gate_panel(gate, gate + width, 2 * width, g->rows, active_at(g, 0, panel));
    }
    return 0;
}

static int gate_panels(void *at, int64_t from, int64_t to, int seat) {
    (void)seat;
    const Gated *g = at;
    configure(g->tall, TILE_BYTES);
    for (int64_t panel = from; panel < to; panel++) gate_many(g, panel);
    tile_release();
    return 0;
}

/* Weights of up to 16 rows are streamed as in few_panels. Adjacent panels share cache lines of the
 * product. */
static void gate_all(Gated *g) {
    const GatedMlp *m = g->m;
    int64_t panels = m->width / COLUMNS;
    if (m->rows > TILE_ROWS) {
        run(m->threads, panels, 2, gate_panels, g);
        return;
    }
    Tiles p = {g->tiles, m->gate_up, m->gate_up_bias, g->sums, g->rows, g->tall, g->steps,
               2 * m->width, m->threads};
    all_panels(&p);
    run(m->rows * panels < 256 ? 1 : m->threads, panels, 2, gate_sums, g);
}

static int gated_mlp(const GatedMlp *m) {
    if (m->rows == 0) return 0;
    int64_t steps = steps_of(m->in), active_steps = steps_of(m->width);
    int64_t tall = m->rows < TILE_ROWS ? m->rows : TILE_ROWS;
    int64_t row_bytes = TERMS * (int64_t)sizeof(uint16_t) * (steps + active_steps);
    int64_t most = rows_at_once(m->rows, row_bytes, GATED_BYTES);
    int64_t padded = (most + tall - 1) / tall * tall, few = m->rows <= TILE_ROWS;
    int64_t sums_bytes = few ? m->rows * 2 * m->width * (int64_t)sizeof(float) : 0;
    char *memory = aligned_alloc(64, (size_t)(padded * row_bytes + (sums_bytes + 63) / 64 * 64));
    if (!memory) return -1;
    uint16_t *tiles = (uint16_t *)memory, *active = tiles + padded * steps * TERMS;
    if (m->width % TERMS) /* half of the last tiles stays zero */
        memset(active, 0, (size_t)(padded * active_steps * TERMS) * sizeof *active);
    for (int64_t row = 0; row < m->rows; row += most) {
        Gated g = {m, tiles, active, (float *)(memory + padded * row_bytes), m->rows - row, tall,
                   steps, active_steps};
        if (g.rows > most) g.rows = most;
        round_all(m->threads, m->x + row * m->in, g.rows, m->in, tall, tiles);
        gate_all(&g);
        Tiles down = {active, m->down, m->down_bias, m->y + row * m->out, g.rows, tall,
                      active_steps, m->out, m->threads};
        all_panels(&down);
    }
    free(memory);
    return 0;
}
