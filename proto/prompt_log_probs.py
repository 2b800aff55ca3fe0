"""Log-probabilities of a prompt's tokens, as bytes that travel with the first generated token.

One record per prompt token but the first, which has no predecessor. Records instead of maps bound
the memory: a record takes ``8 + 8 * top`` bytes on the wire and in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DecodeFailed, InputError
from .limits import MAX_CHUNK_BYTES

Records = npt.NDArray[np.void]
"""Structured array with the fields of :func:`record_type`."""


def record_type(top: int) -> np.dtype[Any]:
    """Return the type of one token's record.

    ``logprob``: float32, of the prompt's token. ``rank``: int32, 1 for the most likely token.
    ``ids``: int32 ``[top]``, the most likely tokens, best first. ``logprobs``: float32 ``[top]``.
    """
    return np.dtype(
        [("logprob", "<f4"), ("rank", "<i4"), ("ids", "<i4", (top,)), ("logprobs", "<f4", (top,))]
    )


def records_bytes(prompt_tokens: int, top: int) -> int:
    """Return the size of all records of a prompt."""
    return max(0, prompt_tokens - 1) * record_type(top).itemsize


def check_prompt_log_probs(prompt_tokens: int, top: int) -> None:
    """Raise InputError if the records of a prompt cannot be sent."""
    if not top:
        raise InputError("log_probabilities_echo needs log_probabilities of at least 1")
    size = record_type(top).itemsize
    if records_bytes(prompt_tokens, top) > MAX_CHUNK_BYTES:
        raise InputError(
            f"log-probabilities of a prompt of {prompt_tokens} tokens are too large: with "
            f"{top} alternatives the limit is {MAX_CHUNK_BYTES // size + 1} tokens"
        )


@dataclass(slots=True, frozen=True)
class PromptLogProb:
    """One prompt token: its log-probability, its rank, and the most likely tokens, best first.

    The first token of a prompt has no log-probability (None), no rank (0) and no ``top``.
    """

    token: int
    logprob: float | None = None
    rank: int = 0
    top: dict[int, float] = field(default_factory=dict)


def read_prompt_log_probs(
    data: bytes, tokens: Sequence[int], top: int, shown: int
) -> list[PromptLogProb]:
    """Return one entry per prompt token, with ``shown`` of the ``top`` most likely tokens.

    ``tokens``: of the prompt. Raises DecodeFailed if the bytes are not this prompt's records.
    """
    if not tokens or len(data) != records_bytes(len(tokens), top):
        raise DecodeFailed(f"{len(data)} bytes are not the records of {len(tokens)} prompt tokens")
    records = np.frombuffer(data, record_type(top))
    logprobs, ranks = records["logprob"].tolist(), records["rank"].tolist()
    ids, values = records["ids"][:, :shown].tolist(), records["logprobs"][:, :shown].tolist()
    entries = [
        PromptLogProb(token, logprob, rank, dict(zip(likely, numbers, strict=True)))
        for token, logprob, rank, likely, numbers in zip(
            tokens[1:], logprobs, ranks, ids, values, strict=True
        )
    ]
    return [PromptLogProb(tokens[0]), *entries]
