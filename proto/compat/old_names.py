"""Earlier names of a context's state, as properties, and earlier arguments of its constructor.

Code that was written for contexts with indices still works::

    |<-- processed -->|<-- next -->|<- later chunks ->|
    0             start_idx    active_idx          end_idx
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..contexts.tokens import Int64, TokenBuffer
from ..errors import InputError

C = TypeVar("C")

INDEX_FIELDS = (
    "_start_idx",
    "_active_idx",
    "_end_idx",
    "_completion_start_idx",
    "_completion_end_idx",
    "_prompt_len",
)
"""Fields of an earlier context that are now in a :class:`.TokenBuffer`; -1: unset."""

_RENAMED: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "_status": ("status", lambda value: value),
    "_needs_vision_encoding": ("_pixels_encoded", lambda value: not value),
    "_decoded_index": ("decoded_index", lambda value: value),
    "_audio_generation_status": ("audio_generation_status", lambda value: value),
}
_UNSET = -1
_CAPACITY = "_size"  # length of the array; ignored
_EARLIER = frozenset({*INDEX_FIELDS, *_RENAMED, _CAPACITY})


def takes_earlier_fields(cls: type[C]) -> type[C]:
    """Class decorator: the constructor also accepts the fields of the earlier page.

    With indices, ``tokens`` is an array or a list. The constructor raises TypeError for a value
    given under both names and for indices with a :class:`.TokenBuffer`, and ValueError for
    contradicting indices.
    """
    init = cast("Any", cls).__init__

    @wraps(init)
    def construct(self: C, **values: object) -> None:
        if not _EARLIER.isdisjoint(values):
            values = _later_fields(values)
        init(self, **values)

    cast("Any", cls).__init__ = construct
    return cls


def _later_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments under the later names, with indices as part of the token buffer."""
    later = {name: value for name, value in values.items() if name not in _EARLIER}
    for name in _RENAMED.keys() & values.keys():
        new, convert = _RENAMED[name]
        if new in later:
            raise TypeError(f"{new} was given twice, also as {name}")
        later[new] = convert(values[name])
    indices = {name: values[name] for name in INDEX_FIELDS if name in values}
    if indices:
        if isinstance(later.get("tokens"), TokenBuffer):
            raise TypeError(f"{min(indices)} cannot be combined with a TokenBuffer")
        later["tokens"] = indexed_buffer(later.get("tokens"), indices)
    return later


def indexed_buffer(tokens: npt.ArrayLike | None, indices: Mapping[str, int]) -> TokenBuffer:
    """Make a buffer from tokens ``[n]``, with room after them, and ``INDEX_FIELDS``.

    Raises ValueError for tokens that are not 1-D integers, or for contradicting indices.
    """
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu":
        raise InputError(f"tokens must be integers, not {array.dtype}")

    def index(name: str, default: int) -> int:
        value = indices.get(name, _UNSET)
        return default if value == _UNSET else value

    length = index("_end_idx", index("_active_idx", len(array) if array.ndim else 0))
    active = index("_active_idx", length)
    state = [
        length,
        index("_start_idx", 0),
        active,
        0,
        index("_completion_start_idx", active),
        index("_completion_end_idx", active),
        index("_prompt_len", active),
        active < length,
    ]
    return TokenBuffer.from_state(array.astype(np.int64), state)


class OldNames:
    """Properties and setters that :class:`.TextContext` inherits; has no state."""

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
        """Tokens of the original prompt, as a view."""
        return self.tokens.all[: self._prompt_length]

    @property
    def generated_tokens(self) -> Int64:
        """Tokens after the original prompt, as a view."""
        return self.tokens.all[self._prompt_length :]

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """Set indices; None keeps an index. Raises ValueError unless start < active <= end.

        A higher end reserves zeroed room; active < end makes the tokens chunked. Raises ValueError
        for an end before the last token of the prompt or the last appended token; use ``rollback``
        to drop tokens. Errors change nothing.
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
        """The cache slot; ValueError if unassigned."""
        if self._cache_seq_id is None:
            raise ValueError("the context is not assigned to a cache slot")
        return self._cache_seq_id

    def assign_to_cache(self, cache_seq_id: int) -> None:
        """Assign a cache slot; RuntimeError if the context already has a slot."""
        if self._cache_seq_id is not None:
            raise RuntimeError(f"the context is already assigned to slot {self._cache_seq_id}")
        self._cache_seq_id = cache_seq_id

    def unassign_from_cache(self) -> None:
        """Remove the cache slot, if any."""
        self._cache_seq_id = None

    def set_draft_offset(self, idx: int) -> None:
        """Set the draft offset."""
        self._draft_offset = idx
