"""Layout of a worker's KV blocks, and the model card that workers compare before a handoff."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Annotated

import msgspec
from msgspec import Meta

from .limits import MAX_COUNT, MAX_EMBEDDING_SIZE, MAX_FEATURES, MAX_NAME_CHARS, MAX_SIZE

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
MAX_KINDS = 16
"""Maximum kinds of contexts that one model takes."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one worker's KV pool.

    The pool is one array ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]``
    (axis 2: keys, then values), so a block of one layer is contiguous.

    ``num_layers``, ``num_kv_heads``, ``head_dim``: of the model. ``block_size``: tokens per
    block. ``dtype``: element type on the wire and in the pool.
    """

    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    block_size: Size
    dtype: str = "float32"

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block of one layer: ``(2, num_kv_heads, block_size, head_dim)``."""
        return (2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * self.block_bytes // self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for ``tokens`` tokens."""
        return -(-tokens // self.block_size)


class AudioCard(msgspec.Struct, frozen=True, kw_only=True):
    """The audio of a speech model: 16-bit samples, one channel.

    ``sample_rate``: samples per second. ``frame_samples``: samples that ``frame_tokens`` audio
    tokens give. ``codebook_size``: entries of a codebook; 0 if a worker does not report it.
    """

    sample_rate: Size
    frame_samples: Size
    frame_tokens: Size
    codebook_size: Annotated[int, Meta(ge=0, le=MAX_SIZE)] = 0

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of the samples of ``tokens`` tokens, rounded up."""
        return -(-2 * tokens * self.frame_samples // self.frame_tokens)


FEATURES = ("logit_bias",)
"""Parameters of requests that this process reads, but not every process of its version."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model: must agree between the sides of a handoff, and bounds requests.

    ``fingerprint``: digest of the weights' identity and the config. ``numerics``: name of kernels,
    dtype, kernel build and instruction set; a replay needs equal numerics. ``task``: "generate" or
    "embed"; an embedding model has no decode workers. ``embedding_size``: dimension of its
    embeddings. ``kinds``: classes of the contexts that the model takes, by name. ``features``:
    parameters of requests that the process reads, but not every process of its protocol version;
    they never prevent a handoff. ``audio``: of a speech model, whose decode workers have its codec.
    ``max_pixels``: of a picture, by the memory of the process; 0: as many as the protocol allows.
    ``image_positions``: positions whose KV memory holds an image that cross-attention reads, before
    the text; 0: images are in the place of their tokens. ``image_tiles``: tiles of such an image at
    most, which give the ids of aspect ratios a meaning; 0: not known.
    """

    name: str
    architecture: str
    fingerprint: str
    numerics: str
    vocab_size: Size
    max_length: Size
    eos_token_ids: list[int]
    layout: KVLayout
    weights_bytes: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    task: Name = "generate"
    embedding_size: Annotated[int, Meta(ge=0, le=MAX_EMBEDDING_SIZE)] = 0
    kinds: Annotated[list[Name], Meta(max_length=MAX_KINDS)] = msgspec.field(
        default_factory=lambda: ["TextContext"]
    )
    features: Annotated[list[Name], Meta(max_length=MAX_FEATURES)] = []
    audio: AudioCard | None = None
    max_pixels: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    image_positions: Annotated[int, Meta(ge=0, le=MAX_SIZE)] = 0
    image_tiles: Annotated[int, Meta(ge=0, le=MAX_SIZE)] = 0

    def mismatch(self, other: ModelCard) -> tuple[str, str, str] | None:
        """Return the first field that prevents a handoff, ``(field, mine, theirs)``, or None."""
        for field in ("architecture", "task", "fingerprint", "numerics", "vocab_size"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return field, str(mine), str(theirs)
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"):
            mine, theirs = getattr(self.layout, field), getattr(other.layout, field)
            if mine != theirs:
                return f"layout.{field}", str(mine), str(theirs)
        return None


def model_name(folder: str) -> str:
    """Return the name of the model in a folder: ``org/name`` for a folder of the hub's cache.

    Such a folder is ``models--ORG--NAME/snapshots/COMMIT``.
    """
    path = PurePath(folder)
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return path.name
