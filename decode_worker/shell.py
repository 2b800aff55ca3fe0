"""Sockets, clock and threads around :class:`.core.DecodeCore`.

The I/O thread owns all sockets, the core and, for blocks under a grant, the KV pool. The
compute thread owns the model and the blocks of the step it runs. Of a speech model, one more
thread decodes samples while steps run, one chunk after the other; on a GPU it has a separate stream
of lower priority. Each request has at most one chunk in its queue, so requests take turns.
"""

from __future__ import annotations

from typing import Any

from baton.engine.audio.chunks import AudioDecoder
from baton.engine.loading.warm_up import warm_up
from baton.engine.pipeline.runner import StepRunner
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.custom import CustomTransport
from baton.kv_transfer.device_frames import DeviceFrameWriter
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import ReceiverConfig
from baton.proto.limits import MAX_KV_FRAME_BYTES
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.compute import ComputeThread
from baton.worker.host import TextHost
from baton.worker.membership import Membership

from . import events
from .config import DecodeWorkerConfig
from .core import DecodeCore
from .handoffs import GrantStore
from .prefill_sockets import ControlSocket, DataSocket
from .voice import Codec

FRAME_BYTES = 2 << 20
"""Initial size of the buffers for frames into a GPU, in bytes: the senders' default frame size."""


class DecodeShell(TextHost):
    """One decode worker process."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        runner: StepRunner,
        member: Membership,
        control: RouterChannel,
        data: RouterChannel,
        wiring: Wiring,
        audio: AudioDecoder | None = None,
    ) -> None:
        """``audio``: codec of a speech model."""
        codec = None if audio is None else Codec(audio.layout, audio.codec.context_frames)
        self.core = _make_core(config, runner, member, data.endpoint, codec)
        super().__init__(
            self.core, config, runner, config.runner.model, FRAME_BYTES, control, wiring
        )
        loop = wiring.loop
        self._codec: ComputeThread[events.DecodeChunk, bytes] | None = None
        if audio is not None:
            self._codec = ComputeThread(
                loop,
                lambda chunk: audio.decode_pcm(chunk.window, chunk.entries),
                self._on_chunk,
                name="codec",
            )
        device = None
        if self._stream is not None and self._moves is not None:
            device = DeviceFrameWriter(self._stream, self._moves.moves)
        self._peers = ControlSocket(control, loop, member.dropped)
        transport = None
        if config.kv_transport:
            transport = CustomTransport(config.kv_transport, config.extensions, self._fault)
            member.extensions.append(transport.guard)
        self._data = DataSocket(
            data, loop, runner, device, self.core.receiver, member.dropped, transport
        )

    def start(self) -> None:
        """Start listening and ticking."""
        self._peers.attach(
            lambda peer, message, key: self.feed(events.FromPeer(peer, message, key)), self._on_gone
        )
        self._data.attach(
            lambda frame, intact: self.feed(events.FrameStored(frame, intact)),
            lambda frame, error: self.feed(events.FrameFailed(frame, error)),
        )
        super().start()

    def close(self) -> bool:
        """Stop all threads, then close the sockets. Return False if a step still runs."""
        ended = super().close()
        if self._codec is not None:
            ended = self._codec.stop() and ended
        self._data.close()
        return ended

    def _perform(self, action: Any) -> None:
        match action:
            case events.ToPeer(peer=peer, message=message):
                self._peers.send(peer, message)
            case events.MapPool(peer=peer):
                failure = self._data.pools.open(peer, action.incarnation, action.ticket)
                self.feed(events.PoolMapped(peer, failure, action.transport))
            case events.DecodeChunk() if self._codec is not None:
                self._codec.submit(action)
            case _:
                super()._perform(action)

    def _on_chunk(self, chunk: events.DecodeChunk, samples: bytes | Exception) -> None:
        if self._backend.lost:
            # Not reported as a failed chunk: the routers then continue the requests elsewhere.
            self._leave_device()
            return
        self.feed(events.ChunkDecoded(chunk.key, chunk.window.first, samples))

    def _on_gone(self, peer: bytes) -> None:
        self._data.pools.close(peer)
        self.feed(events.PeerGone(peer))

    def _tick(self) -> float | None:
        self._data.count_drops()
        return super()._tick()

    def _flush(self) -> None:
        super()._flush()
        self._peers.flush()


def _make_core(
    config: DecodeWorkerConfig,
    runner: StepRunner,
    member: Membership,
    data_endpoint: str,
    codec: Codec | None,
) -> DecodeCore:
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
        runner.card.layout,
        GrantStore(cache, scheduler),
        ReceiverConfig(
            window=config.window,
            budget=config.credit_budget,
            timeout=config.handoff_timeout_s,
        ),
    )
    times = StepTime()
    warm_up(runner.pipeline, times)
    return DecodeCore(
        member, scheduler, receiver, (data_endpoint, MAX_KV_FRAME_BYTES), times, codec,
        config.slo_ttft,
    )  # fmt: skip
