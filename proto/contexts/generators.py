"""What generators compute in one step: batches of texts, and generators of embeddings and audio.

The generators are protocols; implementations need no base class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..ids import RequestID
from .status import GenerationStatus
from .text import TextContext
from .tokens import FUTURE_TOKEN, TokenBuffer

F32 = npt.NDArray[np.float32]
C_contra = TypeVar("C_contra", bound=TextContext, contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class BatchType(StrEnum):
    """Kind of a batch: context encoding (prompts) or token generation."""

    CE = "CE"
    TG = "TG"


@dataclass(slots=True)
class TextGenerationInputs:
    """The contexts of a step by replica, and the number of tokens to generate for each.

    A replica is a copy of the model with its own KV cache. The truth value is False if empty.
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
        """Number of tokens to compute."""
        return sum(context.tokens.active_length for context in self.flat_batch)

    @property
    def context_tokens(self) -> int:
        """Number of tokens that were computed before."""
        return sum(context.tokens.processed_length for context in self.flat_batch)

    @property
    def batch_type(self) -> BatchType:
        """CE if any context has not generated a token yet, else TG."""
        fresh = any(context.tokens.generated_length == 0 for context in self.flat_batch)
        return BatchType.CE if fresh else BatchType.TG

    @property
    def batch_top_log_probs(self) -> list[int]:
        """Number of requested log-probabilities, by context."""
        return [context.log_probabilities for context in self.flat_batch]

    @property
    def batch_echo(self) -> list[bool]:
        """Whether log-probabilities of the prompt are requested, by context."""
        return [context.log_probabilities_echo for context in self.flat_batch]


@contextmanager
def reserve_token_space_for_batch(batch: Sequence[TextContext], num_tokens: int) -> Iterator[None]:
    """Add ``num_tokens`` zeroed active tokens to the end of each context for a ``with`` block.

    A negative number hides the last tokens instead; raises ValueError, and changes no context, if
    a context has fewer. A context that is twice in the batch gets the tokens twice.
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
    """Call :meth:`.TextContext.update` for each context, without log-probabilities.

    A faster loop handles the common case: text only, no chunk, no placeholder, no grammar, no stop
    sequences, room in the buffer.
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


@dataclass(slots=True, frozen=True)
class EmbeddingsOutput:
    """The embedding of one text: ``embeddings`` float32 ``[dim]``."""

    embeddings: F32

    @property
    def is_done(self) -> bool:
        """Always True: a text has one embedding."""
        return True


class EmbeddingsGenerator(Protocol):
    """Computes one embedding per context."""

    def encode(self, batch: Mapping[RequestID, TextContext]) -> dict[RequestID, EmbeddingsOutput]:
        """Return the embeddings of the batch.

        A request without an embedding is left out; the worker answers it with an error.
        """
        ...


class AudioGenerator(Protocol, Generic[C_contra, R_co]):
    """Generates speech in chunks. ``C``: contexts with speech tokens; ``R``: responses."""

    @property
    def decoder_sample_rate(self) -> int:
        """Samples of audio per second."""
        ...

    @property
    def prev_num_steps(self) -> int:
        """Number of speech tokens generated in the last batch."""
        ...

    def next_chunk(self, batch: Mapping[RequestID, C_contra]) -> Mapping[RequestID, R_co]:
        """Return the next chunk of audio of each request, or a response that it has ended."""
        ...

    def release(self, context: C_contra) -> None:
        """Release a context and its resources."""
        ...
