"""One incarnation of a worker process: sockets, clock and threads around its core.

The I/O thread owns all sockets and the core. The compute thread owns the model; it gets steps or
batches from the core, and their results return to the core as events. Each role derives its shell
from :class:`WorkerHost`, shells that generate text from :class:`TextHost`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from baton.engine.cache.paged_cache import PagedCache
from baton.engine.grammar.constraint import (
    CompileGrammar,
    DropGrammar,
    GrammarCompiler,
    GrammarDone,
    as_result,
)
from baton.engine.pipeline.runner import StepRunner
from baton.engine.pipeline.text_generation import queuing
from baton.engine.scheduling.plan import OnLayers, StepPlan, StepResult, failed_step
from baton.extend.watch import CallWatch
from baton.kv_transfer.device_frames import MoveQueue
from baton.proto.block_moves import BlockMove
from baton.proto.errors import InternalError
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.clock import Clock
from baton.runtime.process.compute import ComputeThread, TimeLimited
from baton.runtime.process.log import get_logger
from baton.runtime.process.log_limit import LogLimit
from baton.runtime.process.main import EXIT_RESTART, EXIT_TURN, TICK_S

from .base_core import WorkerCore
from .events import (
    AbandonStep,
    CheckImages,
    DrainRequested,
    Exit,
    Fault,
    ImagesChecked,
    Log,
    RunStep,
    StepDone,
    Tick,
    ToRouter,
)
from .kv_publisher import KvPublisher
from .router_links import RouterLinks

_log = get_logger()

CHECK_S = 60.0
"""Most seconds for the hashes of one request; they usually take less than a tenth of a second."""


class HostConfig(Protocol):
    """The settings of a worker that its host needs; see the configurations of both roles."""

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        ...

    @property
    def routers(self) -> dict[str, str]:
        """Router name to worker-side address."""
        ...

    @property
    def worker_timeout_s(self) -> float:
        """Seconds after which a silent worker is dead; connections time out within it."""
        ...

    @property
    def drain_grace_s(self) -> float:
        """Seconds that requests may continue after a drain was requested."""
        ...


class WorkerHost(ABC):
    """A core with its connections to routers, its compute thread and its timers.

    ``control``: the bound control socket; the role attaches it. ``layers_done()``: layers computed
    since the start.
    """

    def __init__(
        self,
        core: WorkerCore,
        config: HostConfig,
        layers_done: Callable[[], int],
        control: RouterChannel,
        wiring: Wiring,
    ) -> None:
        self._core = core
        loop = self._loop = wiring.loop
        self._control = control
        self._dropped = core.dropped
        self._layers_done = layers_done
        self._drain_grace_s = config.drain_grace_s
        self._compute: ComputeThread[Any, Any] = ComputeThread(
            loop, self._execute, self._computed, finish=self._finisher()
        )
        self._links = RouterLinks(
            wiring, config.routers, config.worker_id, self.feed, core.dropped,
            config.worker_timeout_s,
        )  # fmt: skip
        self._clock = Clock(loop, self._tick, lambda: core.errors.unowned, self._break)
        self._log_limit = LogLimit()
        self._draining, self._drained_code = False, 0
        self._watch: CallWatch | None = None  # from the start on
        self.exit_code = 0
        self.own_error = False

    # ------------------------------------------------------------------ of the role

    @abstractmethod
    def _execute(self, item: Any, /) -> Any:
        """Compute a step or batch; runs on the compute thread."""

    def _finisher(self) -> Callable[[Any], Any] | None:
        """Return what makes the result of an item that :meth:`_execute` only begins, or None."""
        return None

    @abstractmethod
    def _computed(self, item: Any, result: Any, /) -> None:
        """Pass the result of :meth:`_execute`, or the exception it raised, to the core."""

    def _perform(self, action: Any) -> None:
        """Perform an action of the core; each role adds its own."""
        match action:
            case Log(event=name, fields=fields):
                _log.info(name, **fields)
            case Fault(event=name, error=error, fields=fields):
                self._fault(name, error, fields)
            case Exit(reason=reason, restart=restart, own_error=own_error):
                self.own_error = own_error
                self._exit(reason, EXIT_RESTART if restart else 1)

    def _flush(self) -> None:
        """Send all queued messages; called at the end of each turn of the loop."""
        self._links.flush()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the timers; a role also attaches its sockets."""
        self._loop.on_turn_end(self._flush)
        self._watch = CallWatch(self._core.extensions, _hangs)
        self._clock.start()

    def drain(self) -> None:
        """Accept no new work. Exit after the last request or after the grace period."""
        self._drain_for(0)

    def turn(self) -> None:
        """Drain for a change of role. After the grace, other workers take over the requests.

        An order to stop counts more, also one that comes later.
        """
        if not self._draining:
            self._drain_for(EXIT_TURN)

    @property
    def turning(self) -> bool:
        """Whether the process has to start an incarnation of another role next."""
        return self._drained_code == EXIT_TURN

    def _drain_for(self, code: int) -> None:
        self._draining, self._drained_code = True, code
        self.feed(DrainRequested())
        self._loop.call_later(
            self._drain_grace_s, lambda: self._exit("grace_over", self._drained_code)
        )

    def close(self) -> bool:
        """Stop computing, then close the sockets. Return False if a step still runs."""
        ended = self._compute.stop()
        if self._watch is not None:
            self._watch.stop()
        self._links.close()
        self._control.close()
        return ended

    def feed(self, event: object) -> None:
        """Pass an event to the core and perform the actions it returns."""
        for action in self._core.handle(event, self._loop.now()):
            try:
                if type(action) is ToRouter:
                    self._links.send(action.router, action.message)
                else:
                    self._perform(action)
            except Exception as error:
                self._not_performed(action, error)

    def _not_performed(self, action: Any, error: Exception) -> None:
        """Handle an action that raised: a lost message is repeated, a lost step is not."""
        name = type(action).__name__
        self._fault("worker.action_failed", error, {"action": name})
        if isinstance(action, RunStep):
            self.own_error = True
            self._exit(f"{name} failed; see its log", EXIT_RESTART)

    def _fault(self, event: str, error: Exception, fields: dict[str, object]) -> None:
        """Log an exception with its traceback: at most one of an event every few seconds.

        Those of each extension are counted apart.
        """
        text, own = f"{type(error).__name__}: {error}", str(fields.get("extension", ""))
        if self._log_limit.passes(event, self._loop.now(), own, error=text, **fields):
            _log.error(event, exc_info=error, error=text, **fields)

    def _tick(self) -> float | None:
        """Let the core check its timers; return the time of the next tick, None after the last."""
        self.feed(Tick(self._layers_done()))
        self._control.stats.count_into(self._dropped, "endpoint")
        for event, keys in self._log_limit.due(self._loop.now()):
            _log.warning(event, **keys)
        if self._core.is_drained:
            self._exit("drained", self._drained_code)
            return None
        return self._loop.now() + TICK_S

    def _break(self, reason: str) -> None:
        """End the process, so that the supervisor starts another."""
        self.own_error = True
        self._exit(reason, EXIT_RESTART)

    def _exit(self, reason: str, code: int) -> None:
        say = _log.info if code in (0, EXIT_TURN) else _log.error
        say("worker.exit", reason=reason)
        self.exit_code = code
        self._flush()
        self._loop.stop()


