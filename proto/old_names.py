"""Earlier names of a context's state, as thin views on the one state machine.

They keep code written for the index form of a context working::

    |<-- processed -->|<-- next -->|<- later chunks ->|
    0             start_idx    active_idx          end_idx
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tokens import Int64, TokenBuffer


class OldNames:
    """Properties and setters that :class:`.TextContext` inherits; holds nothing itself."""

    if not TYPE_CHECKING:  # the attributes below are slots of the class that inherits
        __slots__ = ()

    tokens: TokenBuffer
    _prompt_length: int
    _committed_idx: int
    _cache_seq_id: int | None
    _draft_offset: int

    @property
    def start_idx(self) -> int:
        """Start of the processing window."""
        return self.tokens.processed_length

    @property
    def active_idx(self) -> int:
        """End of the processing window."""
        return self.tokens.processing_range.end

    @property
    def end_idx(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def committed_idx(self) -> int:
        """Tokens committed to the prefix cache."""
        return self._committed_idx

    @property
    def current_length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def active_length(self) -> int:
        """Tokens of the next step."""
        return self.tokens.active_length

    @property
    def is_ce(self) -> bool:
        """Whether more than one token is active."""
        return self.active_length > 1

    @property
    def all_tokens(self) -> Int64:
        """Every token, as a view."""
        return self.tokens.all

    @property
    def next_tokens(self) -> Int64:
        """Tokens of the next step, as a view."""
        return self.tokens.active

    @property
    def prompt_tokens(self) -> Int64:
        """Tokens the request came with, as a view."""
        return self.tokens.all[: self._prompt_length]

    @property
    def generated_tokens(self) -> Int64:
        """Tokens behind those the request came with, as a view."""
        return self.tokens.all[self._prompt_length :]

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """Set indices, None keeps one; ValueError, and no change, unless start < active <= end.

        A higher end reserves zeroed room; active < end makes the tokens chunked.
        """
        self.tokens.set_windows(
            self.start_idx if start_idx is None else start_idx,
            self.active_idx if active_idx is None else active_idx,
            self.end_idx if end_idx is None else end_idx,
        )
        if committed_idx is not None:
            self._committed_idx = committed_idx

    def bump_token_indices(
        self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0, committed_idx: int = 0
    ) -> None:
        """Add to indices; checks as :meth:`set_token_indices`."""
        self.set_token_indices(
            self.start_idx + start_idx,
            self.active_idx + active_idx,
            self.end_idx + end_idx,
            self._committed_idx + committed_idx,
        )

    @property
    def is_assigned_to_cache(self) -> bool:
        """Whether the context has a cache slot."""
        return self._cache_seq_id is not None

    @property
    def cache_seq_id(self) -> int:
        """The cache slot; ValueError without one."""
        if self._cache_seq_id is None:
            raise ValueError("the context is not assigned to a cache slot")
        return self._cache_seq_id

    def assign_to_cache(self, cache_seq_id: int) -> None:
        """Give the context a cache slot; RuntimeError if it has one."""
        if self._cache_seq_id is not None:
            raise RuntimeError(f"the context is already assigned to slot {self._cache_seq_id}")
        self._cache_seq_id = cache_seq_id

    def unassign_from_cache(self) -> None:
        """Take the cache slot away, if there is one."""
        self._cache_seq_id = None

    def set_draft_offset(self, idx: int) -> None:
        """Set the draft offset."""
        self._draft_offset = idx
