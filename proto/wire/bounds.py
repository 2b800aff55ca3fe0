"""Numbers, texts and lists within bounds, of which messages and contexts are made.

A decoder checks the bounds before it builds anything, so later arithmetic cannot overflow; see
:mod:`..limits`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..limits import (
    MAX_ATTEMPT,
    MAX_CHUNK_BYTES,
    MAX_CODE_CHARS,
    MAX_CONTEXT_TOKENS,
    MAX_COUNT,
    MAX_DURATION_S,
    MAX_EOS_SEQUENCE_TOKENS,
    MAX_EOS_SEQUENCES,
    MAX_EOS_TOKEN_IDS,
    MAX_KEY_BYTES,
    MAX_LIST_ITEMS,
    MAX_LOGIT_BIASES,
    MAX_NAME_CHARS,
    MAX_RESULT_BYTES,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_CHARS,
    MAX_WORKER_NAME_CHARS,
)

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

INT32 = 1 << 31
TokenId = Annotated[int, Meta(ge=-INT32, lt=INT32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT_TOKENS)]
Number = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
"""A number of a user's: also wrong values are decoded, so that a check can name the field."""
StopStrings = Annotated[list[Name], Meta(max_length=MAX_STOP_SEQUENCES)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[TokenId, float], Meta(max_length=MAX_LOGIT_BIASES)]
EosTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_EOS_TOKEN_IDS)]
EosSequences = Annotated[
    list[Annotated[list[TokenId], Meta(max_length=MAX_EOS_SEQUENCE_TOKENS)]],
    Meta(max_length=MAX_EOS_SEQUENCES),
]
