"""Repetition of a request's tokens, with their media and the log-probabilities still kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.wire.messages import TokenRun

from .attempts import Key

LOGPROBS_KEPT = 4096
"""Number of newest tokens per request whose log-probabilities a worker keeps for repetition."""


_NO_MEDIA: Mapping[int, bytes] = {}


def runs_again(
    key: Key,
    position: int,
    tokens: list[int],
    logprobs: Collection[TokenLogProbs],
    media: Mapping[int, bytes] = _NO_MEDIA,
) -> list[TokenRun]:
    """Return token runs for ``tokens`` from ``position`` on.

    ``logprobs``: of the request's last tokens. A run has log-probabilities for all of its tokens or
    for none, so there may be two runs. ``media``: by the position of the token that completes it,
    with which its run ends. Without tokens, return one empty run, which confirms that this worker
    has the request.
    """
    known = min(len(logprobs), len(tokens))
    bare = len(tokens) - known
    entries = list(islice(logprobs, len(logprobs) - known, None)) if known else []
    cuts = {bare, len(tokens)}
    if media:
        cuts.update(at - position + 1 for at in media if 0 <= at - position < len(tokens))
    runs, start = [], 0
    for end in sorted(cuts - {0}) or [0]:
        also = entries[start - bare : end - bare] if start >= bare and known else None
        chunk = media.get(position + end - 1) if end > start else None
        runs.append(TokenRun(*key, position + start, tokens[start:end], also, chunk))
        start = end
    return runs
