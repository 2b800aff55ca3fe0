"""Log-probabilities with the texts of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.proto.contexts.outputs import LogProbabilities
from baton.proto.prompt_log_probs import PromptLogProb
from baton.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """One token with its log-probability.

    ``text``: may hold U+FFFD for a part of a character, whose ``bytes`` are exact. Both are empty
    if the model has no tokenizer. ``top``: the most likely tokens at this position. ``logprob``:
    NaN for the first token of a prompt, which nothing predicts. ``rank``: of a prompt's token, 1
    for the most likely one; 0 if it is not known.
    """

    token_id: int
    logprob: float
    text: str = ""
    bytes: bytes = b""
    top: list[TokenLogprob] = field(default_factory=list)
    rank: int = 0


def token_logprobs(
    tokens: Sequence[int], entries: Sequence[LogProbabilities | None], tokenizer: Tokenizer | None
) -> list[TokenLogprob]:
    """Return one record per token that has log-probabilities."""
    records = []
    for token, entry in zip(tokens, entries, strict=False):
        if entry is not None:
            likely = entry.top_log_probabilities[0].items()
            top = [_record(one, value, tokenizer) for one, value in likely]
            records.append(_record(token, entry.token_log_probabilities[0], tokenizer, top))
    return records


def prompt_logprobs(
    entries: Sequence[PromptLogProb], tokenizer: Tokenizer | None
) -> list[TokenLogprob]:
    """Return one record per token of a prompt."""
    records = []
    for entry in entries:
        top = [_record(one, value, tokenizer) for one, value in entry.top.items()]
        logprob = math.nan if entry.logprob is None else entry.logprob
        records.append(_record(entry.token, logprob, tokenizer, top, entry.rank))
    return records


def _record(
    token: int,
    logprob: float,
    tokenizer: Tokenizer | None,
    top: list[TokenLogprob] | None = None,
    rank: int = 0,
) -> TokenLogprob:
    content = b"" if tokenizer is None else tokenizer.token_bytes(token)
    text = content.decode("utf-8", "replace")
    return TokenLogprob(token, logprob, text, content, top or [], rank)
