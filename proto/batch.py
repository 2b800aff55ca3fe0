"""Contexts that take a step together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from .contexts import TextContext
from .status import GenerationStatus
from .tokens import FUTURE_TOKEN, TokenBuffer


class BatchType(StrEnum):
    """What a batch does: encode prompts, or generate tokens."""

    CE = "CE"
    TG = "TG"


@dataclass(slots=True)
class TextGenerationInputs:
    """The contexts of a step, per replica, and how many tokens each is to get.

    A replica is a copy of the model with a KV cache of its own. True unless empty.
    """

    batches: list[list[TextContext]] = field(default_factory=list)
    num_steps: int = 1

    def __bool__(self) -> bool:
        return any(self.batches)

    @property
    def flat_batch(self) -> list[TextContext]:
        """The contexts of all replicas in order."""
        return [context for batch in self.batches for context in batch]

    @property
    def input_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(context.tokens.active_length for context in self.flat_batch)

    @property
    def context_tokens(self) -> int:
        """Tokens that were computed before."""
        return sum(context.tokens.processed_length for context in self.flat_batch)

    @property
    def batch_type(self) -> BatchType:
        """Encoding as soon as one context has generated nothing."""
        fresh = any(context.tokens.generated_length == 0 for context in self.flat_batch)
        return BatchType.CE if fresh else BatchType.TG

    @property
    def batch_top_log_probs(self) -> list[int]:
        """Per context how many log-probabilities are wanted."""
        return [context.log_probabilities for context in self.flat_batch]

    @property
    def batch_echo(self) -> list[bool]:
        """Per context whether those of the prompt are wanted too."""
        return [context.log_probabilities_echo for context in self.flat_batch]


@contextmanager
def reserve_token_space_for_batch(batch: Sequence[TextContext], num_tokens: int) -> Iterator[None]:
    """Lend each context ``num_tokens`` tokens of zeroed, active room behind its own, until the end.

    A negative number hides the last tokens instead. ValueError, and nothing is lent, when a context
    has fewer. A context that is in the batch twice gets the room twice and gives both back.
    """
    before: list[tuple[TokenBuffer, int, int]] = []
    try:
        for context in batch:
            tokens = context.tokens
            state = (tokens, tokens._end, tokens._length)
            tokens.lend(num_tokens)
            before.append(state)
        yield
    finally:
        for tokens, end, length in reversed(before):
            tokens.take_back(end, length)


def update_batch(contexts: Sequence[TextContext], new_tokens: Sequence[int]) -> None:
    """One :meth:`.TextContext.update` for each context, without log-probabilities.

    The common case (text only, no chunk, no placeholder, no grammar, no stop sequences, room
    in the buffer) is done here in one loop; everything else goes through ``update``.
    """
    eos, maximum = GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH
    for context, token in zip(contexts, new_tokens, strict=True):
        tokens = context.tokens
        length = tokens._length
        if (
            length == tokens._capacity
            or tokens._chunked
            or context.eos_sequences
            or context._matcher is not None
            or type(context) is not TextContext
            or tokens._store.item(length - 1) == FUTURE_TOKEN
        ):
            context.update(token)
            continue
        tokens._store[length] = token
        tokens._length = length + 1
        tokens._start = end = tokens._end
        tokens._end = end = end + 1
        tokens._completion_end = length + 1
        tokens._offset = 0
        if token in context.eos_token_ids and not context.ignore_eos:
            context.status = eos
        elif end >= context.max_length:
            context.status = maximum
        context._is_initial_prompt = False
