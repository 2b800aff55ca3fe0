"""The bits that a numerics name promises.

Workers with equal names hand requests to each other in the middle of generation, so a change
of any bit needs a new revision: raise it in cpu.py and record the digests again.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from baton.engine.kernels.backend import QuantizedWeights
from baton.engine.kernels.quantized import KINDS, NUMERICS

from ..gguf_cases import FLOAT16_AT
from .conftest import rounds
from .quantized_cases import put_halves

DIGESTS = {
    ("4", "amx"): "21d7fd7decf4bbac",
    ("2", "avx512bf16"): "21d7fd7decf4bbac",
    ("1", "avx512"): "21d7fd7decf4bbac",
    ("1", "avx2"): "7edb7a232b65a830",
    ("1", "plain"): "0957d8a22f92a9e8",
}
ENCODER_DIGESTS = {
    ("4", "amx"): "1816ebd286e11a0e",
    ("2", "avx512bf16"): "1816ebd286e11a0e",
    ("1", "avx512"): "1816ebd286e11a0e",
    ("1", "avx2"): "8226cb1637cd48f5",
    ("1", "plain"): "7b72bd41f26d7416",
}
HALF_DIGESTS = {
    ("4", "amx"): "a68c0de911adca43",
    ("2", "avx512bf16"): "874785f1980c0e83",
    ("1", "avx512"): "6cf53e8de2403f22",
    ("1", "avx2"): "6cf53e8de2403f22",
    ("1", "plain"): "6ab98264d8063d66",
}
AUDIO_DIGESTS = {
    ("4", "amx"): "011a6b638a67003f",
    ("2", "avx512bf16"): "011a6b638a67003f",
    ("1", "avx512"): "011a6b638a67003f",
    ("1", "avx2"): "011a6b638a67003f",
    ("1", "plain"): "914c4e98f07d6b36",
}
HALF_ATTENTION_DIGESTS = {("4", "amx"): "879c92f7a414debb", ("2", "avx512bf16"): "e5617b5a44b8a9e0"}
QUANTIZED_DIGESTS = {"int8-1": "5a660af07ed9eda8"}
"""Of all instruction sets."""
GATED_DIGESTS = {("4", "amx"): "505dadbfd2c4cdad"}


def floats(seed: int, *shape: int) -> np.ndarray:
    """Numbers in -2..2 that are the same with every library version."""
    n = int(np.prod(shape))
    words = (np.arange(n, dtype=np.uint64) + np.uint64(seed * 1000)) * np.uint64(0x9E3779B97F4A7C15)
    return ((words >> np.uint64(40)).astype(np.float32) / 2**22 - 2).reshape(shape)


def results(backend) -> list[np.ndarray]:
    linear, normed = np.empty((9, 129), np.float32), np.empty((9, 100), np.float32)
    gated, attended = np.empty((9, 50), np.float32), np.empty((40, 96), np.float32)
    q, kv = np.empty((9, 4, 24), np.float32), np.zeros((9, 2, 2, 5, 24), np.float32)
    backend.linear(floats(1, 9, 300), backend.pack_linear([floats(2, 129, 300)]), linear)
    backend.rms_norm(floats(3, 9, 100), floats(4, 100), 1e-6, normed)
    backend.silu_mul(floats(5, 9, 100) * 5, gated)
    table, offsets = np.arange(9, dtype=np.int32)[None], np.array([0, 40], np.int32)
    positions, cache = np.arange(40, dtype=np.int32), floats(7, 9, 2, 2, 5, 24)
    backend.attention(floats(6, 40, 4, 24), cache, table, offsets, positions, 0.2, 0, attended)
    norms = floats(10, 24), floats(11, 24)
    backend.qk_norm_rope_append(
        floats(8, 9, 192), positions[:9], np.arange(9), floats(9, 40, 24), *norms, 1e-6, kv, q
    )
    return [linear, normed, gated, attended, q, kv]


def encoder_results(backend) -> list[np.ndarray]:
    """Results of the kernels that only encoders use; decoders do not depend on them."""
    normed, active = np.empty((2, 9, 100), np.float32)
    backend.layer_norm(floats(3, 9, 100), floats(4, 100), floats(12, 100), 1e-6, normed)
    backend.activate(floats(5, 9, 100) * 3, "gelu", active)
    return [normed, active]


def audio_results(backend) -> list[np.ndarray]:
    """Results of the kernels that only audio codecs use."""
    mixed, active, residual = np.empty((3, 9, 100), np.float32)
    raised, samples = np.empty((8, 33), np.float32), np.empty(300, np.float32)
    scales = np.stack([floats(3, 100), 1 / (floats(3, 100) + np.float32(1e-9))])
    residual[:] = floats(14, 9, 100)
    backend.depthwise(floats(1, 9, 100), floats(2, 7, 100), floats(4, 100), 3, scales, mixed)
    backend.add_snake(floats(5, 9, 100) * 9, residual, scales, active)
    dense = backend.pack_linear([floats(6, 33, 200)], floats(7, 33))
    backend.convolve(floats(8, 9, 100), dense, raised)
    backend.soft_clip(floats(9, 300), samples)
    return [mixed, active, residual, raised, samples]


def half_results(backend) -> list[np.ndarray]:
    """Of products with bfloat16 weights."""
    halves = (floats(2, 129, 300).view(np.uint32) >> 16).astype(np.uint16)
    linear = np.empty((9, 129), np.float32)
    backend.linear(floats(1, 9, 300), backend.pack_linear([halves], floats(13, 129)), linear)
    return [linear]


def half_attention_results(backend) -> list[np.ndarray]:
    """Of attention that may round to bfloat16: many queries, then few."""
    attended, last = np.empty((40, 128), np.float32), np.empty((1, 128), np.float32)
    cache, q = floats(7, 9, 2, 2, 5, 32), floats(6, 40, 4, 32)
    table, positions = np.arange(9, dtype=np.int32)[None], np.arange(40, dtype=np.int32)
    for rows, out in ((slice(None), attended), (slice(39, 40), last)):
        offsets = np.array([0, len(out)], np.int32)
        at = positions[rows]
        backend.attention(q[rows], cache, table, offsets, at, 0.2, 0, out, halves=True)
    return [attended, last]


def gated_results(backend) -> list[np.ndarray]:
    """Of the gated MLP with bfloat16 weights: many rows, then few."""
    weights = [
        (floats(n, *shape).view(np.uint32) >> 16).astype(np.uint16)
        for n, shape in ((2, (96, 40)), (3, (33, 48)))
    ]
    gate_up, down = (backend.pack_linear([w]) for w in weights)
    outs = []
    for rows in (40, 9):
        products, active = np.empty((rows, 96), np.float32), np.empty((rows, 48), np.float32)
        outs.append(np.empty((rows, 33), np.float32))
        backend.gated_mlp(floats(1, rows, 40), gate_up, down, products, active, outs[-1])
    return outs


def digest_of(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]


def test_encoder_bits_are_those_of_the_revision(compiled):
    _, revision, isa = compiled.numerics.split("-")
    assert digest_of(encoder_results(compiled)) == ENCODER_DIGESTS[revision, isa]


def test_audio_bits_are_those_of_the_revision(compiled):
    _, revision, isa = compiled.numerics.split("-")
    assert digest_of(audio_results(compiled)) == AUDIO_DIGESTS[revision, isa]


def test_bits_are_those_of_the_revision(compiled):
    _, revision, isa = compiled.numerics.split("-")
    assert digest_of(results(compiled)) == DIGESTS[revision, isa]


def test_bf16_bits_are_those_of_the_revision(compiled):
    _, revision, isa = compiled.numerics.split("-")
    assert digest_of(half_results(compiled)) == HALF_DIGESTS[revision, isa]


def test_bits_of_attention_in_bf16_are_those_of_the_revision(compiled):
    """Only instruction sets with products of bfloat16 round."""
    _, revision, isa = compiled.numerics.split("-")
    if not rounds(compiled.numerics):
        pytest.skip("rounds nothing")
    digest = digest_of(half_attention_results(compiled))
    assert digest == HALF_ATTENTION_DIGESTS[revision, isa]


def test_bits_of_the_gated_mlp_in_bf16_are_those_of_the_revision(compiled):
    """Except on tiles it is composed of the other kernels."""
    _, revision, isa = compiled.numerics.split("-")
    if isa != "amx":
        pytest.skip("has no kernel of its own")
    assert digest_of(gated_results(compiled)) == GATED_DIGESTS[revision, isa]


def test_products_of_quantized_weights_are_recorded(compiled):
    digest = hashlib.sha256()
    x = floats(20, 9, 512)
    for kind in KINDS:
        blocks = (floats(21, 16 * 34 * 18) * 64).astype(np.int8).view(np.uint8)
        sizes = KINDS[kind]
        count = 18 * (512 // sizes.items)
        blocks = np.resize(blocks, (count, sizes.nbytes))
        for at in FLOAT16_AT[kind]:
            put_halves(blocks, at, floats(22, count) / 64)
        weights = QuantizedWeights(kind, blocks.reshape(18, -1), 512)
        y = np.empty((9, 18), np.float32)
        compiled.linear(x, compiled.pack_linear([weights]), y)
        digest.update(y.tobytes())
    assert QUANTIZED_DIGESTS.get(NUMERICS) == digest.hexdigest()[:16]
