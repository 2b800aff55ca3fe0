"""A context as it is, in the middle of its generation, as the frames of one message.

A message is one envelope (:mod:`.codec`) with one :class:`ContextSnapshot`: the
request in its wire form, but with all valid tokens, and how far it is. The wire form's tag
names the class, so a context arrives as what it was. Grammar state does not travel: replaying
the tokens rebuilds it.

What pools exchange is less (``Commit`` carries the request and its tokens, from which a context
continues identically); this is for a context that has to arrive with undelivered tokens,
queued log-probabilities or moved windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from .arrays import Frame
from .codec import EnvelopeDecoder, EnvelopeEncoder, attach_arrays, with_arrays
from .contexts import TextContext
from .errors import DecodeFailed, ProtocolError
from .ids import RequestID
from .images import ImageMetadata
from .limits import MAX_CONTEXT_TOKENS
from .messages import Message
from .outputs import LogProbabilities
from .pixels import PixelContext
from .sampling import SamplingParams
from .speech import TTSContext
from .status import GenerationStatus
from .tokens import TokenBuffer
from .vision import TextAndVisionContext
from .wire import (
    AnyArray,
    AnyWireContext,
    Name,
    Number,
    TokenState,
    WireContext,
    WirePixelContext,
    WireSpeechContext,
    WireVisionContext,
)

Context = TextContext | PixelContext
_STATUS = {status.value: status for status in GenerationStatus}


class ContextSnapshot(Message, frozen=True, kw_only=True):
    """A context and how far it is.

    ``windows``: as :meth:`.TokenBuffer.state`. ``log_probs``: float64, see :func:`_flat`.
    """

    context: AnyWireContext
    request_id: Name
    windows: TokenState
    status: Name = "active"
    prompt_length: Number = 0
    initial: bool = True
    draft_offset: Number = 0
    carried_start: Number = 0
    carried_end: Number = 0
    committed_idx: Number = 0
    cache_seq_id: Number | None = None
    log_probs: AnyArray | None = None


_KINDS: dict[type[WireContext], type[Any]] = {
    WireContext: TextContext,
    WireVisionContext: TextAndVisionContext,
    WireSpeechContext: TTSContext,
    WirePixelContext: PixelContext,
}
"""The registry: what is not in it neither leaves nor arrives."""
_CONTEXTS = frozenset(_KINDS.values())


class ContextEncoder:
    """Encodes contexts; one instance per thread."""

    def __init__(self) -> None:
        self._encoder = EnvelopeEncoder()

    def __call__(self, context: Context) -> list[Frame]:
        """Frames of one message; leave the context's arrays unchanged until it is sent.

        InputError for what cannot travel (logits processors), TypeError for another class,
        LimitExceeded for more than a receiver takes.
        """
        if type(context) not in _CONTEXTS:
            raise TypeError(f"a {type(context).__name__} is no registered kind of context")
        tokens = context.tokens
        wire = context._wire(tokens.ids())
        if isinstance(context, PixelContext):
            snapshot = ContextSnapshot(
                context=wire,
                request_id=context.request_id.value,
                windows=tokens.state(),
                status=context.status.value,
            )
        else:
            queued = context._log_probabilities_data
            snapshot = ContextSnapshot(
                context=wire,
                request_id=context.request_id.value,
                windows=tokens.state(),
                status=context.status.value,
                prompt_length=context._prompt_length,
                initial=context._is_initial_prompt,
                draft_offset=context._draft_offset,
                carried_start=context._carried_start,
                carried_end=context._carried_end,
                committed_idx=context._committed_idx,
                cache_seq_id=context._cache_seq_id,
                log_probs=_flat(queued) if queued else None,
            )
        return self._encoder.encode([snapshot])


class ContextDecoder:
    """Decodes contexts into their own classes; ``copy`` makes every array writable."""

    def __init__(self, *, copy: bool = False) -> None:
        self._decoder = _SnapshotDecoder(ContextSnapshot)
        self._copy = copy

    def __call__(self, frames: Sequence[Frame]) -> Context:
        """The context of one message.

        Without ``copy`` its arrays are read-only views of the frames, only tokens (widened
        when first used) and speech tokens are its own. Raises DecodeFailed, LimitExceeded or
        VersionMismatch and nothing else.
        """
        messages = self._decoder.decode(frames)
        if len(messages) != 1:
            raise DecodeFailed(f"{len(messages)} contexts in one message")
        try:
            context = _restore(messages[0])
        except ProtocolError:
            raise
        except Exception as error:
            raise DecodeFailed(f"not a valid context: {str(error)[:200]}") from None
        if self._copy:
            _own_arrays(context)
        return context


class _SnapshotDecoder(EnvelopeDecoder[ContextSnapshot]):
    def _attach_arrays(self, messages: list[ContextSnapshot], frames: Sequence[Frame]) -> None:
        used = 0
        for message in messages:
            used += attach_arrays(message.context, frames)
            if message.log_probs is not None:
                array, more = with_arrays(message.log_probs, frames)
                msgspec.structs.force_setattr(message, "log_probs", array)
                used += more
        self._check_used(used, frames)


def _restore(snapshot: ContextSnapshot) -> Context:
    wire = snapshot.context
    tokens = TokenBuffer.from_state(wire.tokens, snapshot.windows)
    request_id, status = RequestID(snapshot.request_id), _STATUS.get(snapshot.status)
    if status is None:
        raise DecodeFailed(f"status {snapshot.status[:40]!r} is unknown")
    if isinstance(wire, WirePixelContext):
        return PixelContext.from_wire_fields(
            wire, tokens=tokens, request_id=request_id, status=status
        )
    queued = snapshot.log_probs
    kind = _KINDS[type(wire)]
    # Field by field takes a third of the time that the constructor does with all of them.
    context: TextContext = object.__new__(kind)
    context._take(wire)
    context.tokens = tokens
    context.request_id = request_id
    context.status = status
    context.sampling_params = SamplingParams.from_wire(wire.sampling)
    context._log_probabilities_data = {} if queued is None else _from_flat(queued)
    context._prompt_length = snapshot.prompt_length
    context._is_initial_prompt = snapshot.initial
    context._draft_offset = snapshot.draft_offset
    context._carried_start = snapshot.carried_start
    context._carried_end = snapshot.carried_end
    context._committed_idx = snapshot.committed_idx
    context._cache_seq_id = snapshot.cache_seq_id
    context.__post_init__()
    return context


# --------------------------------------------------------------------------- log-probabilities


def _flat(queued: dict[int, LogProbabilities]) -> AnyArray:
    """Queued entries as numbers, so that decoding takes no more memory than the entries do.

    Per entry: position, number of tokens, their log-probabilities, number of maps, and per map
    its size and its pairs of token id and log-probability.
    """
    numbers: list[float] = []
    for position, entry in queued.items():
        chosen, tops = entry.token_log_probabilities, entry.top_log_probabilities
        numbers += (position, len(chosen), *chosen, len(tops))
        for top in tops:
            numbers.append(len(top))
            for pair in top.items():
                numbers += pair
    return np.array(numbers, np.float64)


def _from_flat(array: AnyArray) -> dict[int, LogProbabilities]:
    """Inverse of :func:`_flat`; ValueError when it is none."""
    if array.dtype != np.float64 or array.ndim != 1:
        raise ValueError("queued log-probabilities must be float64 numbers in a row")
    numbers = iter(array.tolist())
    queued = {}
    for position in numbers:
        chosen = _take(numbers, next(numbers))
        tops = []
        for _ in range(_count(next(numbers))):
            pairs = _take(numbers, 2 * next(numbers))
            tops.append({int(pairs[i]): pairs[i + 1] for i in range(0, len(pairs), 2)})
        queued[int(position)] = LogProbabilities(chosen, tops)
    return queued


def _take(numbers: Iterator[float], count: float) -> list[float]:
    taken = list(islice(numbers, _count(count)))
    if len(taken) != count:
        raise ValueError("queued log-probabilities end early")
    return taken


def _count(number: float) -> int:
    if not 0 <= number <= MAX_CONTEXT_TOKENS or number != int(number):
        raise ValueError(f"{number} is no count")
    return int(number)


# --------------------------------------------------------------------------- copies


def _own_arrays(context: Context) -> None:
    for item in fields(context):
        value = getattr(context, item.name)
        if isinstance(value, TokenBuffer):
            value.own()
        elif isinstance(value, (np.ndarray, list, tuple, dict)):
            setattr(context, item.name, _owned(value))


def _owned(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_owned, value))
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    if isinstance(value, ImageMetadata):
        value.pixel_values = _owned(value.pixel_values)
    return value
