"""An assigned request as the engine runs it: its context, checked, and its sequence."""

from __future__ import annotations

from baton.engine.models.contexts import read_context
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.text import TextContext
from baton.proto.errors import TaskMismatch
from baton.proto.hashing import cache_salt
from baton.proto.ids import RequestID
from baton.proto.layout import ModelCard
from baton.proto.picture_runs import picture_run
from baton.proto.requests import check_kind, check_wire_context
from baton.proto.vision_requests import check_images
from baton.proto.wire.messages import Assign
from baton.proto.wire.wire_context import WirePixelContext, WireVisionContext

from .attempts import Key
from .jobs import engine_name


def check_assigned(assign: Assign, card: ModelCard) -> bool:
    """Raise InputError if the model cannot run the request.

    Returns whether its images have hashes that are still to be checked, which takes milliseconds
    for each.
    """
    context = assign.context
    if context.task != card.task:
        raise TaskMismatch(f"{card.name!r} does not serve task {context.task!r}")
    check_kind(context, card)
    if not isinstance(context, WireVisionContext):
        return False
    check_images(context, card=card)
    return bool(context.images)


def assigned_context(assign: Assign, emitted: list[int], card: ModelCard) -> TextContext:
    """Return the context after ``emitted`` tokens. Raises InputError or ValueError."""
    request_id = RequestID(assign.request_id)
    if isinstance(assign.context, WirePixelContext):
        check_wire_context(assign.context, card)
        return picture_run(assign.context, request_id, card.layout.block_size)
    return read_context(card.architecture, assign.context, request_id, emitted)


def assigned_sequence(
    key: Key, assign: Assign, context: TextContext, card: ModelCard, now: float
) -> Sequence:
    """Return the sequence of a request whose tokens are all still to be computed."""
    return Sequence(
        engine_name(key),
        context,
        block_size=card.layout.block_size,
        salt=cache_salt(card.fingerprint, assign.context.cache_salt),
        arrival=now,
    )


def ended_status(sequence: Sequence) -> str | None:
    """Return the final status if the replayed tokens already end the request, else None."""
    status = sequence.context.status
    if status.is_done:
        return status.value
    full = sequence.remaining_tokens == 0 and sequence.num_tokens > sequence.prompt_length
    return GenerationStatus.MAXIMUM_LENGTH.value if full else None
