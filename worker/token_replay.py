"""Repetition of a request's tokens, with the log-probabilities that are still kept."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from ..proto.contexts.outputs import TokenLogProbs
from ..proto.wire.messages import TokenRun
from .attempts import Key

LOGPROBS_KEPT = 4096
"""Number of newest tokens per request whose log-probabilities a worker keeps for repetition."""


def runs_again(
    key: Key, position: int, tokens: list[int], logprobs: Collection[TokenLogProbs]
) -> list[TokenRun]:
    """Return token runs for ``tokens`` from ``position`` on.

    ``logprobs``: of the request's last tokens. A run has log-probabilities for all of its tokens or
    for none, so there may be two runs. Without tokens, return one empty run, which confirms that
    this worker has the request.
    """
    known = min(len(logprobs), len(tokens))
    bare = len(tokens) - known
    runs = [TokenRun(*key, position, tokens[:bare])] if bare or not known else []
    if known:
        entries = list(islice(logprobs, len(logprobs) - known, None))
        runs.append(TokenRun(*key, position + bare, tokens[bare:], entries))
    return runs
