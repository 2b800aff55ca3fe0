"""What a request gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from .ids import RequestID
from .status import GenerationStatus


class TokenLogProbs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Wire form of one token's log-probabilities: its own, and the most likely ones."""

    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class LogProbabilities:
    """Log-probabilities of consecutive tokens: one entry per token in both lists.

    ``token_log_probabilities``: of the tokens chosen. ``top_log_probabilities``: token id to
    log-probability of the most likely ones.
    """

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]

    @classmethod
    def of_token(cls, token: TokenLogProbs) -> LogProbabilities:
        """One token's entry from its wire form."""
        return cls([token.logprob], [token.top])

    def to_wire(self) -> TokenLogProbs:
        """Wire form of the first token."""
        return TokenLogProbs(self.token_log_probabilities[0], self.top_log_probabilities[0])


@dataclass(slots=True, kw_only=True)
class TextGenerationOutput:
    """New tokens of one request and its status after them.

    ``log_probabilities``: None, or one entry per token, itself None where a token has none.
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
        """One output with all tokens in order, the first's id and the last's status.

        Raises ValueError for no outputs, or when only some carry log-probabilities.
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


class _Done(Protocol):
    @property
    def is_done(self) -> bool: ...


R = TypeVar("R", bound=_Done)


@dataclass(slots=True)
class SchedulerResult(Generic[R]):
    """One step's result of one request: an output, its cancellation, or its failure."""

    is_done: bool
    result: R | None
    error: str | None = None

    @classmethod
    def create(cls, result: R) -> Self:
        """The step made ``result``, perhaps the last."""
        return cls(is_done=result.is_done, result=result)

    @classmethod
    def cancelled(cls) -> Self:
        """The request was cancelled."""
        return cls(is_done=True, result=None)

    @classmethod
    def failed(cls, message: str) -> Self:
        """The request failed; ``message`` says why."""
        return cls(is_done=True, result=None, error=message)
