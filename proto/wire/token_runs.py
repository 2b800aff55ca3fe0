"""Token runs as messages of bounded size: media of many runs may not fit into one envelope."""

from __future__ import annotations

from collections.abc import Iterable

from ..limits import MAX_CHUNK_BYTES
from .messages import TokenRun, Tokens


def messages_of(runs: Iterable[TokenRun]) -> list[Tokens]:
    """Return the runs in order, each message with at most ``MAX_CHUNK_BYTES`` of media."""
    messages: list[Tokens] = []
    part: list[TokenRun] = []
    size = 0
    for run in runs:
        nbytes = 0 if run.media is None else len(run.media)
        if part and size + nbytes > MAX_CHUNK_BYTES:
            messages.append(Tokens(runs=part))
            part, size = [], 0
        part.append(run)
        size += nbytes
    return [*messages, Tokens(runs=part)] if part else messages
