"""Parts of all messages: the base class, times, references to grants."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..contexts.outputs import TokenLogProbs
from ..limits import (
    MAX_CONTEXT_TOKENS,
)
from .bounds import Count, Seconds, Word

LogProbs = Annotated[list[TokenLogProbs], Meta(max_length=MAX_CONTEXT_TOKENS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all messages: a msgpack map with a ``type`` key; defaults do not travel."""


class WorkerTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When an attempt reached its steps at one worker; None for a step that was not reached.

    In seconds after the Assign arrived at the prefill worker, or after the decode worker took the
    request over: durations, because the clocks of processes differ.
    """

    started: Seconds | None = None  # prefill: it got its (last) execution slot
    granted: Seconds | None = None  # prefill: the decode worker reserved blocks
    computing: Seconds | None = None  # it joined the batch
    sending: Seconds | None = None  # prefill: the first KV frame was sent
    computed: Seconds | None = None  # the first token or the embedding was computed here
    ended: Seconds | None = None  # it was handed over, or ended here
    refusals: Count = 0  # prefill: how many times its decode worker had no free blocks
    preemptions: Count = 0


class ServedTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the time before the first token went, in seconds; None for what is not known."""

    queue: Seconds | None = None  # until a worker began to compute
    prefill: Seconds | None = None  # from then until the first token was computed
    handoff: Seconds | None = None  # from then until the decode worker had the request
    first_token: Seconds | None = None  # from the request's arrival to that of its first token


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to one grant of a decode worker's incarnation; never valid for another grant."""

    incarnation: Word
    slot: Word
    generation: Word
