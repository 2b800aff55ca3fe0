"""Layout of a worker's KV blocks, and the model card that workers compare before a handoff."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from .limits import MAX_COUNT, MAX_EMBEDDING_SIZE, MAX_FEATURES, MAX_NAME_CHARS, MAX_SIZE

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
MAX_KINDS = 16
"""Maximum kinds of contexts that one model takes."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
KV_TYPES = ("float32", "bfloat16", "int8")
"""Types of keys and values, from the widest to the narrowest."""
KV_CHOICES = ("auto", *KV_TYPES)
"""Values of the setting; "auto": by the model's weights."""
ELEMENTS: dict[str, npt.DTypeLike] = {
    "float32": np.float32, "bfloat16": np.uint16, "int8": np.int8,
}  # fmt: skip
"""Elements of the arrays that hold keys and values of a type in host memory."""
INT8_SCALE_BYTES = 2
"""After the codes of a row in int8: its largest magnitude as bfloat16."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one worker's KV pool.

    The pool is one array ``[num_layers, num_blocks, 2, num_kv_heads, block_size, row_length]``
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
    def row_length(self) -> int:
        """Elements of the row of one token and head: ``head_dim``, and in int8 the scale."""
        return self.head_dim + (INT8_SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block of one layer: ``(2, num_kv_heads, block_size, row_length)``."""
        return (2, self.num_kv_heads, self.block_size, self.row_length)

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

    def blocks_of(self, payload: npt.NDArray[np.uint8], layers: int) -> npt.NDArray[Any]:
        """Return the blocks in a payload as an array ``[layers, blocks, *block_shape]``."""
        return payload.view(ELEMENTS[self.dtype]).reshape(layers, -1, *self.block_shape)


def layout_mismatch(
    mine: KVLayout, theirs: KVLayout, *, converts: bool
) -> tuple[str, str, str] | None:
    """Return the first field that prevents a handoff, as :meth:`ModelCard.mismatch` does.

    ``converts``: both workers convert blocks of other sizes and types of keys and values.
    """
    known = converts and mine.dtype in KV_TYPES and theirs.dtype in KV_TYPES
    differ = () if known else ("block_size", "dtype")
    for field in ("num_layers", "num_kv_heads", "head_dim", *differ):
        own, other = getattr(mine, field), getattr(theirs, field)
        if own != other:
            return f"layout.{field}", str(own), str(other)
    return None


def frame_layout(sender: KVLayout, receiver: KVLayout) -> KVLayout:
    """Return the layout of KV frames between two pools.

    It has the receiver's blocks, and the narrower of both types, which holds the values of both.
    """
    if sender.dtype == receiver.dtype:
        return receiver
    dtype = max(sender.dtype, receiver.dtype, key=KV_TYPES.index)
    return msgspec.structs.replace(receiver, dtype=dtype)


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
    ``converts``: its keys and values may go to and come from a pool with another block size or
    type. ``max_pixels``: of a picture, by the memory of the process; 0: as many as the protocol
    allows. ``image_positions``: positions whose KV memory holds an image that cross-attention
    reads, before the text; 0: images are in the place of their tokens. ``image_tiles``: tiles of
    such an image at most, which give the ids of aspect ratios a meaning; 0: not known.
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
    converts: bool = False
    image_positions: Annotated[int, Meta(ge=0, le=MAX_SIZE)] = 0
    image_tiles: Annotated[int, Meta(ge=0, le=MAX_SIZE)] = 0

    def mismatch(self, other: ModelCard) -> tuple[str, str, str] | None:
        """Return the first field that prevents a handoff, ``(field, mine, theirs)``, or None."""
        for field in ("architecture", "task", "fingerprint", "numerics", "vocab_size"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return field, str(mine), str(theirs)
        return layout_mismatch(self.layout, other.layout, converts=self.converts and other.converts)


def model_name(folder: str) -> str:
    """Return the name of the model in a folder: ``org/name`` for a folder of the hub's cache.

    Such a folder is ``models--ORG--NAME/snapshots/COMMIT``.
    """
    path = PurePath(folder)
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return path.name
