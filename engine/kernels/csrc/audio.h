/* Kernels of audio decoders: snake activations, depthwise convolutions, tanh. */

/* sin(x)^2 to 2e-7 for |x| < 1e5; the period is pi. */
static inline vf v_sin_squared(vf x) {
    static const float fit[] = {
        1.0f, -0.166666672f, 0.00833333097f, -0.000198408612f, 2.75252819e-06f, -2.38893847e-08f,
    };
    const vf magic = v_set(12582912.0f); /* 1.5 * 2^23 rounds to a whole */
    vf n = v_sub(v_add(v_mul(x, v_set(0.318309886f)), magic), magic);
    vf r = v_fma(n, v_set(-3.140625f), x);
    r = v_fma(n, v_set(-9.67502593994e-4f), r);
    r = v_fma(n, v_set(-1.50995799098e-7f), r);
    vf square = v_mul(r, r), p = v_set(fit[5]);
    for (int i = 4; i >= 0; i--) p = v_fma(p, square, v_set(fit[i]));
    vf sine = v_mul(r, p);
    return v_mul(sine, sine);
}

/* x + sin(alpha * x)^2 * inverse */
static inline vf v_snake(vf x, vf alpha, vf inverse) {
    return v_fma(inverse, v_sin_squared(v_mul(alpha, x)), x);
}

/* With a residual: residual += x first; the activation is that of the new residual. */
static void snake(const float *x, float *residual, const float *scales, float *y, int64_t rows,
                  int64_t width) {
    for (int64_t t = 0; t < rows; t++, x += width, y += width) {
        for (int64_t i = 0; i < width; i += LANES) {
            int n = width - i < LANES ? (int)(width - i) : LANES;
            vf v = v_load_n(x + i, n);
            if (residual) {
                v = v_add(v_load_n(residual + i, n), v);
                v_store_n(residual + i, v, n);
            }
            v_store_n(y + i, v_snake(v, v_load_n(scales + i, n), v_load_n(scales + width + i, n)), n);
        }
        if (residual) residual += width;
    }
}

/* Rows before the first and after the last are zero. */
static void depthwise(const Depthwise *d) {
    const int64_t width = d->width, reach = (d->taps - 1) / 2 * d->dilation;
    for (int64_t t = 0; t < d->rows; t++) {
        float *y = d->y + t * width;
        for (int64_t i = 0; i < width; i += LANES) {
            int n = width - i < LANES ? (int)(width - i) : LANES;
            vf sum = v_load_n(d->bias + i, n);
            for (int64_t tap = 0; tap < d->taps; tap++) {
                int64_t row = t - reach + tap * d->dilation;
                if (row < 0 || row >= d->rows) continue;
                vf weight = v_load_n(d->weight + tap * width + i, n);
                sum = v_fma(v_load_n(d->x + row * width + i, n), weight, sum);
            }
            if (d->scales)
                sum = v_snake(sum, v_load_n(d->scales + i, n), v_load_n(d->scales + width + i, n));
            v_store_n(y + i, sum, n);
        }
    }
}

static void soft_clip(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        int n = count - i < LANES ? (int)(count - i) : LANES;
        v_store_n(y + i, v_tanh(v_load_n(x + i, n)), n);
    }
}
