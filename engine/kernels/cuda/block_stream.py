"""Moves of KV blocks that nobody waits for: on a stream of their own, by way of pinned memory.

A move takes a slot of a bounded ring: pinned bytes of the host and as many on the device. What it
queues (ids up, the kernel, bytes down or up) ends with an event; the slot belongs to the move until
:meth:`BlockMove.release`. Moves are queued by one thread and done in order; while they are
carried out, the compute stream goes on.

Invariants: a block is read only behind the event of :class:`LayerMarks` that stands behind the
kernels that wrote it; neither payload nor digest is looked at before the move's event is done.
That nobody frees or computes on a block while a move writes to it is for the caller: see
``docs/decisions/0015-a-transfer-stream.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ....proto.errors import InternalError
from .blocks import (
    WORKSPACE_WORDS,
    BlockIds,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    sum_blocks,
)
from .device import Device, DeviceArray, Event
from .payload import PayloadLayout

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

SLOTS = 8
"""Moves that may be under way, or wait for somebody to read their payload."""
_IDS = 1024


class LayerMarks:
    """Where in the compute stream the newest step wrote each layer.

    The compute thread marks, another reads. A mark of a later step stands behind that of an
    earlier one, so waiting for the newest is right for whatever was announced before.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: dict[int, Event] = {}

    def set(self, layer_end: int) -> None:
        """All kernels that write layers below ``layer_end`` are queued."""
        self._events[layer_end] = self._device.record()

    def behind(self, layer_end: int) -> Event | None:
        """The event behind which layers below ``layer_end`` are final; None: they are already."""
        return self._events.get(layer_end)


