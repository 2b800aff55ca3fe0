"""Sockets, clock and threads around :class:`.core.PrefillCore`.

The I/O thread owns all sockets and the core, and packs KV frames from blocks whose layers
are final. The compute thread owns the model and writes the blocks of the step it runs.
"""

from __future__ import annotations

from ..engine.grammar.constraint import (
    CompileGrammar,
    DropGrammar,
    GrammarCompiler,
    GrammarDone,
    as_result,
)
from ..engine.loading.loader import Runner
from ..engine.loading.warm_up import warm_up
from ..engine.scheduling.plan import StepPlan, StepResult, failed_step
from ..engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ..engine.scheduling.step_time import StepTime
from ..kv_transfer.frames import Bytes, FramePacker
from ..kv_transfer.move_thread import MoveThread
from ..kv_transfer.moves import Give, MovingPacker
from ..kv_transfer.sender import Sender, SenderConfig
from ..proto.wire.messages import DeviceTicket, KVFrame, Message, PoolTicket
from ..runtime.keys.keyring import KeyRing
from ..runtime.net.loop import Loop
from ..runtime.net.sockets import Context, RouterChannel
from ..runtime.process.compute import ComputeThread
from ..runtime.process.log import get_logger
from ..runtime.process.main import EXIT_RESTART, TICK_S
from ..runtime.process.time_limit import TimeLimited
from ..worker.events import DrainRequested, Exit, Note, Tick, ToRouter
from ..worker.membership import Membership
from ..worker.router_links import RouterLinks, routing_identity
from . import events
from .config import PrefillWorkerConfig, kv_frame_bytes
from .core import PrefillCore, PrefillLimits
from .decode_sockets import DecodeSockets
from .endpoint import Endpoint

_log = get_logger()


