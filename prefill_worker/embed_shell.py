"""Sockets, clock and threads around :class:`.embed_core.EmbedCore`.

The I/O thread owns all sockets and the core; the compute thread owns the model.
"""

from __future__ import annotations

import time

import numpy as np

from ..engine.loading.loader import EmbeddingRunner
from ..engine.pipeline import EmbeddingsGenerator
from ..engine.scheduling.step_time import StepTime
from ..proto.contexts.text import TextContext
from ..proto.contexts.tokens import TokenBuffer
from ..proto.ids import RequestID
from ..runtime.keys.keyring import KeyRing
from ..runtime.net.loop import Loop
from ..runtime.net.sockets import Context, RouterChannel
from ..runtime.process.compute import ComputeThread
from ..runtime.process.log import get_logger
from ..runtime.process.main import EXIT_RESTART, TICK_S
from ..worker.events import DrainRequested, Exit, Note, Tick, ToRouter
from ..worker.membership import Membership
from ..worker.router_links import RouterLinks, routing_identity
from .config import PrefillWorkerConfig
from .embed_core import Action, BatchDone, EmbedCore, EmbedLimits, Event, RunBatch
from .endpoint import Endpoint

_log = get_logger()


class EmbedShell:
    """One prefill worker process that serves an embedding model."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        runner: EmbeddingRunner,
        member: Membership,
        control: RouterChannel,
        loop: Loop,
        context: Context,
        keys: KeyRing | None = None,
    ) -> None:
        self._loop = loop
        self._control = control
        self._member = member
        self._pipeline = runner.pipeline
        self._endpoint = Endpoint(member, control, loop)
        times = StepTime()
        _warm_up(runner.pipeline, times)
        limits = EmbedLimits(
            token_budget=config.token_budget,
            max_batch=config.max_active,
            max_queue=config.max_queue,
        )
        self.core = EmbedCore(member, limits, times)
        self._compute = ComputeThread(loop, self._encode, self._on_result)
        identity = routing_identity(config.worker_id)
        self._links = RouterLinks(
            loop, context, config.routers, identity, self.feed, keys, member.dropped,
            config.worker_timeout_s,
        )  # fmt: skip
        self._drain_grace_s = config.drain_grace_s
        self.exit_code = 0

    def start(self) -> None:
        """Start listening and ticking."""
        self._control.attach(self._loop, self._endpoint.hear)
        self._loop.on_turn_end(self._links.flush)
        self._tick()

    def close(self) -> bool:
        """Stop computing, then close the sockets. Return False if a step still runs."""
        ended = self._compute.stop()
        self._links.close()
        self._control.close()
        return ended

    # ------------------------------------------------------------------ events

    def feed(self, event: Event) -> None:
        """Pass an event to the core and perform the actions it returns."""
        for action in self.core.handle(event, self._loop.now()):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case ToRouter(router=router, message=message):
                self._links.send(router, message)
            case RunBatch():
                self._compute.submit(action)
            case Note(event=name, fields=fields):
                _log.info(name, **fields)
            case Exit(reason=reason, restart=restart):
                self._exit(reason, EXIT_RESTART if restart else 1)

    def drain(self) -> None:
        """Accept no new work. Exit after the last request or after the grace period."""
        self.feed(DrainRequested())
        self._loop.call_later(self._drain_grace_s, lambda: self._exit("grace_over", 0))

    def _encode(self, run: RunBatch) -> BatchDone:
        """Compute a batch; runs on the compute thread."""
        began = time.perf_counter()
        outputs = self._pipeline.encode(run.batch)
        vectors = {request_id: output.embeddings for request_id, output in outputs.items()}
        return BatchDone(vectors, time.perf_counter() - began)

    def _on_result(self, _run: RunBatch, result: BatchDone | Exception) -> None:
        if isinstance(result, Exception):
            _log.error("engine.step_failed", error=repr(result))
            result = BatchDone({}, 0.0, f"forward pass: {type(result).__name__}: {result}")
        self.feed(result)

    def _tick(self) -> None:
        self._control.stats.count_into(self._member.dropped, "endpoint")
        self.feed(Tick(self._pipeline.layers_done))
        if self.core.is_drained:
            self._exit("drained", 0)
        else:
            self._loop.call_later(TICK_S, self._tick)

    def _exit(self, reason: str, code: int) -> None:
        say = _log.error if code else _log.info
        say("worker.exit", reason=reason)
        self.exit_code = code
        self._links.flush()
        self._loop.stop()


def _warm_up(pipeline: EmbeddingsGenerator, times: StepTime) -> None:
    """Run one token through the model before the first request, to predict step times."""
    name = RequestID("warm-up")
    context = TextContext(max_length=2, tokens=TokenBuffer(np.zeros(1, np.int64)), request_id=name)
    for _ in range(2):  # the first run touches the memory, the second has a typical duration
        began = time.perf_counter()
        pipeline.encode({name: context})
        times.learn(1, time.perf_counter() - began)
