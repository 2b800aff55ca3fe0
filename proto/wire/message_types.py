"""Parts of all messages: the base class, bounded numbers and texts, references to grants."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..contexts.outputs import TokenLogProbs
from ..limits import (
    MAX_ATTEMPT,
    MAX_CONTEXT_TOKENS,
    MAX_COUNT,
    MAX_DURATION_S,
    MAX_KEY_BYTES,
    MAX_LIST_ITEMS,
    MAX_NAME_CHARS,
    MAX_TEXT_CHARS,
)
from .wire_context import TokenId

# A decoder rejects values outside these bounds, so later arithmetic cannot overflow.
Word = Annotated[int, Meta(ge=0)]
"""Unsigned 64 bit: identities and checksums."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A number or an index of tokens, blocks, frames or bytes."""
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""A duration; never NaN."""
Total = Annotated[float, Meta(ge=0.0)]
"""Seconds of work since start; never NaN."""
Remaining = Annotated[float, Meta(ge=-MAX_DURATION_S, le=MAX_DURATION_S)]
"""Seconds until a deadline, negative after it; never NaN."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
"""An id, an endpoint, a pool, a code."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""Text for users, such as an error message."""
Binary = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
"""A key, a secret or a hash."""
Binaries = Annotated[list[Binary], Meta(max_length=MAX_LIST_ITEMS)]
Names = Annotated[list[Name], Meta(max_length=MAX_LIST_ITEMS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT_TOKENS)]
LogProbs = Annotated[list[TokenLogProbs], Meta(max_length=MAX_CONTEXT_TOKENS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all messages: a msgpack map with a ``type`` key; defaults do not travel."""


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to one grant of a decode worker's incarnation; never valid for another grant."""

    incarnation: Word
    slot: Word
    generation: Word
