"""What makes something other than text, as the workers call it.

Whoever implements one of these needs no base class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .contexts import TextContext
from .ids import RequestID

F32 = npt.NDArray[np.float32]
C_contra = TypeVar("C_contra", bound=TextContext, contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@dataclass(slots=True, frozen=True)
class EmbeddingsOutput:
    """The vector of one text: ``embeddings`` float32 ``[dim]``."""

    embeddings: F32

    @property
    def is_done(self) -> bool:
        """A text has one vector, so always."""
        return True


class EmbeddingsGenerator(Protocol):
    """Turns each context into a vector, in one call."""

    def encode(self, batch: Mapping[RequestID, TextContext]) -> dict[RequestID, EmbeddingsOutput]:
        """The vectors of the batch.

        A request without one is left out; the worker answers it with an error of its own.
        """
        ...


class AudioGenerator(Protocol, Generic[C_contra, R_co]):
    """Makes speech piece by piece: ``C`` are contexts with speech tokens, ``R`` the responses."""

    @property
    def decoder_sample_rate(self) -> int:
        """Samples of audio per second."""
        ...

    @property
    def prev_num_steps(self) -> int:
        """Speech tokens made in the last batch."""
        ...

    def next_chunk(self, batch: Mapping[RequestID, C_contra]) -> Mapping[RequestID, R_co]:
        """The next piece of audio of each request, or word that it has ended."""
        ...

    def release(self, context: C_contra) -> None:
        """Forget a context and free what it holds."""
        ...
