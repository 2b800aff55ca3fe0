"""What the machine code of every kernel must hold to, by source and name (a regular expression).

``registers`` is the ceiling over all targets; a kernel over it runs fewer warps than its block size
was chosen for. ``needs`` and ``forbids`` are regular expressions of instructions (SASS).
"""

from __future__ import annotations

from dataclasses import dataclass

LOAD_16 = r"LDG\.E.*\.128.*"
LOAD_8 = r"LDG\.E\.64.*"
READ_16 = r"LDS\.128"
ATOMICS = (r"ATOM.*", r"RED\..*")
STORE_16 = r"STG\.E.*\.128.*"
LOAD_8 = r"LDG\.E.*\.64.*"
STORE_8 = r"STG\.E.*\.64.*"
COPY_16 = r"LDGSTS\.E.*\.128.*"
COPY_OR_ZERO = r"LDGSTS\.E.*\.128,P"
"""With a predicate, at whose absence zeros are written."""
COPY_ALWAYS = r"LDGSTS[^,]*"
PACK_BF16 = r"F2FP\.BF16(\.F32)?\.PACK_AB"
"""Rounds to nearest even; other roundings have a suffix."""
TENSOR = r"HMMA\.16816\.F32\.BF16"
FRAGMENTS = r"LDSM\.16\..*"
TRANSPOSE = r"MOVM\.16\.MT88"
CONVERT_BYTE = r"I2F(P)?\.(.*\.)?[SU]8.*"
"""At a fraction of the rate of a permutation and an addition."""
FMA = r"FFMA2?(\..*)?"
CALL = r"CALL.*"
"""A subroutine: division of 64 bits, exact division of floats."""

TARGETS = ("sm_80", "sm_90", "sm_90a", "sm_100", "sm_120")
DEFAULT_TARGET = "sm_90"
HOPPER = ("prefill_wgmma.cu", "prefill_bulk.cu")
"""Sources for sm_90a alone."""
FORBIDDEN = (r"LDL.*", r"STL.*", r"F2FP?\..*\.R[ZMP](\..*)?")
"""Local memory: spilled registers, or arrays indexed at run time. Conversions that do not round to
nearest even, which the CPU's form of the same function would not show."""


@dataclass(frozen=True)
class Gate:
    """Limits of one kernel, or of all whose names match."""

    registers: int
    needs: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()


