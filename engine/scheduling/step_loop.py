"""Scheduler and executor in one thread: plan, compute, apply, repeat.

Workers run the same scheduler and the same pipeline on separate threads. Prompts are token ids.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from baton.proto.contexts.text import TextContext
from baton.proto.errors import InputError, InternalError
from baton.proto.hashing import cache_salt

from ..cache.paged_cache import PagedCache
from .events import Event
from .plan import Applied, OnLayers, StepPlan, StepResult
from .scheduler import Scheduler, SchedulerConfig
from .sequence import Sequence


class _Books(Protocol):
    def new_cache(self) -> PagedCache: ...


class PlanRunner(Protocol):
    """Computes plans; implemented by a pipeline."""

    @property
    def kv(self) -> _Books:
        """The pipeline's KV cache, which creates its bookkeeping."""
        ...

    def check(self, context: TextContext) -> None:
        """Raise InputError if the model cannot run the context."""
        ...

    @property
    def can_queue(self) -> bool:
        """True if :meth:`begin` returns before a decode step is over."""
        ...

    def begin(
        self,
        plan: StepPlan,
        on_layers: OnLayers | None = None,
        *,
        applied: Applied | None = None,
    ) -> Any:
        """Begin a plan; a second one may begin before the first is finished.

        The second one calls ``applied``, at most once, if it needs the grammars after the first.
        """
        ...

    def finish(self, step: Any) -> StepResult:
        """Wait for a step that was begun and return its result."""
        ...


class StepLoop:
    """Continuous batching over one pipeline.

    ``fingerprint``: the model's, keys block hashes. ``look_ahead``: begin the next step before the
    tokens of the running one are known, if the pipeline can.
    """

    def __init__(
        self,
        pipeline: PlanRunner,
        config: SchedulerConfig | None = None,
        fingerprint: str = "",
        *,
        look_ahead: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.cache = pipeline.kv.new_cache()
        self.scheduler = Scheduler(config or SchedulerConfig(), self.cache)
        self._fingerprint = fingerprint
        self._added = 0
        self._look_ahead = look_ahead and pipeline.can_queue
        self._begun: Any = None  # the step that was begun ahead

    @property
    def has_work(self) -> bool:
        """True if a request or a step is unfinished."""
        return self.scheduler.has_work or self.scheduler.steps_out > 0

    def add(self, context: TextContext) -> bytes:
        """Queue a request and return its key; its tokens and status appear in ``context``.

        The caller must compile a ``json_schema`` first: see :mod:`..grammar.constraint`. Raises
        InputError for a context that the model cannot run, or with a schema but no matcher.
        """
        self.pipeline.check(context)
        if context.json_schema is not None and context.matcher is None:
            raise InputError("the context has a json_schema but no matcher")
        self._added += 1
        request = self._added.to_bytes(16, "big")
        salt = cache_salt(self._fingerprint, context.cache_salt)
        sequence = Sequence(request, context, block_size=self.cache.block_size, salt=salt)
        self.scheduler.add(sequence, time.monotonic())
        return request

    def abort(self, request: bytes) -> None:
        """Remove a request, if it is still there, and free its blocks after its last step."""
        self.scheduler.abort(request)

    def step(self, on_layers: OnLayers | None = None) -> list[Event]:
        """Compute one step; without work, do nothing."""
        scheduler, pipeline = self.scheduler, self.pipeline
        step, self._begun = self._begun, None
        if step is None:
            plan = scheduler.plan(time.monotonic())
            if plan is None:
                return self._idle()
            step = pipeline.begin(plan, on_layers)
        ahead = scheduler.plan_ahead() if self._look_ahead else None
        events: list[Event] | None = None

        def apply() -> list[Event]:
            nonlocal events
            if events is None:
                events = scheduler.apply(pipeline.finish(step), time.monotonic())
            return events

        if ahead is not None:
            self._begun = pipeline.begin(ahead, on_layers, applied=apply)
        return apply()

    def _idle(self) -> list[Event]:
        events = self.scheduler.take_events()
        if not events and self.has_work:
            raise InternalError("requests are waiting but none can run")
        return events
