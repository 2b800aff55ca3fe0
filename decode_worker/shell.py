"""Sockets, clock and threads around :class:`.core.DecodeCore`.

The I/O thread owns all sockets, the core and, for blocks under a grant, the KV pool. The
compute thread owns the model and the blocks of the step it runs.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

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
from ..kv_transfer.checksums import envelope_digest
from ..kv_transfer.frames import FrameWriter
from ..kv_transfer.move_thread import MoveThread
from ..kv_transfer.moves import MovingWriter
from ..kv_transfer.receiver import Receiver, ReceiverConfig
from ..kv_transfer.shared_pool import MappedPools, Mapping, unmap
from ..proto.errors import AccessDenied, EnvelopeDamaged, ProtocolError
from ..proto.limits import MAX_KV_FRAME_BYTES
from ..proto.wire.envelope import EnvelopeDecoder, decode_kv_header
from ..proto.wire.messages import KVFrame, PrefillToDecode, Rejected
from ..runtime.keys.identity_owners import Callers
from ..runtime.keys.keyring import KeyRing
from ..runtime.net.channel import Frames
from ..runtime.net.loop import Loop
from ..runtime.net.outbox import Outbox
from ..runtime.net.sockets import Context, RouterChannel
from ..runtime.process.compute import ComputeThread
from ..runtime.process.limited_log import LimitedLog
from ..runtime.process.log import get_logger
from ..runtime.process.main import EXIT_RESTART, TICK_S
from ..runtime.process.time_limit import TimeLimited
from ..worker.events import DrainRequested, Exit, Fault, Note, Tick, ToRouter
from ..worker.membership import Membership
from ..worker.router_links import RouterLinks, routing_identity
from . import events
from .config import DecodeWorkerConfig
from .core import DecodeCore, GrantStore
from .gate import PeerGate

_log = get_logger()

FRAME_BYTES = 2 << 20
"""Initial size of the buffers for frames into a GPU, in bytes: the senders' default frame size."""


