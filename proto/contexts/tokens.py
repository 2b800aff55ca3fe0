"""A request's tokens, and which of them are processed, active and undelivered.

Invariant::

    0 <= processing start <= processing end <= length <= capacity
    0 <= completion start <= completion end,   0 <= prompt length <= length
    chunked exactly while processing end < length

    |<-- processed -->|<-- active -->|<- later chunks ->|<- zeroed slack ->|
    0            start + offset     end              length            capacity

Ends of sequences and log-probabilities belong to :mod:`.text`.

On the wire, ids are int32. The buffer keeps them and adds only those of new tokens, until it
returns a view of its tokens: through a view, tokens can change without notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .ranges import Range

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

FUTURE_TOKEN = -999
"""Placeholder for a token that is being computed; replaced by the token."""

_UNSET = -1
_STATE_LENGTH = 8
_INT32 = 1 << 31
_INT32_TYPE = np.dtype(np.int32)
_ALONE = 2
"""References to a store without views: that of the slot, and that of the counting call."""
_ROOM = 64
"""Minimum room after received tokens, so that the first appended tokens do not copy them again."""


class _ValidPrefix:
    """The field ``array``: set as a whole, read without the room after the last token.

    As a descriptor, it keeps that room out of every wire form, comparison and copy.
    """

    def __get__(self, buffer: TokenBuffer | None, owner: type | None = None) -> Int64:
        if buffer is None:
            raise AttributeError("array has no default")
        return buffer._view(0, buffer._length)

    def __set__(self, buffer: TokenBuffer, value: Int64) -> None:
        buffer._adopt(value)


class _Named:
    """A field under its name on the wire, stored in a slot with a shorter name."""

    def __init__(self, slot: str) -> None:
        self._slot = slot

    def __get__(self, buffer: TokenBuffer | None, owner: type | None = None) -> int:
        return _UNSET if buffer is None else getattr(buffer, self._slot)

    def __set__(self, buffer: TokenBuffer, value: int) -> None:
        setattr(buffer, self._slot, value)


class _NamedRange:
    """Two slots that form one Range on the wire."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end

    def __get__(self, buffer: TokenBuffer | None, owner: type | None = None) -> Range | None:
        if buffer is None:
            return None
        return Range(getattr(buffer, self._start), getattr(buffer, self._end))

    def __set__(self, buffer: TokenBuffer, value: Range | None) -> None:
        start, end = (_UNSET, _UNSET) if value is None else (value.start, value.end)
        setattr(buffer, self._start, start)
        setattr(buffer, self._end, end)


