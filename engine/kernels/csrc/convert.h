/* Copies KV rows between blocks of different sizes or types, as a handoff needs it. */

static inline char *row_at(const Conversion *c, const KvEnd *end, int64_t layer, int64_t plane,
                           int64_t token) {
    int64_t block = layer * end->blocks + end->ids[token / end->block_size];
    return end->data + ((block * 2 * c->kv_heads + plane) * end->block_size +
                        token % end->block_size) * end->row_bytes;
}

/* The rows of up to `count` tokens from `token` on, contiguous at both ends. */
static int64_t run_of(const KvEnd *end, int64_t token, int64_t count) {
    int64_t left = end->block_size - token % end->block_size;
    return left < count ? left : count;
}

static void convert_run(const Conversion *c, const char *from, char *to, int64_t rows) {
    float row[MOST_DIM];
    if (c->from.kind == c->to.kind) {
        memcpy(to, from, (size_t)(rows * c->to.row_bytes));
        return;
    }
    for (int64_t i = 0; i < rows; i++, from += c->from.row_bytes, to += c->to.row_bytes) {
        open_row(c->from.kind, from, row, c->dim);
        store_row(c->to.kind, row, to, c->dim);
    }
}

static void convert(const Conversion *c) {
    int64_t tokens = c->to.count * c->to.block_size;
    int64_t known = c->from.count * c->from.block_size - c->first;
    for (int64_t layer = 0; layer < c->layers; layer++)
        for (int64_t plane = 0; plane < 2 * c->kv_heads; plane++)
            for (int64_t t = 0, rows; t < tokens; t += rows) {
                char *to = row_at(c, &c->to, layer, plane, t);
                rows = run_of(&c->to, t, tokens - t);
                if (t >= known) {
                    memset(to, 0, (size_t)(rows * c->to.row_bytes));
                    continue;
                }
                rows = run_of(&c->from, c->first + t, rows);
                convert_run(c, row_at(c, &c->from, layer, plane, c->first + t), to, rows);
            }
}
