"""Sockets, clock and threads around :class:`.embed_core.EmbedCore`.

The I/O thread owns all sockets and the core; the compute thread owns the model.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from baton.engine.loading.loader import EmbeddingRunner
from baton.engine.scheduling.step_time import StepTime
from baton.proto.contexts.generators import EmbeddingsGenerator
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.ids import RequestID
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.log import get_logger
from baton.worker.host import WorkerHost
from baton.worker.membership import Membership

from .config import PrefillWorkerConfig
from .embed_core import BatchDone, EmbedCore, EmbedLimits, RunBatch
from .endpoint import Endpoint

_log = get_logger()


class EmbedShell(WorkerHost):
    """One prefill worker process that serves an embedding model."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        runner: EmbeddingRunner,
        member: Membership,
        control: RouterChannel,
        wiring: Wiring,
    ) -> None:
        self._pipeline = runner.pipeline
        times = StepTime()
        _warm_up(runner.pipeline, times)
        limits = EmbedLimits(
            token_budget=config.token_budget,
            max_batch=config.max_active,
            max_queue=config.max_queue,
        )
        super().__init__(
            EmbedCore(member, limits, times), config, lambda: self._pipeline.layers_done, control,
            wiring,
        )  # fmt: skip
        self._endpoint = Endpoint(member, control, wiring.loop)

    def start(self) -> None:
        """Start listening and ticking."""
        self._control.attach(self._loop, self._endpoint.hear)
        super().start()

    def _perform(self, action: Any) -> None:
        if isinstance(action, RunBatch):
            self._compute.submit(action)
        else:
            super()._perform(action)

    def _execute(self, run: RunBatch, /) -> BatchDone:
        """Compute a batch; runs on the compute thread."""
        began = time.perf_counter()
        outputs = self._pipeline.encode(run.batch)
        vectors = {request_id: output.embeddings for request_id, output in outputs.items()}
        return BatchDone(vectors, time.perf_counter() - began)

    def _computed(self, _run: RunBatch, result: BatchDone | Exception, /) -> None:
        if isinstance(result, Exception):
            _log.error("engine.step_failed", error=repr(result))
            result = BatchDone({}, 0.0, f"forward pass: {type(result).__name__}: {result}")
        self.feed(result)


def _warm_up(pipeline: EmbeddingsGenerator, times: StepTime) -> None:
    """Run one token through the model before the first request, to predict step times."""
    name = RequestID("warm-up")
    context = TextContext(max_length=2, tokens=TokenBuffer(np.zeros(1, np.int64)), request_id=name)
    for _ in range(2):  # the first run touches the memory, the second has a typical duration
        began = time.perf_counter()
        pipeline.encode({name: context})
        times.learn(1, time.perf_counter() - began)
