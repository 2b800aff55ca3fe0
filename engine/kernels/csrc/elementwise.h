/* Kernels that process one row at a time: norms, rotary embedding, activations. */

static inline float v_total(vf v) { /* pairwise, so that the order does not depend on the compiler */
    float t[LANES];
    v_store(t, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

/* e^x to 1.5 ulp; exactly 1 at 0, 0 below the smallest normal number, NaN stays NaN. */
static inline vf v_exp(vf x) {
    const vf low = v_set(-87.3f), magic = v_set(12582912.0f); /* 1.5 * 2^23 rounds to a whole */
    vf c = v_min(v_set(88.3f), v_max(low, x));
    vf n = v_sub(v_add(v_mul(c, v_set(1.44269504f)), magic), magic);
    vf r = v_fma(n, v_set(-0.693359375f), c);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set(1.0f));
    return v_keep(v_scale2(p, n), x, low);
}

/* 1 / sqrt(mean(x^2) + eps) */
static float inverse_rms(const float *x, int64_t width, float eps) {
    vf a = v_set(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        vf p = v_load(x + i), q = v_load(x + i + LANES);
        vf r = v_load(x + i + 2 * LANES), s = v_load(x + i + 3 * LANES);
        a = v_fma(p, p, a), b = v_fma(q, q, b), c = v_fma(r, r, c), d = v_fma(s, s, d);
    }
    for (; i < width; i += LANES) {
        vf p = width - i < LANES ? v_load_n(x + i, (int)(width - i)) : v_load(x + i);
        a = v_fma(p, p, a);
    }
    return 1.0f / sqrtf(v_total(v_add(v_add(a, b), v_add(c, d))) / (float)width + eps);
}

static void scale_row(const float *x, const float *weight, float scale, float *y, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        v_store(y + i, v_mul(v_mul(v_load(x + i), v_set(scale)), v_load(weight + i)));
    for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}

/* With a residual: residual += x first; the new residual is normalised. */
static void rms_norm(const float *x, float *residual, const float *weight, float eps, float *y,
                     int64_t rows, int64_t width) {
    for (int64_t t = 0; t < rows; t++, x += width, y += width) {
        const float *from = x;
        if (residual) {
            for (int64_t i = 0; i < width; i++) residual[i] += x[i];
            from = residual;
            residual += width;
        }
        scale_row(from, weight, inverse_rms(from, width, eps), y, width);
    }
}

/* Optional norm, then (a, b) -> (a cos - b sin, b cos + a sin) on the halves of one head. */
static void rotate_head(const float *x, const float *weight, float eps, const float *cos_sin,
                        float *y, int64_t dim) {
    int64_t half = dim / 2, i = 0;
    float scale = weight ? inverse_rms(x, dim, eps) : 1.0f;
    for (; i < half; i += LANES) {
        int n = half - i < LANES ? (int)(half - i) : LANES;
        vf a = v_load_n(x + i, n), b = v_load_n(x + half + i, n);
        if (weight) {
            a = v_mul(v_mul(a, v_set(scale)), v_load_n(weight + i, n));
            b = v_mul(v_mul(b, v_set(scale)), v_load_n(weight + half + i, n));
        }
        vf c = v_load_n(cos_sin + i, n), s = v_load_n(cos_sin + half + i, n);
        v_store_n(y + i, v_fma(a, c, v_sub(v_set(0), v_mul(b, s))), n);
        v_store_n(y + half + i, v_fma(b, c, v_mul(a, s)), n);
    }
}

/* Hadamard transform of a row, in blocks of the largest power of two that divides its length:
 * a few large numbers spread over the row, and products of two rows stay as they are. */
static void spread_row(float *x, int64_t dim) {
    int64_t block = dim & -dim;
    for (int64_t span = block / 2; span; span /= 2)
        for (int64_t i = 0; i < dim; i += 2 * span)
            for (int64_t j = i; j < i + span; j++) {
                float a = x[j], b = x[j + span];
                x[j] = a + b;
                x[j + span] = a - b;
            }
    float scale = (float)(1 / sqrt((double)block));
    for (int64_t i = 0; i < dim; i++) x[i] *= scale;
}

static void rope_append(const RopeAppend *r) {
    int64_t dim = r->dim, plane = r->block_size * r->row_bytes, values = r->kv_heads * plane;
    int plain = r->kind == KV_FLOATS && r->rounding == KV_FLOATS;
    int spread = r->rounding == KV_INT8;
    float key[MOST_DIM];
    for (int64_t t = 0; t < r->rows; t++) {
        const float *in = r->qkv + t * (r->heads + 2 * r->kv_heads) * dim;
        const float *cos_sin = r->cos_sin + r->positions[t] * dim;
        int64_t block = r->slots[t] / r->block_size, offset = r->slots[t] % r->block_size;
        char *to = r->kv + block * 2 * values + offset * r->row_bytes;
        float *q = r->q_out + t * r->heads * dim;
        for (int64_t h = 0; h < r->heads; h++, in += dim) {
            rotate_head(in, r->q_norm, r->eps, cos_sin, q + h * dim, dim);
            if (spread) spread_row(q + h * dim, dim);
        }
        for (int64_t h = 0; h < r->kv_heads; h++, in += dim) {
            char *row = to + h * plane;
            rotate_head(in, r->k_norm, r->eps, cos_sin, plain ? (float *)row : key, dim);
            if (spread) spread_row(key, dim);
            if (!plain) append_row(r->kind, r->rounding, key, row, dim);
        }
        for (int64_t h = 0; h < r->kv_heads; h++, in += dim) {
            char *row = to + values + h * plane;
            if (plain) memcpy(row, in, (size_t)dim * sizeof(float));
            else append_row(r->kind, r->rounding, in, row, dim);
        }
    }
}

static void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t width) {
    for (int64_t t = 0; t < rows; t++, gate_up += 2 * width, y += width)
        for (int64_t i = 0; i < width; i += LANES) {
            int n = width - i < LANES ? (int)(width - i) : LANES;
            vf g = v_load_n(gate_up + i, n), u = v_load_n(gate_up + width + i, n);
            vf e = v_exp(v_sub(v_set(0), g));
            v_store_n(y + i, v_mul(v_div(g, v_add(v_set(1), e)), u), n);
        }
}

