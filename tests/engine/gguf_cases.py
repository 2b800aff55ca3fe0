"""A writer of GGUF files, random blocks, and one element at a time, what they stand for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from baton.engine.loading.gguf import TENSOR_TYPES

NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
SIZES = {kind.name: (kind.items, kind.nbytes) for kind in TENSOR_TYPES.values()}
FLOAT16_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where a block has its float16 numbers; the rest of its bytes may have any value."""
TYPES = tuple(FLOAT16_AT)

Tensor = tuple[str, tuple[int, ...], bytes]
"""Type, shape in NumPy's order, and data."""


# ---------------------------------------------------------------------------- writing


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def packed(value: object) -> bytes:
    """A value of the metadata with its type."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii" if value < 0 else "<II", 5 if value < 0 else 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [*_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(type(value))


def gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, Tensor], alignment: int = 32
) -> bytes:
    """The content of a file."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [text(key) + packed(value) for key, value in metadata.items()]
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        parts.append(text(name) + struct.pack("<I", len(shape)))
        parts.append(struct.pack(f"<{len(shape)}Q", *reversed(shape)))
        parts.append(struct.pack("<IQ", NUMBERS[kind], len(data)))
        data += content
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment) + data


def floats(values: np.ndarray) -> Tensor:
    return "F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes()


def random_blocks(
    kind: str, count: int, rng: np.random.Generator, scale: float = 1.0
) -> np.ndarray:
    """Blocks ``[count, nbytes]`` of random codes; ``scale``: of their float16 numbers."""
    blocks = rng.integers(0, 256, (count, SIZES[kind][1]), dtype=np.uint8)
    for at in FLOAT16_AT[kind]:
        numbers = (scale * rng.normal(size=(count, 1))).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8)
    return blocks


def random_tensor(
    kind: str, shape: tuple[int, int], rng: np.random.Generator, scale: float = 1.0
) -> Tensor:
    """A quantized matrix."""
    blocks = random_blocks(kind, shape[0] * shape[1] // SIZES[kind][0], rng, scale)
    return kind, shape, blocks.tobytes()


# ------------------------------------------------- what blocks stand for, as ggml defines them


def half(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def fours(block: bytes, at: int, index: int) -> int:
    """The four bits of an element of a block of 32: low halves first."""
    return block[at + index] & 0xF if index < 16 else block[at + index - 16] >> 4


def fifth(block: bytes, at: int, index: int) -> int:
    return struct.unpack_from("<I", block, at)[0] >> index & 1


def q4_0(block: bytes, i: int) -> np.float32:
    return np.float32(fours(block, 2, i) - 8) * half(block, 0)


def q4_1(block: bytes, i: int) -> np.float32:
    return np.float32(fours(block, 4, i)) * half(block, 0) + half(block, 2)


def q5_0(block: bytes, i: int) -> np.float32:
    value = fours(block, 6, i) + 16 * fifth(block, 2, i) - 16
    return np.float32(value) * half(block, 0)


def q5_1(block: bytes, i: int) -> np.float32:
    value = fours(block, 8, i) + 16 * fifth(block, 4, i)
    return np.float32(value) * half(block, 0) + half(block, 2)


def q8_0(block: bytes, i: int) -> np.float32:
    return np.float32(signed(block[2 + i])) * half(block, 0)


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes, i: int) -> np.float32:
    return np.float32(IQ4_NL[fours(block, 2, i)]) * half(block, 0)


def q3_k(block: bytes, i: int) -> np.float32:
    group = i // 16
    packed_scales = block[96:108]
    low = packed_scales[group] & 0xF if group < 8 else packed_scales[group - 8] >> 4
    high = packed_scales[8 + group % 4] >> 2 * (group // 4) & 3
    half_of_block, rest = divmod(i, 128)
    two = block[32 + 32 * half_of_block + rest % 32] >> 2 * (rest // 32) & 3
    third = block[i % 32] >> i // 32 & 1
    scale = half(block, 108) * np.float32(low + 16 * high - 32)
    return scale * np.float32(two - (0 if third else 4))


def scale_and_minimum(packed_scales: bytes, group: int) -> tuple[int, int]:
    if group < 4:
        return packed_scales[group] & 63, packed_scales[group + 4] & 63
    last = packed_scales[group + 4]
    return (
        last & 0xF | packed_scales[group - 4] >> 6 << 4,
        last >> 4 | packed_scales[group] >> 6 << 4,
    )


def with_minimum(block: bytes, i: int, value: int) -> np.float32:
    scale, minimum = scale_and_minimum(block[4:16], i // 32)
    d, m = half(block, 0) * np.float32(scale), half(block, 2) * np.float32(minimum)
    return d * np.float32(value) - m


def fours_of_pairs(block: bytes, at: int, i: int) -> int:
    """Two groups of 32 elements share 32 bytes: the first has the low halves."""
    pair, rest = divmod(i, 64)
    byte = block[at + 32 * pair + rest % 32]
    return byte & 0xF if rest < 32 else byte >> 4


def q4_k(block: bytes, i: int) -> np.float32:
    return with_minimum(block, i, fours_of_pairs(block, 16, i))


def q5_k(block: bytes, i: int) -> np.float32:
    high = block[16 + i % 32] >> i // 32 & 1
    return with_minimum(block, i, fours_of_pairs(block, 48, i) + 16 * high)


def q6_k(block: bytes, i: int) -> np.float32:
    half_of_block, rest = divmod(i, 128)
    row, column = divmod(rest, 32)
    byte = block[64 * half_of_block + 32 * (row % 2) + column]
    low = byte & 0xF if row < 2 else byte >> 4
    high = block[128 + 32 * half_of_block + column] >> 2 * row & 3
    scale = half(block, 208) * np.float32(signed(block[192 + i // 16]))
    return scale * np.float32(low + 16 * high - 32)


ELEMENT: dict[str, Callable[[bytes, int], np.float32]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "IQ4_NL": iq4_nl,
    "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip


def values_of(tensor: Tensor) -> np.ndarray:
    """The values of a tensor, one element at a time."""
    kind, shape, content = tensor
    if kind == "F32":
        return np.frombuffer(content, np.float32).reshape(shape)
    items, nbytes = SIZES[kind]
    blocks = [content[at : at + nbytes] for at in range(0, len(content), nbytes)]
    values = [ELEMENT[kind](block, i) for block in blocks for i in range(items)]
    return np.array(values, np.float32).reshape(shape)


def write(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path
