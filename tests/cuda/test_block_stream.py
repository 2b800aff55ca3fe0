"""Moves on a transfer stream: right in every order that streams may run in, and not without waits.

The host device runs streams late, by chance and by seed (`host_streams.py`), and leaves 0xff where
a copy has not happened yet. On a GPU the same tests run once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda import block_moves
from baton.engine.kernels.cuda.block_moves import BlockMove, BlockStream, LayerMarks
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.digest import payload_digest
from baton.kv_transfer.device_frames import DeviceFramePacker, DeviceFrameWriter, MoveQueue, Release
from baton.kv_transfer.frames import BufferPool, Bytes
from baton.proto.errors import InternalError
from baton.proto.wire.messages import GrantRef, KVFrame

from .block_moves import random_bf16
from .host_device import HostDevice, LaunchFailed

LAYERS, BLOCKS, HEADS, SIZE, DIM = 4, 9, 1, 4, 8
SHAPE = (LAYERS, BLOCKS, 2, HEADS, SIZE, DIM)
BLOCK_BYTES = 2 * HEADS * SIZE * DIM * 2
TABLE = np.array([7, 2, 5, 0], np.int32)
THEIRS = np.array([1, 8, 3, 6], np.int32)
SEEDS = range(12)

Draws = np.random.Generator


class Side:
    """A worker's device, its pool and its moves; a thread that waits is a list here."""

    def __init__(self, device: Device, content: npt.NDArray[Any], slots: int = 2) -> None:
        self.device: Any = device
        self.pool: Any = device.upload(content)
        self.marks = LayerMarks(device)
        self.stream = BlockStream(device, self.pool, self.marks, BLOCK_BYTES, slots)
        self.watched: deque[BlockMove] = deque()
        self.moves = MoveQueue(self.watched.append)

    def finish_one(self) -> bool:
        """The waiting thread's work: wait for the oldest move and report it."""
        if not self.watched:
            return False
        move = self.watched.popleft()
        move.wait()
        self.moves.finished(move)
        return True


def frame_of(index: int, layer: int, first: int, count: int) -> KVFrame:
    return KVFrame(
        grant=GrantRef(1, 0, 0), index=index, layer_start=layer, layer_count=1, block_start=first,
        block_count=count, nbytes=count * BLOCK_BYTES, checksum=0,
    )  # fmt: skip


class Handoff:
    """A prompt's layers computed one by one, sent as they are final, and read by a decode step."""

    def __init__(self, sender: Side, receiver: Side, draws: Draws) -> None:
        self.sender, self.receiver, self.draws = sender, receiver, draws
        self.packer = DeviceFramePacker(sender.stream, sender.moves, BufferPool())
        self.writer = DeviceFrameWriter(receiver.stream, receiver.moves)
        self.on_the_wire: deque[tuple[KVFrame, Bytes, Release | None]] = deque()
        self.intact: list[bool] = []

    def sent(self, frame: KVFrame, payload: Bytes, release: Release | None) -> None:
        self.on_the_wire.append((frame, payload, release))

    def read_one(self) -> bool:
        """ZeroMQ reads a payload when it gets to it, and lets go of it then."""
        if not self.on_the_wire:
            return False
        frame, payload, release = self.on_the_wire.popleft()
        arrived = payload.copy()
        if release is not None:
            release()
        blocks = THEIRS[frame.block_start : frame.block_start + frame.block_count]
        self.writer.write(frame, blocks, arrived, self.intact.append)
        return True

    def go_on(self) -> bool:
        """One thing that may happen next, drawn from the possible ones."""
        steps = [self.sender.finish_one, self.read_one, self.receiver.finish_one]
        return any(step() for step in self.draws.permutation(np.array(steps, object)))

    def run(self, computed: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Compute ``computed``, hand it over; what a decode step finds in the receiver's pool."""
        device = self.sender.device
        results = device.host_buffer(SHAPE, np.uint16)
        results[...] = computed
        index = 0
        for layer in range(LAYERS):
            # What kernels of the layer do, which may run late: the pool had something else.
            device.write(self.sender.pool[layer], results[layer])
            self.sender.marks.set(layer + 1)
            for first, count in ((0, 3), (3, 1)):
                self.packer.pack(
                    frame_of(index, layer, first, count), TABLE, self.sent, pytest.fail
                )
                index += 1
            while self.draws.random() < 0.6 and self.go_on():
                pass
        while len(self.intact) < index and self.go_on():
            pass
        assert len(self.intact) == index, "a frame was never stored"
        assert all(self.intact), "a frame was damaged on the way"
        found: npt.NDArray[Any] = self.receiver.device.download(self.receiver.pool)
        return found[:, THEIRS]


def hand_over(devices: tuple[Device, Device], seed: int) -> None:
    draws = np.random.default_rng(seed)
    before, computed, blank = (random_bf16(draws, SHAPE) for _ in range(3))
    handoff = Handoff(Side(devices[0], before), Side(devices[1], blank), draws)
    found = handoff.run(computed)
    np.testing.assert_array_equal(found, computed[:, TABLE])


def late(device: HostDevice, seed: int) -> tuple[Device, Device]:
    return device.late(2 * seed), device.late(2 * seed + 1)


def test_layers_are_handed_over_while_others_are_computed(device: Device) -> None:
    hand_over((device, device), seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_every_order_of_the_streams(host_device: HostDevice, seed: int) -> None:
    hand_over(late(host_device, seed), seed)


# ---------------------------------------------------------------- planted bugs


def nothing(*_: object) -> None:
    return None


def without_layer_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerMarks, "behind", nothing)


def without_waiting_for_other_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostDevice, "wait_for", nothing)


