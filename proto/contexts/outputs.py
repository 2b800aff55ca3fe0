"""Outputs of text requests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec import Meta

from ..ids import RequestID
from ..limits import MAX_LOG_PROBABILITIES
from .status import GenerationStatus

_PAIR_BYTES = 4 + 8


class TokenLogProbs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one token: of the token, and of the most likely tokens as bytes.

    ``packed``: n int32 token ids, then their n float64 log-probabilities, little-endian, in the
    order of :attr:`top`. With a map per token, a message of one-byte maps would take 72 times its
    size in memory; bytes are decoded only when :attr:`top` is read.
    """

    logprob: float
    packed: Annotated[bytes, Meta(max_length=MAX_LOG_PROBABILITIES * _PAIR_BYTES)]

    def __post_init__(self) -> None:
        if len(self.packed) % _PAIR_BYTES:
            raise ValueError(f"{len(self.packed)} bytes are not whole pairs of id and number")

    @classmethod
    def of(cls, logprob: float, top: Mapping[int, float]) -> Self:
        """Pack the log-probability of the token, and those of the most likely tokens by id.

        Raises ValueError for an id that is not int32.
        """
        try:
            packed = struct.pack(f"<{len(top)}i{len(top)}d", *top, *top.values())
        except struct.error as error:
            raise ValueError(f"log-probabilities cannot be sent: {error}") from None
        return cls(logprob, packed)

    @property
    def top(self) -> dict[int, float]:
        """Token id to log-probability of the most likely tokens, as a new dict at every call."""
        count = len(self.packed) // _PAIR_BYTES
        numbers = struct.unpack(f"<{count}i{count}d", self.packed)
        return dict(zip(numbers, numbers[count:], strict=False))


@dataclass(slots=True)
class LogProbabilities:
    """Log-probabilities of consecutive tokens: one entry per token in both lists.

    ``token_log_probabilities``: of the sampled tokens. ``top_log_probabilities``: token id to
    log-probability of the most likely tokens.
    """

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]

    @classmethod
    def of_token(cls, token: TokenLogProbs) -> LogProbabilities:
        """Convert the wire form of one token."""
        return cls([token.logprob], [token.top])

    def to_wire(self) -> TokenLogProbs:
        """Return the wire form of the first token."""
        return TokenLogProbs.of(self.token_log_probabilities[0], self.top_log_probabilities[0])


@dataclass(slots=True, kw_only=True)
class TextGenerationOutput:
    """New tokens of one request and its status after them.

    ``log_probabilities``: None, or one entry per token: None for a token without any.
    """

    request_id: RequestID
    tokens: list[int] = field(default_factory=list)
    final_status: GenerationStatus = GenerationStatus.ACTIVE
    log_probabilities: list[LogProbabilities | None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether these are the request's last tokens."""
        return self.final_status.is_done

    @classmethod
    def merge(cls, outputs: Sequence[TextGenerationOutput]) -> TextGenerationOutput:
        """Merge outputs: all tokens in order, the first output's id and the last output's status.

        Raises ValueError for an empty list, or if only some outputs have log-probabilities.
        """
        if not outputs:
            raise ValueError("cannot merge an empty list of outputs")
        if len(outputs) == 1:
            return outputs[0]
        parts = [part.log_probabilities for part in outputs if part.log_probabilities is not None]
        if parts and len(parts) != len(outputs):
            raise ValueError("cannot merge outputs with and without log-probabilities")
        return cls(
            request_id=outputs[0].request_id,
            tokens=[token for part in outputs for token in part.tokens],
            final_status=outputs[-1].final_status,
            log_probabilities=[entry for part in parts for entry in part] if parts else None,
        )


_new = object.__new__


def token_output(
    request_id: RequestID, token: int, status: GenerationStatus
) -> TextGenerationOutput:
    """Return an output of one token without log-probabilities.

    Nearly every decode step makes one. The class's constructor takes three times as long, with its
    keyword arguments and its default for ``tokens``.
    """
    output = _new(TextGenerationOutput)
    output.request_id = request_id
    output.tokens = [token]
    output.final_status = status
    output.log_probabilities = None
    return output


class _Done(Protocol):
    @property
    def is_done(self) -> bool: ...


R = TypeVar("R", bound=_Done)


@dataclass(slots=True)
class SchedulerResult(Generic[R]):
    """Result of one step for one request: an output, a cancellation or a failure."""

    is_done: bool
    result: R | None
    error: str | None = None

    @classmethod
    def create(cls, result: R) -> Self:
        """Return the result of a step with output ``result``, possibly the last."""
        return cls(is_done=result.is_done, result=result)

    @classmethod
    def cancelled(cls) -> Self:
        """Return the result of a cancelled request."""
        return cls(is_done=True, result=None)

    @classmethod
    def failed(cls, message: str) -> Self:
        """Return the result of a failed request; ``message``: the reason."""
        return cls(is_done=True, result=None, error=message)
