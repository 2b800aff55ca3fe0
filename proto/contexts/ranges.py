"""A window of token positions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Range:
    """Half-open range ``[start, end)`` of token positions."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.end < 0:
            raise ValueError(f"range [{self.start}, {self.end}) must not be negative")
        if self.start > self.end:
            raise ValueError(f"range start {self.start} is after its end {self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def bump_start(self, amount: int) -> None:
        """Move the start by ``amount``; it stays within ``[0, end]``."""
        if not 0 <= self.start + amount <= self.end:
            raise ValueError(f"start {self.start} + {amount} leaves [0, {self.end}]")
        self.start += amount

    def bump_end(self, amount: int) -> None:
        """Move the end by ``amount``; it stays at or after the start."""
        if self.end + amount < max(self.start, 0):
            raise ValueError(f"end {self.end} + {amount} falls before the start {self.start}")
        self.end += amount

    def advance(self) -> None:
        """Move the start to the end, so that the range is empty."""
        self.start = self.end
