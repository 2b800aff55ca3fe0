"""What every message is made of: the base, bounded numbers and texts, names of grants."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .limits import (
    MAX_ATTEMPT,
    MAX_CONTEXT_TOKENS,
    MAX_COUNT,
    MAX_DURATION_S,
    MAX_KEY_BYTES,
    MAX_LIST_ITEMS,
    MAX_NAME_CHARS,
    MAX_TEXT_CHARS,
)
from .outputs import TokenLogProbs
from .wire import TokenId

# A decoder refuses a message with a value outside these, so no arithmetic behind it overflows.
Word = Annotated[int, Meta(ge=0)]
"""Unsigned 64 bit: identities and checksums."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""How many of something there are, or where one is: tokens, blocks, frames, bytes."""
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""A duration; never NaN."""
Total = Annotated[float, Meta(ge=0.0)]
"""Seconds of work since start; never NaN."""
Remaining = Annotated[float, Meta(ge=-MAX_DURATION_S, le=MAX_DURATION_S)]
"""Seconds until a deadline, negative behind it; never NaN."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
"""An id, an endpoint, a pool, a code."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""What people read."""
Binary = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
"""A key, a secret or a hash."""
Binaries = Annotated[list[Binary], Meta(max_length=MAX_LIST_ITEMS)]
Names = Annotated[list[Name], Meta(max_length=MAX_LIST_ITEMS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT_TOKENS)]
LogProbs = Annotated[list[TokenLogProbs], Meta(max_length=MAX_CONTEXT_TOKENS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all messages: a msgpack map with a ``type`` key; defaults do not travel."""


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one grant of one decode worker's life; a stale one never matches again."""

    incarnation: Word
    slot: Word
    generation: Word
