"""What a request costs and needs: all that the router takes into account of a medium.

The router places and counts requests of every medium by one :class:`Work`. A new medium adds its
branch to :func:`work_of`, and to the functions below if its KV state is not one position per token.
"""

from __future__ import annotations

import msgspec

from .contexts.pixels import png_bytes
from .hashing import block_hashes
from .layout import ModelCard
from .limits import MAX_EMBEDDING_SIZE, MAX_PICTURE_SIDE, MAX_PREVIEW_PIXELS
from .picture_requests import (
    encoder_tokens,
    preview_steps,
    state_length,
    state_parts,
    state_tokens,
    step_rows,
)
from .vision_requests import spans_of
from .wire.wire_context import (
    WireContext,
    WirePixelContext,
    WireSpeechContext,
    WireVisionContext,
)

PIECE_BYTES = 1024
"""Bytes of samples per token of speech, if no model card states them; SNAC at 24 kHz has 586."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """The work of one request.

    ``tokens``: most tokens that it generates; a step of a picture is one. ``rows``: rows that a
    generated token computes. ``vector``: its result is one vector, which a prefill worker returns.
    ``file``: its result is one file, in the terminal. ``pieces``: its tokens complete pieces of a
    file, which travel with them. ``encoded``: positions of the prompt that an encoder computes.
    ``encoder``: tokens that encoders read before the first step. ``result_bytes``: most bytes of a
    vector or of files in the terminal and on the way to it.
    """

    tokens: int
    rows: int = 1
    vector: bool = False
    file: bool = False
    pieces: bool = False
    encoded: int = 0
    encoder: int = 0
    result_bytes: int = 0


def work_of(context: WireContext) -> Work:
    """Return the work of a checked context. Raises InputError for wrong arrays of a picture."""
    text = type(context) is WireContext
    end = context.max_length if text else context.end_length  # a property takes as long as the rest
    room = end - len(context.tokens.array)
    most = context.sampling.max_new_tokens
    if most is not None and most < room:
        room = most
    tokens = room if room > 0 else 0
    if text:
        if context.task == "embed":
            return Work(tokens, vector=True, result_bytes=4 * MAX_EMBEDDING_SIZE)
        return Work(tokens)
    if isinstance(context, WirePixelContext):
        previews = png_bytes(MAX_PICTURE_SIDE, MAX_PREVIEW_PIXELS // MAX_PICTURE_SIDE)
        return Work(
            tokens,
            rows=step_rows(context),
            file=context.task == "draw",
            encoder=encoder_tokens(context),
            result_bytes=png_bytes(context.height, context.width)
            + len(preview_steps(context)) * previews,
        )
    if isinstance(context, WireVisionContext):
        encoded = sum(image.end_idx - image.start_idx for image in context.images)
        return Work(tokens, encoded=encoded)
    return Work(tokens, pieces=isinstance(context, WireSpeechContext))


def piece_bytes(work: Work, card: ModelCard | None) -> int:
    """Return the most bytes of all pieces that its tokens complete."""
    if not work.pieces:
        return 0
    audio = None if card is None else card.audio
    return work.tokens * PIECE_BYTES if audio is None else audio.nbytes(work.tokens)


def kv_positions(context: WireContext, work: Work, block_size: int) -> int:
    """Return the positions of KV memory that the whole request needs at most.

    The parts of a picture's state begin at multiples of ``block_size``.
    """
    # First the exact type: a check of msgspec's classes costs as much as the rest.
    if type(context) is not WireContext and isinstance(context, WirePixelContext):
        return state_length(state_parts(context, block_size)) + context.num_inference_steps + 1
    return len(context.tokens.array) + work.tokens


def prefix_hashes(context: WireContext, block_size: int, most: int) -> list[bytes]:
    """Return the hashes of its first ``most`` full KV blocks."""
    tokens = context.tokens.array
    if isinstance(context, WirePixelContext):
        tokens = state_tokens(context, block_size)
    return block_hashes(
        tokens[: block_size * most],
        block_size,
        context.cache_salt.encode(),
        images=spans_of(context),
    )
