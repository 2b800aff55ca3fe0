"""The status of a request; on the wire its values are texts."""

from __future__ import annotations

from enum import StrEnum


class GenerationStatus(StrEnum):
    """State of a request's generation; all values except ``ACTIVE`` are ends."""

    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    MAXIMUM_LENGTH = "maximum_length"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        """Whether generation has ended."""
        return self is not GenerationStatus.ACTIVE
