"""Parts of all messages: the base class, bounded numbers and texts, references to grants."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..contexts.outputs import TokenLogProbs
from ..limits import (
    MAX_ATTEMPT,
    MAX_CHUNK_BYTES,
    MAX_CODE_CHARS,
    MAX_CONTEXT_TOKENS,
    MAX_COUNT,
    MAX_DURATION_S,
    MAX_KEY_BYTES,
    MAX_LIST_ITEMS,
    MAX_NAME_CHARS,
    MAX_RESULT_BYTES,
    MAX_TEXT_CHARS,
    MAX_WORKER_NAME_CHARS,
)
from .wire_context import TokenId

# A decoder rejects values outside these bounds, so later arithmetic cannot overflow.
Word = Annotated[int, Meta(ge=0)]
"""Unsigned 64 bit: identities and checksums."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A number or an index of tokens, blocks, frames or bytes."""
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
ExitStatus = Annotated[int, Meta(ge=-1024, le=1024)]
"""Exit code of a process, negative for a signal."""
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""A duration; never NaN."""
Total = Annotated[float, Meta(ge=0.0, le=float(MAX_COUNT))]
"""A sum since start, of seconds or tokens; finite, never NaN."""
Remaining = Annotated[float, Meta(ge=-MAX_DURATION_S, le=MAX_DURATION_S)]
"""Seconds until a deadline, negative after it; never NaN."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
"""An id, an endpoint, a pool, a code."""
WorkerName = Annotated[str, Meta(max_length=MAX_WORKER_NAME_CHARS)]
Code = Annotated[str, Meta(max_length=MAX_CODE_CHARS)]
"""An error code, a status or a transport."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""Text for users, such as an error message."""
Binary = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
"""A key, a secret or a hash."""
Chunk = Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]
"""Samples that a token run completes."""
Result = Annotated[bytes, Meta(max_length=MAX_RESULT_BYTES)]
"""A binary result."""
Binaries = Annotated[list[Binary], Meta(max_length=MAX_LIST_ITEMS)]
Names = Annotated[list[Name], Meta(max_length=MAX_LIST_ITEMS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT_TOKENS)]
LogProbs = Annotated[list[TokenLogProbs], Meta(max_length=MAX_CONTEXT_TOKENS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all messages: a msgpack map with a ``type`` key; defaults do not travel."""


class WorkerTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When an attempt reached its steps at one worker; None for a step that was not reached.

    In seconds after the Assign arrived at the prefill worker, or after the decode worker took the
    request over: durations, because the clocks of processes differ.
    """

    started: Seconds | None = None  # prefill: it got its (last) execution slot
    granted: Seconds | None = None  # prefill: the decode worker reserved blocks
    computing: Seconds | None = None  # it joined the batch
    sending: Seconds | None = None  # prefill: the first KV frame was sent
    computed: Seconds | None = None  # the first token or the embedding was computed here
    ended: Seconds | None = None  # it was handed over, or ended here
    refusals: Count = 0  # prefill: how many times its decode worker had no free blocks
    preemptions: Count = 0


class ServedTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the time before the first token went, in seconds; None for what is not known."""

    queue: Seconds | None = None  # until a worker began to compute
    prefill: Seconds | None = None  # from then until the first token was computed
    handoff: Seconds | None = None  # from then until the decode worker had the request
    first_token: Seconds | None = None  # from the request's arrival to that of its first token


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to one grant of a decode worker's incarnation; never valid for another grant."""

    incarnation: Word
    slot: Word
    generation: Word