class _Slot:
    """Room of one move, on the host and on the device; grows with what it is asked for."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.digest: Any = device.zeros((1,), np.uint64)
        self.host_digest: Any = device.host_buffer((1,), np.uint64)
        self._payload: Any = device.empty((nbytes,), np.uint8)
        self._host_payload = device.host_buffer((nbytes,), np.uint8)
        self._ids: Any = device.empty((_IDS,), np.int32)
        self._host_ids = device.host_buffer((_IDS,), np.int32)

    def payload(self, nbytes: int) -> tuple[DeviceArray, U8]:
        """``nbytes`` on the device and as many pinned ones, of any content."""
        if nbytes > len(self._host_payload):
            self._payload = self._device.empty((nbytes,), np.uint8)
            self._host_payload = self._device.host_buffer((nbytes,), np.uint8)
        return self._payload[:nbytes], self._host_payload[:nbytes]

    def upload_ids(self, *lists: I32) -> list[BlockIds]:
        """Queue one copy of lists of block ids; ValueError for ids that no pool has."""
        total = sum(len(ids) for ids in lists)
        if total > len(self._host_ids):
            self._ids = self._device.empty((total,), np.int32)
            self._host_ids = self._device.host_buffer((total,), np.int32)
        found, end = [], 0
        for ids in lists:
            start, end = end, end + len(ids)
            if not len(ids) or ids.min() < 0:
                raise ValueError("block ids are one row of at least one id from 0 on")
            self._host_ids[start:end] = ids
            distinct = len(np.unique(ids)) == len(ids)
            found.append(BlockIds(self._ids[start:end], len(ids), int(ids.max()), distinct))
        self._device.write(self._ids[:total], self._host_ids[:total])
        return found


class BlockMove:
    """A move that is queued; see :class:`~baton.kv_transfer.moves.Move`."""

    def __init__(
        self, stream: BlockStream, slot: _Slot, event: Event, payload: U8 | None = None
    ) -> None:
        self._stream, self._slot, self._event = stream, slot, event
        self._payload = payload

    def wait(self) -> None:
        """Block the calling thread, which may be any, until the move is done."""
        self._event.wait()

    @property
    def digest(self) -> int:
        """Of the bytes moved; InternalError before the move is done."""
        self._check_done()
        return int(self._slot.host_digest[0])

    @property
    def payload(self) -> U8:
        """What was gathered, until :meth:`release`; InternalError before the move is done."""
        self._check_done()
        if self._payload is None:
            raise InternalError("only gathered blocks have a payload")
        return self._payload

    def release(self) -> None:
        """Give the slot to the next move; nobody reads the payload any more."""
        self._payload = None
        self._stream.give(self._slot)

    def _check_done(self) -> None:
        if not self._event.done:
            raise InternalError("a move's outcome is looked at before its event")


class BlockStream:
    """Moves between ``pool`` and the host or other pools; used by one thread.

    ``nbytes``: what most payloads have at most. Every method returns None while no slot is free and
    raises ValueError for what does not fit, before anything is launched.
    """

    def __init__(
        self, compute: Device, pool: DeviceArray, marks: LayerMarks, nbytes: int, slots: int = SLOTS
    ) -> None:
        self._device = compute.another_stream()
        self._device.wait_for(compute.record())  # the pool was cleared there
        self._pool, self._marks = pool, marks
        self._workspace = self._device.zeros((WORKSPACE_WORDS,), np.uint64)
        self._free = [_Slot(self._device, nbytes) for _ in range(slots)]

    def give(self, slot: _Slot) -> None:
        """Take back a slot."""
        self._free.append(slot)

    def gather(self, start: int, count: int, ids: I32) -> BlockMove | None:
        """Pack blocks of layers ``start..`` into pinned memory."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            layout = self._layout(count, len(ids))
            staging, payload = slot.payload(layout.nbytes)
            self._wait_for_layers(start + count)
            (table,) = slot.upload_ids(ids)
            gather_blocks(
                self._device, self._pool, table, layout, staging, slot.digest, self._workspace,
                layer_start=start,
            )  # fmt: skip
            self._device.read(staging, payload)
            return self._finish(slot, payload)

    def scatter(self, start: int, count: int, ids: I32, payload: U8) -> BlockMove | None:
        """Unpack a payload into blocks; it may change as soon as this returns."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            layout = self._layout(count, len(ids))
            if payload.nbytes != layout.nbytes:
                text = f"the payload has {payload.nbytes} bytes, the blocks {layout.nbytes}"
                raise ValueError(text)
            staging, pinned = slot.payload(layout.nbytes)
            pinned[:] = payload.reshape(-1)
            (table,) = slot.upload_ids(ids)
            self._device.write(staging, pinned)
            scatter_blocks(
                self._device, staging, layout, table, self._pool, slot.digest, self._workspace,
                layer_start=start,
            )  # fmt: skip
            return self._finish(slot)

    def copy(
        self, source: DeviceArray, start: int, count: int, source_ids: I32, ids: I32
    ) -> BlockMove | None:
        """Copy blocks out of another pool that this device reads."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            theirs, ours = slot.upload_ids(source_ids, ids)
            copy_blocks(
                self._device, source, theirs, self._pool, ours, slot.digest, self._workspace,
                layer_start=start, layer_count=count,
            )  # fmt: skip
            return self._finish(slot)

    def sum(self, start: int, count: int, ids: I32) -> BlockMove | None:
        """Take the digest that :meth:`gather` would, and no payload."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            self._wait_for_layers(start + count)
            (table,) = slot.upload_ids(ids)
            sum_blocks(
                self._device, self._pool, table, slot.digest, self._workspace,
                layer_start=start, layer_count=count,
            )  # fmt: skip
            return self._finish(slot)

    def _take(self) -> _Slot | None:
        return self._free.pop() if self._free else None

    def _wait_for_layers(self, layer_end: int) -> None:
        event = self._marks.behind(layer_end)
        if event is not None:
            self._device.wait_for(event)

    def _finish(self, slot: _Slot, payload: U8 | None = None) -> BlockMove:
        self._device.read(slot.digest, slot.host_digest)
        return BlockMove(self, slot, self._device.record(), payload)

    def _layout(self, layers: int, blocks: int) -> PayloadLayout:
        _, _, _, heads, block_size, head_dim = self._pool.shape
        return PayloadLayout(layers, blocks, heads, block_size, head_dim)


class _Returning:
    """Gives a slot back when what was to use it raises; nothing of it is under way then."""

    def __init__(self, stream: BlockStream, slot: _Slot) -> None:
        self._stream, self._slot = stream, slot

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stream.give(self._slot)
