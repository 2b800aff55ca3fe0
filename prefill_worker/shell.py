"""Sockets, clock and threads around :class:`.core.PrefillCore`.

The I/O thread owns all sockets and the core, and packs KV frames from blocks whose layers
are final. The compute thread owns the model and writes the blocks of the step it runs.
"""

from __future__ import annotations

from typing import Any

from baton.engine.loading.warm_up import warm_up
from baton.engine.pipeline.runner import StepRunner
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.custom import CustomTransport
from baton.kv_transfer.device_frames import DeviceFramePacker, Release
from baton.kv_transfer.frames import Bytes, FramePacker
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import SenderConfig
from baton.proto.wire.messages import DeviceTicket, KVFrame, PoolTicket
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.log import get_logger
from baton.worker.host import TextHost
from baton.worker.membership import Membership

from . import events
from .config import PrefillWorkerConfig, kv_frame_bytes
from .core import PrefillCore, PrefillLimits
from .custom_order import CustomOrder
from .decode_sockets import DecodeSockets
from .endpoint import Endpoint

_log = get_logger()


class PrefillShell(TextHost):
    """One prefill worker process."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        runner: StepRunner,
        member: Membership,
        control: RouterChannel,
        wiring: Wiring,
        ticket: PoolTicket | DeviceTicket | None = None,
    ) -> None:
        loop = wiring.loop
        order = None
        if config.order:
            order = CustomOrder(config.order, config.extensions, self._fault, loop.now)
        self._transport: CustomTransport | None = None
        if config.kv_transport:
            self._transport = CustomTransport(config.kv_transport, config.extensions, self._fault)
            member.extensions.append(self._transport.guard)
        self.core = _make_core(config, runner, member, ticket, order)
        super().__init__(
            self.core, config, runner, config.runner.model, config.frame_bytes, control, wiring
        )
        self._endpoint = Endpoint(member, control, loop)
        self._packer = FramePacker(runner.backend, runner.pool)
        self._sockets = DecodeSockets(wiring, config.worker_id, self.feed, member.dropped)
        self._device: DeviceFramePacker | None = None
        if self._stream is not None and self._moves is not None:
            self._device = DeviceFramePacker(self._stream, self._moves.moves, self._sockets.buffers)

    def start(self) -> None:
        """Start listening and ticking."""
        self._control.attach(self._loop, self._endpoint.hear)
        super().start()

    def close(self) -> bool:
        """Stop all threads, then close the sockets. Return False if a step still runs."""
        ended = super().close()
        self._sockets.close()
        return ended

    # ------------------------------------------------------------------ events

    def _perform(self, action: Any) -> None:
        match action:
            case events.ToPeer(endpoint=endpoint, message=message):
                self._sockets.send(endpoint, message)
            case events.PackFrame():
                self._pack(action)
            case events.Connect(endpoint=endpoint):
                self._sockets.connect(endpoint)
            case events.OpenData(endpoint=endpoint, data_endpoint=address):
                self._sockets.open_data(endpoint, address)
            case events.Disconnect(endpoint=endpoint):
                self._sockets.disconnect(endpoint)
            case _:
                super()._perform(action)

    def _pack(self, action: events.PackFrame) -> None:
        send, table = action.send, action.block_table

        def sent(frame: KVFrame, payload: Bytes, release: Release | None = None) -> None:
            if self._transport is not None and not action.shared:
                ticket = self._transport.put(payload)
                if ticket is not None:
                    payload, read = ticket, release
                    release = None
                    if read is not None:
                        read()
            _log.debug("frame.packed", frame=frame.index, layers=frame.layer_count)
            self._sockets.send_frame(send.endpoint, frame, payload, release)
            self.feed(events.Packed(send.key, frame.index, frame.checksum))

        if self._device is not None:
            packed = self._device.name if action.shared else self._device.pack
            packed(send.frame, table, sent, lambda: self.feed(events.NotPacked(send.key)))
        elif action.shared:
            sent(*self._packer.name(send.frame, table))
        elif action.layout is None and (ready := self._packer.view(send.frame, table)) is not None:
            sent(*ready)
        else:
            buffers = self._sockets.buffers
            payload = buffers.take(send.frame.nbytes)
            frame = self._packer.pack(send.frame, table, payload, action.layout)
            sent(frame, payload, lambda: buffers.release(payload))

    def _execute(self, plan: StepPlan, /) -> Any:
        """Run or begin a step and report final layers to the loop; runs on the compute thread."""

        def layers(sequence: bytes, layer_end: int) -> None:
            self._compute.post(lambda: self.feed(events.LayersDone(sequence, layer_end)))

        streams = any(chunk.stream_layers for chunk in plan.chunks)
        return self._run_step(plan, layers if streams else None)

    def _flush(self) -> None:
        super()._flush()
        self._sockets.flush()


def _make_core(
    config: PrefillWorkerConfig,
    runner: StepRunner,
    member: Membership,
    ticket: PoolTicket | DeviceTicket | None,
    order: CustomOrder | None,
) -> PrefillCore:
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch=config.max_active,
            token_budget=config.token_budget,
            step_seconds=config.step_seconds,
            one_token=True,
        ),
        runner.pipeline.kv.new_cache(),
    )
    sender = Sender(
        member.identity.incarnation,
        runner.card.layout,
        SenderConfig(frame_bytes=kv_frame_bytes(config), timeout=config.handoff_timeout_s),
    )
    limits = PrefillLimits(
        max_active=config.max_active,
        max_queue=config.max_queue,
        max_reserve_tries=config.max_reserve_tries,
        stream_tokens=config.stream_tokens,
        slo_ttft=config.slo_ttft,
        handoff_timeout_s=config.handoff_timeout_s,
    )
    times = StepTime()
    warm_up(runner.pipeline, times)
    return PrefillCore(member, scheduler, sender, limits, times, ticket, order)