/* Sum of a row, or of its squared distances from `mean`. */
static float row_total(const float *x, int64_t width, float mean, int squares) {
    vf a = v_set(0), m = v_set(mean);
    for (int64_t i = 0; i < width; i += LANES) {
        int n = width - i < LANES ? (int)(width - i) : LANES;
        vf p = v_load_n(x + i, n);
        if (squares) {
            p = v_between(v_sub(p, m), v_set(0), 0, n);
            a = v_fma(p, p, a);
        } else {
            a = v_add(a, p);
        }
    }
    return v_total(a);
}

/* With a residual: residual += x first; the new residual is normalised. */
static void layer_norm(const float *x, float *residual, const float *weight, const float *bias,
                       float eps, float *y, int64_t rows, int64_t width) {
    for (int64_t t = 0; t < rows; t++, x += width, y += width) {
        const float *from = x;
        if (residual) {
            for (int64_t i = 0; i < width; i++) residual[i] += x[i];
            from = residual;
            residual += width;
        }
        float mean = row_total(from, width, 0.0f, 0) / (float)width;
        float variance = row_total(from, width, mean, 1) / (float)width;
        vf m = v_set(mean), scale = v_set(1.0f / sqrtf(variance + eps));
        for (int64_t i = 0; i < width; i += LANES) {
            int n = width - i < LANES ? (int)(width - i) : LANES;
            vf p = v_mul(v_sub(v_load_n(from + i, n), m), scale);
            v_store_n(y + i, v_fma(p, v_load_n(weight + i, n), v_load_n(bias + i, n)), n);
        }
    }
}

/* x * (1 + erf(x / sqrt(2))) / 2 = max(x, 0) - t * e^(-t^2 / 2) * R(t), t = |x|.
 *
 * R(t) = e^(t^2 / 2) * erfc(t / sqrt(2)) / 2 is smooth: a polynomial in (t - 3) / (t + 3), fitted
 * over t = 0..14 with a relative error of 9e-9. For larger t the power of e is zero. */
static inline vf v_gelu(vf x) {
    static const float fit[] = {
        0.121513948f,    -0.206402615f,   0.123225033f,    -0.0462133139f,   0.0061320886f,
        0.00290467753f,  -0.000983847305f, -0.000339747698f, 0.000115652394f, 5.38749046e-05f,
    };
    vf t = v_min(v_set(14.0f), v_max(x, v_sub(v_set(0), x)));
    vf u = v_div(v_sub(t, v_set(3.0f)), v_add(t, v_set(3.0f)));
    vf r = v_set(fit[9]);
    for (int i = 8; i >= 0; i--) r = v_fma(r, u, v_set(fit[i]));
    vf power = v_exp(v_mul(v_mul(t, t), v_set(-0.5f)));
    return v_sub(v_max(v_set(0), x), v_mul(t, v_mul(power, r)));
}

/* tanh(x) = 1 - 2 / (e^2x + 1) */
static inline vf v_tanh(vf x) {
    const vf one = v_set(1.0f), two = v_set(2.0f);
    return v_sub(one, v_div(two, v_add(v_exp(v_mul(x, two)), one)));
}

static void gelu(const float *x, float *y, int64_t rows, int64_t width) {
    for (int64_t t = 0; t < rows; t++, x += width, y += width)
        for (int64_t i = 0; i < width; i += LANES) {
            int n = width - i < LANES ? (int)(width - i) : LANES;
            v_store_n(y + i, v_gelu(v_load_n(x + i, n)), n);
        }
}
