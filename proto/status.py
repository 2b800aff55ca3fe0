"""Why a request runs or ended; the values travel as text."""

from __future__ import annotations

from enum import StrEnum


class GenerationStatus(StrEnum):
    """State of a request's generation; everything but ``ACTIVE`` is an end."""

    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    MAXIMUM_LENGTH = "maximum_length"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        """Whether generation has ended."""
        return self is not GenerationStatus.ACTIVE
