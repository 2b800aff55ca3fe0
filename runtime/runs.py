"""Saying tokens again, with the log-probabilities that are still known."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from ..proto.messages import TokenRun
from ..proto.outputs import TokenLogProbs
from .attempts import Key

LOGPROBS_KEPT = 4096
"""Tokens of one request, the newest, whose log-probabilities a worker keeps to say again."""


def runs_again(
    key: Key, position: int, tokens: list[int], logprobs: Collection[TokenLogProbs]
) -> list[TokenRun]:
    """``tokens`` from ``position`` on; ``logprobs`` are those of the last ones said so far.

    A run has log-probabilities for all its tokens or for none, so there may be two. Without
    tokens there is one empty run: the request is here.
    """
    known = min(len(logprobs), len(tokens))
    bare = len(tokens) - known
    runs = [TokenRun(*key, position, tokens[:bare])] if bare or not known else []
    if known:
        entries = list(islice(logprobs, len(logprobs) - known, None))
        runs.append(TokenRun(*key, position + bare, tokens[bare:], entries))
    return runs