def reading_a_frame_before_its_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockMove, "wait", nothing)
    patch.setattr(BlockMove, "_check_done", nothing)


def reusing_a_buffer_that_the_device_uses(patch: pytest.MonkeyPatch) -> None:
    finish = BlockStream._finish

    def finish_and_give(self: BlockStream, slot: Any, payload: Any = None) -> BlockMove:
        self._free.insert(0, slot)
        return finish(self, slot, payload)

    patch.setattr(BlockStream, "_finish", finish_and_give)
    patch.setattr(BlockMove, "release", nothing)


def reusing_a_buffer_that_zeromq_reads(patch: pytest.MonkeyPatch) -> None:
    pack = DeviceFramePacker.pack

    def pack_and_give(
        self: DeviceFramePacker, frame: KVFrame, table: Any, sent: Any, failed: Any
    ) -> None:
        def at_once(header: KVFrame, payload: Bytes, release: Release | None) -> None:
            if release is not None:
                release()
            sent(header, payload, None)

        pack(self, frame, table, at_once, failed)

    patch.setattr(DeviceFramePacker, "pack", pack_and_give)


def computing_on_blocks_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    def write(
        self: DeviceFrameWriter, frame: KVFrame, blocks: Any, payload: Any, stored: Any
    ) -> None:
        start, count = frame.layer_start, frame.layer_count
        ids, taken = blocks.copy(), payload.copy()
        self._moves.submit(
            lambda: self._stream.scatter(start, count, ids, taken), lambda move: move.release()
        )
        stored(True)

    patch.setattr(DeviceFrameWriter, "write", write)