@dataclass(eq=False, repr=False, init=False)
class TokenBuffer:
    """Growing int64 tokens with a processing window and a completion window.

    ``array``: 1-D, int64, not empty; otherwise ValueError, checked in this order. A read-only
    array is copied. The completion window: tokens that were appended and not yet consumed.
    """

    # The fields define wire form and comparison; the methods use the slots.
    __slots__ = (
        "_capacity",
        "_chunked",
        "_completion_end",
        "_completion_start",
        "_end",
        "_known",
        "_length",
        "_narrow",
        "_offset",
        "_prompt",
        "_shared",
        "_start",
        "_store",
    )

    array: Int64 = _ValidPrefix()  # type: ignore[assignment]
    _processing_range: Range | None = _NamedRange("_start", "_end")  # type: ignore[assignment]
    _processing_offset: int = _Named("_offset")  # type: ignore[assignment]
    _completion_range: Range | None = _NamedRange(  # type: ignore[assignment]
        "_completion_start", "_completion_end"
    )
    _prompt_length: int = _Named("_prompt")  # type: ignore[assignment]
    _current_length: int = _Named("_length")  # type: ignore[assignment]
    _actively_chunked: bool = _Named("_chunked")  # type: ignore[assignment]
    if TYPE_CHECKING:
        _store: Int64 = field(init=False)
        _shared: bool = field(init=False)  # whether a view of the store may exist
        _narrow: Int32 | None = field(init=False)  # int32 ids of the first _known tokens
        _known: int = field(init=False)
        _capacity: int = field(init=False)
        _length: int = field(init=False)
        _start: int = field(init=False)
        _end: int = field(init=False)
        _offset: int = field(init=False)
        _completion_start: int = field(init=False)
        _completion_end: int = field(init=False)
        _prompt: int = field(init=False)
        _chunked: bool = field(init=False)

    def __init__(self, array: Int64) -> None:
        self._adopt(array)
        self._length = _UNSET
        self.__post_init__()

    def __post_init__(self) -> None:
        store = self._store
        if not isinstance(store, np.ndarray):
            raise TypeError(f"tokens must be an array, not {type(store).__name__}")
        if store.ndim != 1:
            raise ValueError(f"tokens must be one-dimensional, not of shape {store.shape}")
        if store.dtype != np.int64:
            raise ValueError(f"tokens must be int64, not {store.dtype}")
        if not len(store):
            raise ValueError("tokens must not be empty")
        if not store.flags.writeable:
            self._store, self._shared = store.copy(), False
        self._capacity = len(store)
        if self._length == _UNSET:
            self._set_state(_fresh_state(len(store)))
        _check_windows(self.state(), self._capacity)

    def _adopt(self, array: Int64) -> None:
        """Take over an array that the caller may still use."""
        self._store, self._shared = array, True
        self._narrow, self._known = None, 0

    @classmethod
    def copy_of(cls, ids: npt.NDArray[np.integer[Any]]) -> TokenBuffer:
        """Copy ids ``[n]``, n > 0, of any integer type into a new buffer.

        They are copied as int32 if they fit, so that they can be sent as they are. They become
        int64 at their first use.
        """
        if ids.dtype != np.int32:
            tokens = ids.astype(np.int64, copy=False)
            if not _fit(tokens):
                return cls(tokens.copy())
            ids = tokens
        return cls.from_state(ids.astype(np.int32))

    @classmethod
    def from_state(cls, ids: npt.NDArray[Any], state: Sequence[int] | None = None) -> TokenBuffer:
        """Rebuild the buffer with these tokens and this :meth:`state`; ValueError if impossible.

        Without a state, the tokens are an unprocessed prompt.

        ``ids``: int32 or int64 ``[length]``. int32 ids become int64 at their first use, so a
        process that only uses lengths or forwards the buffer never copies them.
        """
        shape, dtype = ids.shape, ids.dtype
        if len(shape) != 1 or not shape[0]:
            raise ValueError(f"tokens must be one-dimensional, not of shape {shape}")
        length = shape[0]
        if state is None:
            state = _fresh_state(length)
        else:
            _check_windows(state, length)
            if state[0] != length:
                length = state[0]
                ids = ids[:length]
        self = cls.__new__(cls)
        self._set_state(state)
        self._capacity, self._shared = length, False
        if dtype is _INT32_TYPE or dtype == _INT32_TYPE:
            self._narrow, self._known = ids, length
        elif dtype == np.int64:
            self._store, self._narrow, self._known = ids.copy(), None, 0
        else:
            raise ValueError(f"tokens must be int32 or int64, not {dtype}")
        return self

    def __getattr__(self, name: str) -> Int64:
        """Convert the tokens to int64 at their first use; called only for slots that are not set.

        After that, the buffer does not depend on the frames it was received in.
        """
        narrow = self._narrow if name == "_store" else None
        if narrow is None:
            raise AttributeError(f"TokenBuffer has no {name}")
        length = len(narrow)
        self._capacity = length + max(_ROOM, length // 8)
        self._store = store = np.empty(self._capacity, np.int64)
        store[:length] = narrow
        store[length:] = 0
        if narrow.base is not None:  # of a frame
            self._narrow, self._known = None, 0
        return store

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the state of a copy or pickle; a shallow copy shares the array."""
        self._view(0, 0)
        return None, {name: getattr(self, name) for name in self.__slots__}

    # ------------------------------------------------------------------ int32 ids

    def ids(self) -> npt.NDArray[Any]:
        """Return all tokens, read-only: int32 ``[length]`` if all fit, else int64.

        May be a view. Later changes of the tokens do not change int32 ids.
        """
        length = self._length
        if self._narrow is not None and self._known >= length:
            narrow = self._narrow  # at exactly this length it is never written again
            ids: npt.NDArray[Any] = narrow if len(narrow) == length else narrow[:length]
        elif self._shared and not self._regain():  # any token may have changed
            ids = self._store[:length]
            if _fit(ids):
                ids = ids.astype(np.int32)
        else:
            ids = self._learn(length)
        ids.setflags(write=False)
        return ids

    def _learn(self, length: int) -> npt.NDArray[Any]:
        """Add the ids of new tokens to the known ids; return int64 if they do not fit."""
        known, narrow = self._known, self._narrow
        new = self._store[known:length]
        if not _fit(new):
            return self._store[:length]
        if narrow is None or len(narrow) < length:
            grown = np.empty(self._capacity, np.int32)
            if narrow is not None:
                grown[:known] = narrow[:known]
            self._narrow = narrow = grown
        narrow[known:length] = new
        self._known = length
        return narrow[:length]

    def _forget(self, length: int) -> None:
        """Forget the ids from ``length`` on, because these tokens change or are hidden.

        Their memory is not written again: a socket may still be sending it.
        """
        if self._known > length and self._narrow is not None:
            self._narrow, self._known = self._narrow[:length], length

    def _view(self, start: int, end: int) -> Int64:
        """Return a view, through which the tokens may change from now on."""
        view = self._store[start:end]
        self._shared, self._narrow, self._known = True, None, 0
        return view

    def _regain(self) -> bool:
        """Whether no view exists any more. Each view holds a reference to the store."""
        if self._store.base is None and getrefcount(self._store) <= _ALONE:
            self._shared = False
        return not self._shared

    # ------------------------------------------------------------------ state

    def state(self) -> list[int]:
        """Length, windows, offset and prompt length; see :meth:`from_state`."""
        return [
            self._length, self._start, self._end, self._offset, self._completion_start,
            self._completion_end, self._prompt, 1 if self._chunked else 0,
        ]  # fmt: skip

    def _set_state(self, state: Sequence[int]) -> None:
        (
            self._length, self._start, self._end, self._offset, self._completion_start,
            self._completion_end, self._prompt, chunked,
        ) = state  # fmt: skip
        self._chunked = bool(chunked)

    # ------------------------------------------------------------------ views

    @property
    def all(self) -> Int64:
        """Every token, as a view ``[length]``."""
        return self._view(0, self._length)

    @property
    def prompt(self) -> Int64:
        """Tokens before the prompt boundary, as a view."""
        return self._view(0, self._prompt)

    @property
    def generated(self) -> Int64:
        """Tokens after the prompt boundary, as a view."""
        return self._view(self._prompt, self._length)

    @property
    def active(self) -> Int64:
        """Tokens of the next step, as a view."""
        return self._view(self._start + self._offset, self._end)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the prompt boundary."""
        return self._prompt

    @property
    def generated_length(self) -> int:
        """Number of tokens after the prompt boundary."""
        return self._length - self._prompt

    @property
    def processed_length(self) -> int:
        """Start of the processing window."""
        return self._start

    @property
    def active_length(self) -> int:
        """Tokens of the next step."""
        return self._end - self._start - self._offset

    @property
    def current_position(self) -> int:
        """Processed plus active tokens; an offset makes it differ from the window's end."""
        return self._end - self._offset

    @property
    def processing_range(self) -> Range:
        """The processing window, without the offset."""
        return Range(self._start, self._end)

    @property
    def completion_range(self) -> Range:
        """Positions of the tokens that were appended and not yet consumed."""
        return Range(self._completion_start, self._completion_end)

    @property
    def is_chunked(self) -> bool:
        """Whether tokens wait after the processing window."""
        return self._chunked

    actively_chunked = is_chunked

    @property
    def has_outstanding_generated_tokens(self) -> bool:
        """Whether the completion window holds tokens."""
        return self._completion_start < self._completion_end

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Int64: ...
    def __getitem__(self, index: int | slice) -> int | Int64:
        if isinstance(index, slice):
            return self.all[index]
        if type(index) is not int:
            raise TypeError(f"token index must be int or slice, not {type(index).__name__}")
        if not -self._length <= index < self._length:
            raise IndexError(f"token index {index} is outside the {self._length} tokens")
        return self._store.item(index if index >= 0 else index + self._length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenBuffer):
            return NotImplemented
        length = self._length
        return self.state() == other.state() and np.array_equal(
            self._store[:length], other._store[:length]
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        start, end, length = self._start + self._offset, self._end, self._length
        return f"TokenBuffer(length={length}, prompt={self._prompt}, active=[{start}, {end}))"

    # ------------------------------------------------------------------ processing window

    def apply_processing_offset(self, value: int) -> None:
        """Set the active window's offset; a negative offset makes processed tokens active again."""
        if not 0 <= self._start + value <= self._end:
            raise ValueError(f"offset {value} leaves the tokens [0, {self._end}]")
        self._offset = value

    def rewind_processing(self, n: int) -> None:
        """Make ``n`` processed tokens active again."""
        if n < 0 or n > self._start or n > self._start + self._offset:
            raise ValueError(f"cannot rewind {n} of {self._start} processed tokens")
        self._start -= n

    def skip_processing(self, n: int) -> None:
        """Count ``n`` active tokens as processed; at least one stays active."""
        if n < 0 or n >= self.active_length or self._start + n > self._end:
            raise ValueError(f"cannot skip {n} of {self.active_length} active tokens")
        self._start += n

    def chunk(self, chunk_size: int) -> None:
        """Leave only the first ``chunk_size`` active tokens for the next step."""
        if not 1 <= chunk_size < self.active_length or chunk_size + self._offset < 0:
            raise ValueError(f"cannot chunk {self.active_length} active tokens to {chunk_size}")
        self._end = self._start + self._offset + chunk_size
        self._chunked = True

    def advance_chunk(self) -> None:
        """Count the chunk as processed and make the rest active."""
        if not self._chunked:
            raise ValueError("cannot advance a chunk: the tokens are not chunked")
        self._offset = 0
        self._start = self._end
        self._end = self._length
        self._chunked = False

    # ------------------------------------------------------------------ growth

    def advance_with_token(self, token: int, mark_previous_as_processed: bool = True) -> None:
        """Append a token. By default, the tokens that were active become processed."""
        if self._chunked:
            raise ValueError("cannot append a token to a chunked buffer")
        length = self._length
        if length == self._capacity:
            self._reserve(length + 1)
        self._store[length] = token
        self._length = length + 1
        if mark_previous_as_processed:
            self._start = self._end
        self._end += 1
        self._completion_end = length + 1
        self._offset = 0

    def overwrite_last_token(self, token: int) -> None:
        """Replace the last token."""
        self._store[self._length - 1] = token
        self._forget(self._length - 1)

    def consume_recently_generated_tokens(self) -> Int64:
        """View of the completion window, which is empty afterwards."""
        return self._view(*self._consume())

    def _consume(self) -> tuple[int, int]:
        start, end = self._completion_start, self._completion_end
        if start >= end:
            raise ValueError("there are no recently generated tokens to consume")
        if end > self._length:
            raise ValueError(f"the completion window ends at {end}, after the last token")
        self._completion_start = end
        return start, end

    def reset_as_new_prompt(self, delete_last_generated_token: bool = False) -> None:
        """Make every token an unprocessed prompt token; an offset inside the tokens is kept."""
        if self._end > self._length:
            raise ValueError("the processing window ends after the last token")
        length = self._length
        if delete_last_generated_token:
            if length == self._prompt:
                raise ValueError("there is no generated token to delete")
            length -= 1
            self._store[length] = 0
            self._forget(length)
        self._length = self._prompt = self._end = length
        self._start = 0
        if not 0 <= self._offset <= length:
            self._offset = 0
        self._completion_start = self._completion_end = length
        self._chunked = False

    def truncate(self, length: int) -> None:
        """Drop the tokens from ``length`` on; at least the last remaining token becomes active."""
        if not 1 <= length <= self._length:
            raise ValueError(f"cannot truncate {self._length} tokens to {length}")
        self._store[length : self._length] = 0
        self._forget(length)
        self._length = self._end = length
        self._start = min(self._start, length - 1)
        self._prompt = min(self._prompt, length)
        self._completion_start = min(self._completion_start, length)
        self._completion_end = length
        self._offset = 0
        self._chunked = False

    def set_windows(self, start: int, end: int, length: int) -> None:
        """Move the processing window and the length; new room is zeroed, values stay.

        Needs ``0 <= start < end <= length``; ``end < length`` makes the buffer chunked. ValueError
        otherwise, and for a length that would cut the prompt or appended tokens: the tokens that
        follow would be delivered from the wrong positions.
        """
        if not 0 <= start < end <= length:
            raise ValueError(f"need 0 <= start < active <= end, not {start}, {end}, {length}")
        if length < self._completion_end:
            raise ValueError(
                f"the end cannot move to {length}, before the last of {self._completion_end} "
                "tokens; roll back instead"
            )
        self._reserve(length)
        self._forget(length)
        self._start, self._end, self._length = start, end, length
        self._offset = 0
        self._chunked = end < length

    def lend(self, n: int) -> None:
        """Count ``n`` tokens of zeroed room as active; a negative ``n`` hides the last tokens.

        ValueError when fewer than one token or a negative window would be left.
        """
        end, length = self._end + n, self._length + n
        if length < 1 or end < self._start + max(0, self._offset):
            raise ValueError(f"cannot reserve {n} tokens after {self._length}")
        self._reserve(length)
        self._forget(length)
        self._end, self._length = end, length

    def take_back(self, end: int, length: int) -> None:
        """End a :meth:`lend`: restore the window's end and the length."""
        if length < self._length:
            self._store[length : self._length] = 0
            self._forget(length)
        self._end, self._length = end, length

    def _reserve(self, length: int) -> None:
        before = self._store  # reading it may have made room
        if length <= self._capacity:
            return
        store = np.zeros(max(2 * self._capacity, length), np.int64)
        store[: self._capacity] = before
        self._store, self._capacity, self._shared = store, len(store), False


def _fresh_state(length: int) -> tuple[int, ...]:
    """Return the :meth:`TokenBuffer.state` of a prompt of ``length`` tokens."""
    return length, 0, length, 0, length, length, length, 0


def _fit(tokens: Int64) -> bool:
    """Whether all tokens are int32."""
    # Read as unsigned, a negative id is larger than all others: one pass finds both.
    if np.maximum.reduce(tokens.view(np.uint64), initial=0) < _INT32:
        return True
    return bool(tokens.min() >= -_INT32 and tokens.max() < _INT32)


def _check_windows(state: Sequence[int], capacity: int) -> None:
    """Raise ValueError for an impossible :meth:`TokenBuffer.state`."""
    if len(state) != _STATE_LENGTH:
        raise ValueError(f"a token buffer has {_STATE_LENGTH} numbers, not {len(state)}")
    length, start, end, offset, completion_start, completion_end, prompt, chunked = state
    if not (
        0 <= start <= end <= length <= capacity
        and 0 <= start + offset <= end
        and 0 <= completion_start <= completion_end
        and 0 <= prompt <= length
        and length
        and bool(chunked) is (end < length)
    ):
        raise ValueError("token windows contradict each other")


def wrap_tokens(tokens: npt.ArrayLike) -> TokenBuffer:
    """Copy 1-D integers to a new buffer; raises ValueError for anything else."""
    array = np.asarray(tokens)
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"tokens must be integers, not {array.dtype}")
    if array.ndim == 1 and array.size:
        return TokenBuffer.copy_of(array)
    return TokenBuffer(array.astype(np.int64))
