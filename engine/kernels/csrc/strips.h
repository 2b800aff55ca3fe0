/* Micro kernels of attention: a few queries with the keys, or weights with the values, of a tile. */

/* Queries of one micro kernel, and the number of keys or dims it processes at once. */
#define QUERY_ROWS 6
#define STRIP (TILE_VECTORS * LANES)

#define STRIPS_OF(NV)                                                                              \
    MICRO(strip1_##NV, float, 1, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip2_##NV, float, 2, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip3_##NV, float, 3, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip4_##NV, float, 4, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip5_##NV, float, 5, 1, NV, LOAD_FLOATS, 0)                                            \
    MICRO(strip6_##NV, float, 6, 1, NV, LOAD_FLOATS, 0)
#define STRIP_ROWS(NV) {strip1_##NV, strip2_##NV, strip3_##NV, strip4_##NV, strip5_##NV, strip6_##NV}

STRIPS_OF(1)
STRIPS_OF(2)
#if TILE_VECTORS == 4
STRIPS_OF(3)
STRIPS_OF(4)
static Micro *const strips[TILE_VECTORS][QUERY_ROWS] = {STRIP_ROWS(1), STRIP_ROWS(2), STRIP_ROWS(3),
                                                        STRIP_ROWS(4)};
#else
static Micro *const strips[TILE_VECTORS][QUERY_ROWS] = {STRIP_ROWS(1), STRIP_ROWS(2)};
#endif