def _hangs(event: str, fields: dict[str, object]) -> None:
    """Log that a user's class does not return; called on another thread."""
    _log.error(event, **fields)


class TextHost(WorkerHost):
    """The host of a worker that generates text: steps of an engine, grammars, moves of KV blocks.

    ``frame_bytes``: usual size of a KV frame, for the buffers of a GPU's transfer stream.
    """

    def __init__(
        self,
        core: WorkerCore,
        config: HostConfig,
        runner: StepRunner,
        folder: str,
        frame_bytes: int,
        control: RouterChannel,
        wiring: Wiring,
    ) -> None:
        loop = wiring.loop
        self._pipeline, self._backend = runner.pipeline, runner.backend
        self._queuing = queuing(runner.pipeline)
        self._unwanted: set[int] = set()  # aborted steps; the compute thread only reads this set
        self._applied = AppliedSteps()
        card = runner.card
        compiler = self._compiler = GrammarCompiler(folder, card.vocab_size, card.eos_token_ids)
        compiler.prepare()
        self._grammars = TimeLimited(
            loop,
            lambda wanted: compiler.compile(wanted.task),
            self._on_grammar,
            compiler.time_limit,
            name="grammar",
        )
        self._checks: TimeLimited[CheckImages, None] = TimeLimited(
            loop,
            lambda wanted: wanted.run(),
            lambda wanted, result: self.feed(ImagesChecked(wanted.key, result)),
            lambda: CHECK_S,
            name="images",
        )
        self._publisher: KvPublisher | None = None
        self._stream = runner.backend.block_stream(runner.pool, frame_bytes)
        self._moves = MoveThread(loop) if self._stream is not None else None
        super().__init__(core, config, lambda: self._pipeline.layers_done, control, wiring)

    def publish(self, publisher: KvPublisher | None, cache: PagedCache) -> None:
        """Publish the events of the cache; call it before :meth:`start`."""
        if publisher is not None:
            self._publisher = publisher
            cache.record(publisher.log)
            publisher.start()

    def _flush(self) -> None:
        super()._flush()
        if self._publisher is not None:
            self._publisher.flush()

    def _perform(self, action: Any) -> None:
        match action:
            case RunStep(plan=plan):
                self._compute.submit(plan)
            case AbandonStep(step=step):
                self._unwanted.add(step)
            case CompileGrammar():
                self._grammars.submit(action)
            case DropGrammar(key=key):
                self._drop_grammar(key)
            case CheckImages():
                self._checks.submit(action)
            case _:
                super()._perform(action)

    def _execute(self, plan: StepPlan, /) -> Any:
        return self._run_step(plan)

    def _run_step(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Any:
        """Run or begin a step; if the step is aborted meanwhile, it ends early."""
        run = self._pipeline.execute if self._queuing is None else self._queuing.begin
        step = plan.step
        return run(
            plan, on_layers, lambda: step in self._unwanted, lambda: self._applied.wait(step - 1)
        )

    def _finisher(self) -> Callable[[Any], StepResult] | None:
        return None if self._queuing is None else self._queuing.finish

    def _computed(self, plan: StepPlan, result: StepResult | Exception, /) -> None:
        self._unwanted.discard(plan.step)
        if self._backend.lost:
            # Not reported as a failed step: the routers then continue the requests elsewhere.
            self._leave_device()
            return
        if isinstance(result, Exception):
            requests = [chunk.request.hex() for chunk in plan.chunks]
            _log.error("engine.step_failed", exc_info=result, error=repr(result), requests=requests)
            result = failed_step(plan, result)
        try:
            self.feed(StepDone(result))
        finally:  # the loop continues after an error, so the compute thread must too
            self._applied.set(plan.step)

    def _tick(self) -> float | None:
        # The first failed call may be one of the thread that moves blocks.
        if self._backend.lost:
            self._leave_device()
            return None
        return super()._tick()

    def _leave_device(self) -> None:
        """End the process, because only a new process gets a working context of the device."""
        self._exit(f"device lost: {self._backend.lost}", EXIT_RESTART)

    def _drop_grammar(self, key: tuple[bytes, int]) -> None:
        self._grammars.drop(lambda wanted: wanted.key == key)

    def _on_grammar(self, wanted: CompileGrammar, answer: object) -> None:
        result = as_result(answer)
        if isinstance(result, InternalError):
            name, cause = wanted.key[0].hex(), result.__cause__
            self._fault("grammar.failed", result, {"request": name, "cause": repr(cause)})
        self.feed(GrammarDone(wanted.key, result))

    def close(self) -> bool:
        """Stop all threads, then close the sockets.

        Return False if a step still runs or the device is lost: the model cannot be used again.
        """
        if self._publisher is not None:
            self._publisher.close()
        self._applied.stop()
        self._checks.stop()
        ended = super().close()
        if self._moves is not None:
            self._moves.stop()
        self._grammars.stop()
        self._compiler.close()
        return ended and not self._backend.lost


class AppliedSteps:
    """The last step that the core has applied, for the compute thread to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last = -1
        self._stopped = False

    def set(self, step: int) -> None:
        """Note that the core has applied ``step``."""
        with self._changed:
            self._last = step
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, step: int) -> None:
        """Wait until the core has applied ``step``. Raises InternalError after :meth:`stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._last >= step or self._stopped)
            if self._last < step:
                raise InternalError("the worker stops")


class MoveThread:
    """Runs :attr:`moves` of a worker: waits on a separate thread, finishes on the loop's thread."""

    def __init__(self, loop: Loop) -> None:
        self._thread: ComputeThread[BlockMove, None] = ComputeThread(
            loop, lambda move: move.wait(), self._finished, name="moves"
        )
        self.moves = MoveQueue(
            self._thread.submit, lambda error: _log.error("moves.not_started", error=repr(error))
        )

    def _finished(self, move: BlockMove, result: Exception | None) -> None:
        if result is not None:
            _log.error("moves.failed", error=repr(result))
        self.moves.finished(move, result)

    def stop(self) -> None:
        """Stop the thread. Moves still under way are not reported."""
        self._thread.stop()