class DecodeShell:
    """One decode worker process."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        runner: Runner,
        member: Membership,
        control: RouterChannel,
        data: RouterChannel,
        loop: Loop,
        context: Context,
        keys: KeyRing | None = None,
    ) -> None:
        self._loop = loop
        self._limited = LimitedLog(loop)
        self._dropped = member.dropped
        self._pipeline = runner.pipeline
        self._control = control
        self._data = data
        self._decoder: EnvelopeDecoder[PrefillToDecode] = EnvelopeDecoder(
            PrefillToDecode, digest=envelope_digest
        )
        self._to_peers: Outbox[bytes] = Outbox(control.send, digest=envelope_digest)
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
        self.core = self._make_core(config, runner, member)
        self._gate = PeerGate(self.core.receiver.owner_of_attempt, self.core.receiver.owner)
        self._writer = FrameWriter(runner.backend, runner.pool)
        stream = runner.backend.block_stream(runner.pool, FRAME_BYTES)
        self._moves = MoveThread(loop) if stream is not None else None
        self._device: MovingWriter | None = None
        if stream is not None and self._moves is not None:
            self._device = MovingWriter(stream, self._moves.moves)
        self._pools = MappedPools(runner.card.layout, _unmap_aside, runner.backend.open_pool)
        identity = routing_identity(config.worker_id)
        self._links = RouterLinks(
            loop, context, config.routers, identity, self.feed, keys, self._dropped,
            config.worker_timeout_s,
        )  # fmt: skip
        self._drain_grace_s = config.drain_grace_s
        self.exit_code = 0

    def _make_core(
        self, config: DecodeWorkerConfig, runner: Runner, member: Membership
    ) -> DecodeCore:
        layout = runner.card.layout
        cache = runner.pipeline.kv.new_cache()
        scheduler = Scheduler(
            SchedulerConfig(
                max_batch=config.max_batch,
                token_budget=config.token_budget,
                step_seconds=config.step_seconds,
            ),
            cache,
        )
        receiver = Receiver(
            member.identity.incarnation,
            layout,
            GrantStore(cache, scheduler),
            ReceiverConfig(
                window=config.window,
                budget=config.credit_budget,
                timeout=config.handoff_timeout_s,
            ),
        )
        times = StepTime()
        warm_up(runner.pipeline, times)
        address = self._data.endpoint
        return DecodeCore(member, scheduler, receiver, address, MAX_KV_FRAME_BYTES, times)

    def start(self) -> None:
        """Start listening and ticking."""
        self._control.attach(self._loop, self._hear, self._on_gone)
        self._data.attach(self._loop, self._on_data)
        self._loop.on_turn_end(self._flush)
        self._tick()

    def close(self) -> bool:
        """Stop computing, then close the sockets. Return False if a step still runs."""
        ended = self._compute.stop()
        if self._moves is not None:
            self._moves.stop()
        self._grammars.stop()
        self._compiler.close()
        self._links.close()
        self._control.close()
        self._data.close()
        self._pools.close_all()  # the next incarnation maps the pools again
        return ended

    # ------------------------------------------------------------------ events

    def feed(self, event: events.Event) -> None:
        """Pass an event to the core and perform the actions it returns."""
        for action in self.core.handle(event, self._loop.now()):
            match action:
                case ToRouter(router=router, message=message):
                    self._links.send(router, message)
                case events.ToPeer(peer=peer, message=message):
                    self._to_peers.put(peer, message)
                case events.MapPool(peer=peer):
                    failure = self._pools.open(peer, action.incarnation, action.ticket)
                    self.feed(events.PoolMapped(peer, failure, action.transport))
                case events.RunStep(plan=plan):
                    self._compute.submit(plan)
                case events.AbandonStep(step=step):
                    self._unwanted.add(step)
                case CompileGrammar():
                    self._grammars.submit(action)
                case DropGrammar(key=key):
                    self._drop_grammar(key)
                case Note(event=name, fields=fields):
                    _log.info(name, **fields)
                case Fault(event=name, error=error, fields=fields):
                    _log.error(name, exc_info=error, **fields)
                case Exit(reason=reason, restart=restart):
                    self._exit(reason, restart=restart)

    def drain(self) -> None:
        """Accept no new work. Exit after the last request or after the grace period."""
        self.feed(DrainRequested())
        self._loop.call_later(
            self._drain_grace_s, lambda: self._exit("grace_over", restart=False, code=0)
        )

    def _hear(self, peer: bytes, frames: Frames) -> None:
        try:
            messages = self._decoder.decode(frames)
        except EnvelopeDamaged as error:
            self._dropped[f"peer_{error.code}"] += 1
            self._limited.warning("peer.damaged", count=self._decoder.damaged)
            return  # treated as a lost message: the peer repeats it
        except ProtocolError as error:
            self._dropped[f"peer_{error.code}"] += 1
            self._limited.warning("peer.malformed", error=str(error))
            reply = Rejected(code=error.code, message=str(error))
            self._to_peers.put(peer, reply)
            return
        if self._control.callers is not None:
            messages = self._allowed(self._control.callers, peer, messages)
        for message in messages:
            self.feed(events.FromPeer(peer, message))

    def _allowed(
        self, callers: Callers, peer: bytes, messages: list[PrefillToDecode]
    ) -> list[PrefillToDecode]:
        """Return the messages that the peer's key allows; reject the others."""
        entry, allowed = callers.entry_of(peer), callers.allowed()
        passed = []
        for message in messages:
            error = self._gate.refusal(allowed, entry, peer, message)
            if error is None:
                passed.append(message)
                continue
            self._dropped[f"peer_{error.code}"] += 1
            self._limited.warning("peer.denied", error=str(error))
            reply = Rejected(code=error.code, message=str(error))
            self._to_peers.put(peer, reply)
        return passed

    def _on_gone(self, peer: bytes) -> None:
        self._pools.close(peer)
        self.feed(events.PeerGone(peer))

    def _on_data(self, peer: bytes, frames: Frames) -> None:
        """Check a KV frame and write its payload, or the blocks it names, into the pool."""
        if len(frames) != 2:
            self._dropped["data_frames"] += 1
            self._limited.warning("data.malformed", frames=len(frames))
            return
        try:
            header = decode_kv_header(frames[0])
            if self._data.callers is not None:
                self._check_sender(self._data.callers, peer, header)
            blocks = self.core.receiver.locate(header)
        except (ProtocolError, AccessDenied) as error:
            self._dropped[f"data_{error.code}"] += 1
            self._limited.warning("data.malformed", error=str(error))
            return
        if blocks is None:
            self._dropped["stale_kv_frame"] += 1
            return
        payload = np.frombuffer(frames[1], np.uint8)
        owner = self.core.receiver.owner(header.grant) or 0
        stored = partial(self._stored, header)
        if self._device is not None and header.shared:
            self._device.fetch(header, blocks, lambda: self._pools.get(owner), payload, stored)
        elif self._device is not None:
            self._device.write(header, blocks, payload, stored)
        elif header.shared:
            source = self._pools.get(owner)
            stored(self._writer.fetch(header, blocks, source, payload))
        else:
            stored(self._writer.write(header, blocks, payload))

    def _stored(self, header: KVFrame, intact: bool) -> None:
        """Report a frame to the core after its last write."""
        if not intact:
            self._dropped["damaged_kv_frame"] += 1
        self.feed(events.FrameStored(header, intact))

    def _check_sender(self, callers: Callers, peer: bytes, header: KVFrame) -> None:
        """Raise AccessDenied unless the frame came with the key of the grant's owner."""
        owner = self.core.receiver.owner(header.grant)
        if owner is not None and not self._gate.holds(callers.key_of(peer), owner):
            raise AccessDenied("the KV frame is for a grant of a worker with another key")

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run a step; runs on the compute thread."""
        return self._pipeline.execute(plan, unwanted=lambda: plan.step in self._unwanted)

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
        self._control.stats.count_into(self._dropped, "endpoint")
        self._data.stats.count_into(self._dropped, "data")
        self.feed(Tick(self._pipeline.layers_done))
        if self.core.is_drained:
            self._exit("drained", restart=False, code=0)
        else:
            self._loop.call_later(TICK_S, self._tick)

    def _exit(self, reason: str, *, restart: bool, code: int | None = None) -> None:
        self.exit_code = code if code is not None else (EXIT_RESTART if restart else 1)
        say = _log.error if self.exit_code else _log.info
        say("worker.exit", reason=reason)
        self._flush()
        self._loop.stop()

    def _flush(self) -> None:
        self._links.flush()
        self._to_peers.flush()


def _unmap_aside(memory: Mapping) -> None:
    """Unmap on another thread: the last mapping of a dead worker's pool may free gigabytes."""
    thread = threading.Thread(target=unmap, args=(memory,), name="unmap", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        unmap(memory)