GATES: dict[str, dict[str, Gate]] = {
    "audio.cu": {
        "look_up|snake|depthwise": Gate(48, needs=(LOAD_16, STORE_16), forbids=ATOMICS),
        # 80 registers let three blocks of 256 threads fit.
        "product": Gate(80, needs=(LOAD_16, READ_16, STORE_16, FMA), forbids=(TENSOR, *ATOMICS)),
        "narrow_product": Gate(48, needs=(LOAD_16, FMA), forbids=ATOMICS),
        "soft_clip": Gate(32, forbids=(CALL,)),
    },
    "blocks.cu": {
        "(gather|scatter|copy)_bf16": Gate(64, needs=(LOAD_16, STORE_16)),
        "sum_bf16": Gate(64, needs=(LOAD_16,), forbids=(STORE_16,)),
    },
    "decode_attention.cu": {
        # Shared memory admits two blocks of 128 threads on a multiprocessor, so may registers.
        "decode_attention_d(32|64)": Gate(
            128,
            needs=(TENSOR, COPY_OR_ZERO, FRAGMENTS, TRANSPOSE, STORE_16, PACK_BF16),
            forbids=(COPY_ALWAYS,),
        ),
        "decode_attention_d128": Gate(
            192,
            needs=(TENSOR, COPY_OR_ZERO, FRAGMENTS, TRANSPOSE, STORE_16, PACK_BF16),
            forbids=(COPY_ALWAYS,),
        ),
        # Steps of six tokens and the codes of a fragment take more; with 255 two blocks fit.
        "decode_attention_int8_d(32|64)": Gate(
            168,
            needs=(TENSOR, COPY_OR_ZERO, FRAGMENTS, TRANSPOSE, STORE_16, PACK_BF16, "PRMT"),
            forbids=(COPY_ALWAYS, CONVERT_BYTE),
        ),
        "decode_attention_int8_d128": Gate(
            224,
            needs=(TENSOR, COPY_OR_ZERO, FRAGMENTS, TRANSPOSE, STORE_16, PACK_BF16, "PRMT"),
            forbids=(COPY_ALWAYS, CONVERT_BYTE),
        ),
        r"decode_combine_d\d+": Gate(64, needs=(PACK_BF16,)),
    },
    "elementwise.cu": {
        "embed": Gate(32, needs=(LOAD_16, STORE_16), forbids=(CALL,)),
        "put_rows": Gate(32, needs=(LOAD_16, STORE_16), forbids=(CALL,)),
        "put_rows_add": Gate(40, needs=(LOAD_16, STORE_16, PACK_BF16), forbids=(CALL,)),
        # 64 registers are what a block of 1,024 threads may have.
        "(add_)?rms_norm_f32": Gate(64, needs=(LOAD_16, STORE_16), forbids=(CALL,)),
        "(add_)?(rms|layer)_norm|(add_)?rms_norm_one|modulated_norm": Gate(
            64, needs=(LOAD_16, STORE_16, PACK_BF16), forbids=(CALL,)
        ),
        r"qk_norm_rope_append_\d+": Gate(64, needs=(LOAD_16, STORE_16, PACK_BF16), forbids=(CALL,)),
        # The call is the exact division for subnormal results.
        r"qk_norm_rope_append_int8_\d+": Gate(64, needs=(LOAD_16, STORE_16, STORE_8, PACK_BF16)),
        r"widen_kv_\d+": Gate(
            40, needs=(LOAD_16, STORE_16, PACK_BF16, "PRMT"), forbids=(CALL, CONVERT_BYTE)
        ),
        "silu_mul|activate_(silu|gelu_tanh|quick_gelu)": Gate(
            40, needs=(LOAD_16, STORE_16, PACK_BF16), forbids=(CALL,)
        ),
        "activate_(gelu|tanh)": Gate(48, needs=(LOAD_16, STORE_16, PACK_BF16), forbids=(CALL,)),
    },
    "fp8_linear.cu": {
        "fp8_linear_.*": Gate(128, needs=(LOAD_16, TENSOR, PACK_BF16), forbids=ATOMICS),
        "fp8_widen": Gate(48, needs=(LOAD_16, STORE_16, PACK_BF16), forbids=ATOMICS),
    },
    "pictures.cu": {
        "split_heads|softmax_rows|add_scaled|multiply|rounded": Gate(
            64, needs=(LOAD_16, STORE_16, PACK_BF16)
        ),
        "merge_heads|put_columns|patches": Gate(48, needs=(LOAD_16, STORE_16)),
        "group_sums": Gate(80, needs=(LOAD_16,), forbids=ATOMICS),
        "group_stats": Gate(64, forbids=ATOMICS),
        "group_apply": Gate(64, needs=(LOAD_16, STORE_16, PACK_BF16)),
        "pixels|mix|find_infinite": Gate(32, forbids=ATOMICS),
    },
    "prefill_bulk.cu": {
        r"prefill_bulk_d\d+": Gate(
            168,
            needs=(
                r"HGMMA\.64x128x16\.F32\.BF16.*",
                COPY_OR_ZERO,
                r"UTMALDG\.2D",
                r"USETMAXREG.*",
                PACK_BF16,
            ),
            forbids=(COPY_ALWAYS, TENSOR),
        ),
    },
    "prefill_wgmma.cu": {
        # Of one block of 384 threads; setmaxnreg then divides them anew.
        r"prefill_wgmma_d\d+": Gate(
            168,
            needs=(r"HGMMA\.64x128x16\.F32\.BF16.*", COPY_OR_ZERO, r"USETMAXREG.*", PACK_BF16),
            forbids=(COPY_ALWAYS, TENSOR),
        ),
    },
    "skinny_linear.cu": {
        "skinny_linear_.*": Gate(128, needs=(LOAD_16, TENSOR), forbids=ATOMICS),
        "add_bias_(bf16|f32)": Gate(32),
    },
    "ring_linear.cu": {
        # Two blocks of 256 threads fit a multiprocessor.
        "ring_linear_.*": Gate(
            128,
            needs=(COPY_OR_ZERO, READ_16, TENSOR),
            forbids=(COPY_ALWAYS, *ATOMICS),
        ),
    },
    "sample.cu": {
        "sample_scan_f32": Gate(56, needs=(LOAD_16,)),
        "sample_scan_bf16": Gate(56, needs=(LOAD_8,)),
        # Four blocks of 256 threads fit a multiprocessor.
        "sample_weigh_f32": Gate(64, needs=(LOAD_16, r"C?REDUX.*"), forbids=ATOMICS),
        "sample_weigh_bf16": Gate(64, needs=(LOAD_8, r"C?REDUX.*"), forbids=ATOMICS),
        # Whole numbers alone are added by atomic operations.
        "sample_bins_(f32|bf16)": Gate(64, forbids=(r".*(ATOM|RED)\S*\.F(32|64).*",)),
        "sample_count_(f32|bf16)": Gate(64, forbids=ATOMICS),
        "sample_sum_(f32|bf16)": Gate(80, forbids=ATOMICS),  # 64 up to sm_100
        "sample_draw_(f32|bf16)": Gate(128, forbids=ATOMICS),
        # Two blocks of 320 threads fit a multiprocessor, so that 256 rows fit an H100 at once.
        "sample_(choose|report)_(f32|bf16)": Gate(96, forbids=ATOMICS),
    },
    "prefill_attention.cu": {
        # The sums of 32 rows a warp take 128; two blocks of 128 threads leave 255 to each thread.
        "prefill_attention_d(32|64)": Gate(
            240,
            needs=(TENSOR, COPY_OR_ZERO, FRAGMENTS, STORE_16, PACK_BF16),
            forbids=(COPY_ALWAYS,),
        ),
        "prefill_attention_d(80|128)": Gate(
            255,
            needs=(TENSOR, COPY_OR_ZERO, FRAGMENTS, STORE_16, PACK_BF16),
            forbids=(COPY_ALWAYS,),
        ),
    },
}