class PrefillShell:
    """One prefill worker process."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        runner: Runner,
        member: Membership,
        control: RouterChannel,
        loop: Loop,
        context: Context,
        ticket: PoolTicket | DeviceTicket | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self._loop = loop
        self._control = control
        self._member = member
        self._pipeline = runner.pipeline
        self._endpoint = Endpoint(member, control, loop)
        self._compute = ComputeThread(loop, self._execute, self._on_result)
        self._unwanted: set[int] = set()  # aborted steps; the compute thread only reads this set
        card, folder = runner.card, config.runner.model
        compiler = self._compiler = GrammarCompiler(folder, card.vocab_size, card.eos_token_ids)
        self._grammars = TimeLimited(
            loop,
            lambda wanted: compiler.compile(wanted.task),
            self._on_grammar,
            compiler.time_limit,
            name="grammar",
        )
        self._packer = FramePacker(runner.backend, runner.pool)
        self.core = self._make_core(config, runner, member, ticket)
        identity = routing_identity(config.worker_id)
        self._links = RouterLinks(
            loop, context, config.routers, identity, self.feed, keys, member.dropped,
            config.worker_timeout_s,
        )  # fmt: skip
        self._sockets = DecodeSockets(
            loop,
            context,
            identity,
            lambda endpoint, message: self.feed(events.FromPeer(endpoint, message)),
            lambda endpoint: self.feed(events.PeerUp(endpoint)),
            lambda endpoint: self.feed(events.PeerDown(endpoint)),
            self._on_data,
            keys,
            dropped=member.dropped,
            on_refused=self._on_refused,
        )
        stream = runner.backend.block_stream(runner.pool, config.frame_bytes)
        self._moves = MoveThread(loop) if stream is not None else None
        self._device: MovingPacker | None = None
        if stream is not None and self._moves is not None:
            self._device = MovingPacker(stream, self._moves.moves, self._sockets.buffers)
        self._drain_grace_s = config.drain_grace_s
        self.exit_code = 0

    @staticmethod
    def _make_core(
        config: PrefillWorkerConfig,
        runner: Runner,
        member: Membership,
        ticket: PoolTicket | DeviceTicket | None,
    ) -> PrefillCore:
        layout = runner.card.layout
        cache = runner.pipeline.kv.new_cache()
        scheduler = Scheduler(
            SchedulerConfig(
                max_batch=config.max_active,
                token_budget=config.token_budget,
                step_seconds=config.step_seconds,
                one_token=True,
            ),
            cache,
        )
        timeout = config.handoff_timeout_s
        sender = Sender(
            member.identity.incarnation,
            layout,
            SenderConfig(frame_bytes=kv_frame_bytes(config), timeout=timeout),
        )
        limits = PrefillLimits(
            max_active=config.max_active,
            max_queue=config.max_queue,
            max_reserve_tries=config.max_reserve_tries,
            stream_tokens=config.stream_tokens,
            slo_ttft=config.slo_ttft,
        )
        times = StepTime()
        warm_up(runner.pipeline, times)
        return PrefillCore(member, scheduler, sender, limits, times, ticket, timeout)

    def start(self) -> None:
        """Start listening and ticking."""
        self._control.attach(self._loop, self._endpoint.hear)
        self._loop.on_turn_end(self._flush)
        self._tick()

    def close(self) -> bool:
        """Stop computing, then close the sockets. Return False if a step still runs."""
        ended = self._compute.stop()
        if self._moves is not None:
            self._moves.stop()
        self._grammars.stop()
        self._compiler.close()
        self._sockets.close()
        self._links.close()
        self._control.close()
        return ended

    # ------------------------------------------------------------------ events

    def feed(self, event: events.Event) -> None:
        """Pass an event to the core and perform the actions it returns."""
        for action in self.core.handle(event, self._loop.now()):
            self._perform(action)

    def _perform(self, action: events.Action) -> None:
        match action:
            case ToRouter(router=router, message=message):
                self._links.send(router, message)
            case events.ToPeer(endpoint=endpoint, message=message):
                self._sockets.send(endpoint, message)
            case events.PackFrame():
                self._pack(action)
            case events.RunStep(plan=plan):
                self._compute.submit(plan)
            case events.AbandonStep(step=step):
                self._unwanted.add(step)
            case CompileGrammar():
                self._grammars.submit(action)
            case DropGrammar(key=key):
                self._drop_grammar(key)
            case events.Connect(endpoint=endpoint):
                self._sockets.connect(endpoint)
            case events.OpenData(endpoint=endpoint, data_endpoint=address):
                self._sockets.open_data(endpoint, address)
            case events.Disconnect(endpoint=endpoint):
                self._sockets.disconnect(endpoint)
            case Note(event=name, fields=fields):
                _log.info(name, **fields)
            case Exit(reason=reason, restart=restart):
                self._exit(reason, EXIT_RESTART if restart else 1)

    def _on_data(self, endpoint: str, stands: bool) -> None:
        self.feed(events.DataUp(endpoint) if stands else events.DataDown(endpoint))

    def _on_refused(self, endpoint: str, message: Message, reason: str) -> None:
        self._member.dropped["not_encodable"] += 1
        self.feed(events.NotSent(endpoint, message, reason))

    def drain(self) -> None:
        """Accept no new work. Exit after the last request or after the grace period."""
        self.feed(DrainRequested())
        self._loop.call_later(self._drain_grace_s, lambda: self._exit("grace_over", 0))

    def _pack(self, action: events.PackFrame) -> None:
        send, table = action.send, action.block_table

        def sent(frame: KVFrame, payload: Bytes, give: Give | None = None) -> None:
            self._sockets.send_frame(send.endpoint, frame, payload, give)
            self.feed(events.Packed(send.key, frame.index, frame.checksum))

        if self._device is not None:
            packed = self._device.name if action.shared else self._device.pack
            packed(send.frame, table, sent)
        elif action.shared:
            sent(*self._packer.name(send.frame, table))
        elif (ready := self._packer.view(send.frame, table)) is not None:
            sent(*ready)
        else:
            buffers = self._sockets.buffers
            payload = buffers.take(send.frame.nbytes)
            frame = self._packer.pack(send.frame, table, payload)
            sent(frame, payload, lambda: buffers.give(payload))

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run a step and report final layers to the loop; runs on the compute thread."""

        def layers(sequence: bytes, layer_end: int) -> None:
            self._compute.post(lambda: self.feed(events.LayersDone(sequence, layer_end)))

        streams = any(chunk.stream_layers for chunk in plan.chunks)
        return self._pipeline.execute(
            plan, layers if streams else None, lambda: plan.step in self._unwanted
        )

    def _on_result(self, plan: StepPlan, result: StepResult | Exception) -> None:
        self._unwanted.discard(plan.step)
        if isinstance(result, Exception):
            _log.error("engine.step_failed", error=repr(result))
            result = failed_step(plan, result)
        self.feed(events.StepDone(result))

    def _drop_grammar(self, key: tuple[bytes, int]) -> None:
        self._grammars.drop(lambda wanted: wanted.key == key)

    def _on_grammar(self, wanted: CompileGrammar, answer: object) -> None:
        self.feed(GrammarDone(wanted.key, as_result(answer)))

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
        self._flush()
        self._loop.stop()

    def _flush(self) -> None:
        self._links.flush()
        self._sockets.flush()
