"""The engine alone: scheduler and executor in one thread, without processes or sockets.

Tests, benchmarks and "engine alone" baselines use it; workers run the same scheduler and
executor on two threads. It knows nothing of text: prompts are token ids.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

import numpy as np

from ..proto.contexts import TextContext
from ..proto.errors import BatonError, InternalError, error_from_code
from ..proto.hashing import cache_salt
from ..proto.sampling import SamplingParams
from ..proto.tokens import TokenBuffer
from .cache import PagedCache
from .events import Event, Failed
from .executor import OnLayers
from .runner import Runner
from .scheduler import Scheduler, SchedulerConfig
from .sequence import Sequence


class LLMEngine:
    """Continuous batching over one loaded model; for one thread.

    ``runner``: model, KV pool and executor. ``config``: limits of a step.
    """

    def __init__(self, runner: Runner, config: SchedulerConfig | None = None) -> None:
        self.runner = runner
        self.cache = PagedCache(runner.num_blocks, runner.card.layout.block_size)
        self.scheduler = Scheduler(config or SchedulerConfig(), self.cache)
        self._added = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return self.scheduler.has_work

    def add(self, context: TextContext) -> bytes:
        """Queue a request and return its key; its tokens and status appear in ``context``."""
        self._added += 1
        request = self._added.to_bytes(16, "big")
        salt = cache_salt(self.runner.card.fingerprint, context.cache_salt)
        sequence = Sequence(request, context, block_size=self.cache.block_size, salt=salt)
        self.scheduler.add(sequence, time.monotonic())
        return request

    def step(self, on_layers: OnLayers | None = None) -> list[Event]:
        """Compute one step; without work nothing happens."""
        plan = self.scheduler.plan(time.monotonic())
        if plan is not None:
            result = self.runner.executor.execute(plan, on_layers)
            return self.scheduler.apply(result, time.monotonic())
        events = self.scheduler.take_events()
        if not events and self.has_work:
            raise InternalError("requests wait and none of them can run")
        return events

    def generate(
        self, prompts: Many[Many[int]], params: SamplingParams | Many[SamplingParams]
    ) -> list[TextContext]:
        """Run all prompts (token ids) to their ends, batched; contexts in the prompts' order.

        ``params``: for all, or one per prompt. Raises the first failure once all have ended.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        contexts = [self._context(p, own) for p, own in zip(prompts, each, strict=True)]
        mine = {self.add(context) for context in contexts}
        failure: BatonError | None = None
        while self.has_work:
            for event in self.step():
                if isinstance(event, Failed) and event.request in mine and failure is None:
                    failure = error_from_code(event.code, event.message)
        if failure is not None:
            raise failure
        return contexts

    def _context(self, prompt: Many[int], params: SamplingParams) -> TextContext:
        return TextContext(
            max_length=self.runner.card.max_length,
            tokens=TokenBuffer(np.array(prompt, np.int64)),
            eos_token_ids=set(self.runner.card.eos_token_ids),
            eos_sequences=[[token] for token in params.stop_token_ids or ()],
            ignore_eos=params.ignore_eos,
            sampling_params=params,
        )
