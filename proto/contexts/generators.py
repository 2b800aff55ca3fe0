"""Protocols of generators of embeddings and audio, as workers call them.

Implementations need no base class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..ids import RequestID
from .text import TextContext

F32 = npt.NDArray[np.float32]
C_contra = TypeVar("C_contra", bound=TextContext, contravariant=True)
R_co = TypeVar("R_co", covariant=True)


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