@pytest.mark.parametrize(
    "plant",
    [
        without_layer_events,
        without_waiting_for_other_streams,
        reading_a_frame_before_its_event,
        reusing_a_buffer_that_the_device_uses,
        reusing_a_buffer_that_zeromq_reads,
        computing_on_blocks_before_they_are_written,
    ],
)
def test_a_missing_wait_is_found(
    host_device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    caught = 0
    for seed in SEEDS:
        try:
            hand_over(late(host_device, seed), seed)
        except AssertionError:
            caught += 1
    assert caught, "no order of the streams shows it"


# ---------------------------------------------------------------- pool to pool, and refusals


def finished(side: Side, start: Callable[[], BlockMove | None]) -> int:
    """The digest of a move that is waited for."""
    move = start()
    assert move is not None
    move.wait()
    digest = move.digest
    move.release()
    return digest


def test_a_mapped_pool_is_summed_and_copied(device: Device, rng: Draws) -> None:
    content = random_bf16(rng, SHAPE)
    sender, receiver = Side(device, content), Side(device, random_bf16(rng, SHAPE))
    summed = finished(sender, lambda: sender.stream.sum(1, 2, TABLE))
    source = sender.pool
    copied = finished(receiver, lambda: receiver.stream.copy(source, 1, 2, TABLE, THEIRS))
    payload = np.ascontiguousarray(content[1:3, TABLE]).reshape(-1).view(np.uint8)
    assert summed == copied == payload_digest(payload)
    found = device.download(receiver.pool)
    np.testing.assert_array_equal(found[1:3, THEIRS], content[1:3, TABLE])


def test_a_ring_is_bounded_and_a_misfit_costs_no_slot(device: Device, rng: Draws) -> None:
    side = Side(device, random_bf16(rng, SHAPE), slots=2)
    for _ in range(3):  # each would use up a slot
        with pytest.raises(ValueError, match="block 99 is not in a pool"):
            side.stream.sum(0, 1, np.array([99], np.int32))
        with pytest.raises(ValueError, match="from 0 on"):
            side.stream.gather(0, 1, np.array([-1], np.int32))
        with pytest.raises(ValueError, match="twice"):
            side.stream.scatter(0, 1, np.array([1, 1], np.int32), np.zeros(256, np.uint8))
        with pytest.raises(ValueError, match="payload has 3 bytes"):
            side.stream.scatter(0, 1, TABLE, np.zeros(3, np.uint8))
    first, second = side.stream.sum(0, 1, TABLE), side.stream.gather(0, LAYERS, TABLE)
    assert first is not None
    assert second is not None
    assert side.stream.gather(0, 1, TABLE) is None
    first.wait()
    with pytest.raises(InternalError, match="only gathered blocks"):
        _ = first.payload
    first.release()
    assert side.stream.gather(0, 1, TABLE) is not None


def test_a_result_is_not_to_be_had_before_its_event(host_device: HostDevice, rng: Draws) -> None:
    """The product's own guard; the tests above do without it where they plant a bug."""
    refused = 0
    for seed in SEEDS:
        side = Side(host_device.late(seed), random_bf16(rng, SHAPE))
        move = side.stream.sum(0, 1, TABLE)
        assert move is not None
        try:
            _ = move.digest
        except InternalError:
            refused += 1
    assert refused


def test_slow_readers_do_not_hold_the_ring(device: Device, rng: Draws) -> None:
    """No peer reads the sent frames, and yet every frame is packed."""
    content = random_bf16(rng, SHAPE)
    side, sent = Side(device, content), []
    ring = [*side.stream._free]
    packer = DeviceFramePacker(side.stream, side.moves, BufferPool())
    for index in range(10):
        frame = frame_of(index, index % LAYERS, 0, 4)
        packer.pack(frame, TABLE, lambda *packed: sent.append(packed), pytest.fail)
    while side.finish_one():
        pass
    assert len(sent) == 10
    for frame, payload, _ in sent:
        np.testing.assert_array_equal(
            payload.view(np.uint16), content[frame.layer_start, TABLE].reshape(-1)
        )
        assert frame.checksum == payload_digest(payload)
    buffers = [slot._host_payload for slot in ring]
    lent = [any(np.shares_memory(payload, one) for one in buffers) for _, payload, _ in sent]
    assert lent == [False] * 8 + [True] * 2, "what is left of the ring is lent to the last frames"
    sent[-1][2]()
    assert side.stream.sum(0, 1, TABLE) is not None


def test_a_copy_to_memory_that_is_not_pinned_is_refused(host_device: HostDevice) -> None:
    with pytest.raises(LaunchFailed, match="not pinned"):
        host_device.read(host_device.zeros((4,), np.int32), np.zeros(4, np.int32))


def test_a_move_that_cannot_start_fails_its_frame_and_no_other(device: Device, rng: Draws) -> None:
    """Blocks outside the pool, and errors of the device: none is tried again."""
    side, told, reported = Side(device, random_bf16(rng, SHAPE)), [], []
    side.moves = MoveQueue(side.watched.append, told.append)
    packer = DeviceFramePacker(side.stream, side.moves, BufferPool())
    gather, errors = side.stream.gather, iter([MemoryError("no room"), InternalError("lost")])

    def broken(*arguments: Any) -> BlockMove | None:
        for error in errors:
            raise error
        return gather(*arguments)

    side.stream.gather = broken  # type: ignore[method-assign]
    for index in range(3):
        packed = partial(reported.append, f"{index} packed")
        failed = partial(reported.append, f"{index} failed")
        packer.pack(frame_of(index, 0, 0, 4), TABLE, lambda *_, tell=packed: tell(), failed)
    assert reported == ["0 failed", "1 failed"] and len(side.moves) == 1
    while side.finish_one():
        pass
    assert reported[2:] == ["2 packed"] and not len(side.moves)
    assert [type(error) for error in told] == [MemoryError, InternalError]


def test_a_failed_move_gives_its_slot_back_and_is_told(device: Device, rng: Draws) -> None:
    side = Side(device, random_bf16(rng, SHAPE), slots=1)
    told: list[BlockMove | None] = []
    side.moves.submit(lambda: side.stream.sum(0, 1, TABLE), told.append)
    side.moves.submit(lambda: side.stream.sum(0, 1, np.array([99], np.int32)), told.append)
    side.moves.finished(side.watched.popleft(), RuntimeError("the device is gone"))
    assert told == [None, None]
    assert side.moves.failures == 2
    assert len(side.moves) == 0
    assert side.stream.sum(0, 1, TABLE) is not None
    assert block_moves.SLOTS >= 4
