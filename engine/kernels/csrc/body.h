/* All kernels, compiled for the lanes included before; ends with this instruction set's table. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "matrix.h"

#include "kv_rows.h"

#include "elementwise.h"

#include "audio.h"

#include "attention.h"

#include "dense.h"

#include "sample.h"

#include "blocks.h"

#include "convert.h"

#include "digest.h"

const Kernels TABLE = {
    .name = TABLE_NAME,
    .panel_floats = FLOAT_VECTORS * LANES,
    .panel_halves = HALF_VECTORS * LANES,
    .terms_halves = 1,
    .pack = pack,
    .product = product,
    .rms_norm = rms_norm,
    .rope_append = rope_append,
    .attention = attention,
    .silu_mul = silu_mul,
    .layer_norm = layer_norm,
    .gelu = gelu,
    .snake = snake,
    .depthwise = depthwise,
    .soft_clip = soft_clip,
    .dense_attention = dense_attention,
    .activate = activate,
    .add_scaled = add_scaled,
    .group_norm = group_norm,
    .draw = draw,
    .move = move,
    .convert = convert,
    .checksum = checksum,
    .payload_digest = payload_digest,
};
