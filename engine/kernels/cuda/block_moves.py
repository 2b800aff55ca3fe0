"""Moves of KV blocks between a device's pool and host memory or another pool.

:class:`BlockMover` returns after the move. :class:`BlockStream` queues moves on a separate stream,
through pinned memory.

A queued move takes a slot of a bounded ring: pinned host memory and device memory of the same
size. Its queued operations (ids to the device, the kernel, bytes down or up) end with an event. The
slot belongs to the move until :meth:`BlockMove.release`. One thread queues moves, and they run in
order, while the compute stream continues.

Invariants: a block is read only after the event in :class:`LayerMarks` that follows the kernels
that wrote it; payload and digest are read only after the move's event. The caller must
ensure that no block is freed or computed on while a move writes to it: see
``docs/decisions/0015-a-cuda-stream-for-kv-transfers.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InternalError

from ..digest import payload_digest
from .blocks import (
    WORKSPACE_WORDS,
    BlockIds,
    Layers,
    copy_blocks,
    gather_blocks,
    payload_bytes,
    scatter_blocks,
    sum_blocks,
    upload_ids,
)
from .device import Device, DeviceArray, Event

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

SLOTS = 8
"""Maximum moves under way, including finished moves whose payload is still being read."""
_IDS = 1024


class BlockMover:
    """Copies blocks as they are in the pool, and computes the payload's digest in passing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # The digest, and a workspace.
        self._words = (device.zeros((1,), np.uint64), device.zeros((WORKSPACE_WORDS,), np.uint64))

    def gather(self, pool: DeviceArray, start: int, count: int, ids: I32, out: U8) -> int:
        """Copy blocks ``ids`` of layers ``start..`` into ``out``; return the digest."""
        nbytes = payload_bytes(pool, count, len(ids))
        if out.nbytes != nbytes:
            raise ValueError(f"out has {out.nbytes} bytes, the blocks {nbytes}")
        device = self._device
        staging, table = device.empty((nbytes,), np.uint8), upload_ids(device, ids)
        gather_blocks(device, pool, table, Layers(start, count), staging, *self._words)
        out[:] = device.download(staging)
        return self._sum()

    def scatter(self, pool: DeviceArray, start: int, count: int, ids: I32, payload: U8) -> int:
        """Inverse of :meth:`gather`; return the digest of the written bytes."""
        nbytes = payload_bytes(pool, count, len(ids))
        if payload.nbytes != nbytes:
            raise ValueError(f"the payload has {payload.nbytes} bytes, the blocks {nbytes}")
        device = self._device
        staging, table = device.upload(payload.reshape(-1)), upload_ids(device, ids)
        scatter_blocks(device, staging, Layers(start, count), table, pool, *self._words)
        return self._sum()

    def copy(
        self,
        source: DeviceArray,
        target: DeviceArray,
        start: int,
        count: int,
        source_ids: I32,
        target_ids: I32,
    ) -> int:
        """Copy blocks from one pool of the device to another; return the digest."""
        device = self._device
        theirs, ours = upload_ids(device, source_ids), upload_ids(device, target_ids)
        copy_blocks(device, source, theirs, target, ours, Layers(start, count), *self._words)
        return self._sum()

    def sum(self, pool: DeviceArray, start: int, count: int, ids: I32) -> int:
        """Return the digest that :meth:`gather` would return."""
        table = upload_ids(self._device, ids)
        sum_blocks(self._device, pool, table, Layers(start, count), *self._words)
        return self._sum()

    def digest(self, payload: U8) -> int:
        """Return the digest of bytes in host memory."""
        return _host_digest()(payload)

    def _sum(self) -> int:
        return int(self._device.download(self._words[0])[0])


class LayerMarks:
    """Events in the compute stream after which the newest step has written each layer.

    The compute thread sets the marks and another thread reads them. The mark of a later step comes
    after that of an earlier step, so waiting for the newest is safe for earlier steps too.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: dict[int, Event] = {}

    def set(self, layer_end: int) -> None:
        """Record an event after all queued kernels that write layers below ``layer_end``."""
        self._events[layer_end] = self._device.record()

    def behind(self, layer_end: int) -> Event | None:
        """Return the event after which layers below ``layer_end`` are final; None: already."""
        return self._events.get(layer_end)


class _Slot:
    """Host and device buffers of one move; they grow on demand."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.digest: Any = device.zeros((1,), np.uint64)
        self.host_digest: Any = device.host_buffer((1,), np.uint64)
        self._payload: Any = device.empty((nbytes,), np.uint8)
        self._host_payload = device.host_buffer((nbytes,), np.uint8)
        self._ids: Any = device.empty((_IDS,), np.int32)
        self._host_ids = device.host_buffer((_IDS,), np.int32)

    def payload(self, nbytes: int) -> tuple[DeviceArray, U8]:
        """Return ``nbytes`` on the device and as many pinned bytes, content undefined."""
        if nbytes > len(self._host_payload):
            self._payload = self._device.empty((nbytes,), np.uint8)
            self._host_payload = self._device.host_buffer((nbytes,), np.uint8)
        return self._payload[:nbytes], self._host_payload[:nbytes]

    def upload_ids(self, *lists: I32) -> list[BlockIds]:
        """Queue one copy of lists of block ids. Raises ValueError for invalid ids."""
        total = sum(len(ids) for ids in lists)
        if total > len(self._host_ids):
            self._ids = self._device.empty((total,), np.int32)
            self._host_ids = self._device.host_buffer((total,), np.int32)
        found, end = [], 0
        for ids in lists:
            start, end = end, end + len(ids)
            if not len(ids) or ids.min() < 0:
                raise ValueError("block ids must be one row of at least one id from 0 on")
            self._host_ids[start:end] = ids
            distinct = len(np.unique(ids)) == len(ids)
            found.append(BlockIds(self._ids[start:end], len(ids), int(ids.max()), distinct))
        self._device.write(self._ids[:total], self._host_ids[:total])
        return found


class BlockMove:
    """A queued move; see :class:`~baton.proto.block_moves.BlockMove`."""

    def __init__(
        self, stream: BlockStream, slot: _Slot, event: Event, payload: U8 | None = None
    ) -> None:
        self._stream, self._slot, self._event = stream, slot, event
        self._payload = payload

    def wait(self) -> None:
        """Block the calling thread until the move is done. May be called from any thread."""
        self._event.wait()

    @property
    def digest(self) -> int:
        """Digest of the moved bytes. Raises InternalError before the move is done."""
        self._check_done()
        return int(self._slot.host_digest[0])

    @property
    def payload(self) -> U8:
        """Gathered bytes, until :meth:`release`. Raises InternalError before the move is done."""
        self._check_done()
        if self._payload is None:
            raise InternalError("only gathered blocks have a payload")
        return self._payload

    def release(self) -> None:
        """Return the slot to the ring. The payload must not be read any more."""
        self._payload = None
        self._stream.release(self._slot)

    def _check_done(self) -> None:
        if not self._event.done:
            raise InternalError("the result of a move was read before its event")


class BlockStream:
    """Moves between ``pool`` and the host or other pools; used by one thread.

    ``nbytes``: usual maximum size of a payload. Every method returns None if no slot is free, and
    raises ValueError for wrong arguments before anything is launched.
    """

    def __init__(
        self, compute: Device, pool: DeviceArray, marks: LayerMarks, nbytes: int, slots: int = SLOTS
    ) -> None:
        # Layers that are final must not wait for the end of a product that fills the GPU.
        self._device = compute.another_stream(urgent=True)
        self._device.wait_for(compute.record())  # the compute stream cleared the pool
        self._pool, self._marks = pool, marks
        self._workspace = self._device.zeros((WORKSPACE_WORDS,), np.uint64)
        self._free = [_Slot(self._device, nbytes) for _ in range(slots)]
        # Without working kernels for blocks, a worker must not get ready.
        proof = self.sum(0, 1, np.zeros(1, np.int32))
        if proof is not None:
            proof.wait()
            proof.release()

    def release(self, slot: _Slot) -> None:
        """Return a slot to the ring."""
        self._free.append(slot)

    def gather(self, start: int, count: int, ids: I32) -> BlockMove | None:
        """Pack blocks of layers ``start..`` into pinned memory."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            staging, payload = slot.payload(payload_bytes(self._pool, count, len(ids)))
            self._wait_for_layers(start + count)
            (table,) = slot.upload_ids(ids)
            gather_blocks(
                self._device, self._pool, table, Layers(start, count), staging, slot.digest,
                self._workspace,
            )  # fmt: skip
            self._device.read(staging, payload)
            return self._finish(slot, payload)

    def scatter(self, start: int, count: int, ids: I32, payload: U8) -> BlockMove | None:
        """Unpack a payload into blocks. The caller may change ``payload`` after this returns."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            nbytes = payload_bytes(self._pool, count, len(ids))
            if payload.nbytes != nbytes:
                raise ValueError(f"the payload has {payload.nbytes} bytes, the blocks {nbytes}")
            staging, pinned = slot.payload(nbytes)
            pinned[:] = payload.reshape(-1)
            (table,) = slot.upload_ids(ids)
            self._device.write(staging, pinned)
            scatter_blocks(
                self._device, staging, Layers(start, count), table, self._pool, slot.digest,
                self._workspace,
            )  # fmt: skip
            return self._finish(slot)

    def copy(
        self, source: DeviceArray, start: int, count: int, source_ids: I32, ids: I32
    ) -> BlockMove | None:
        """Copy blocks from another pool that this device can read."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            theirs, ours = slot.upload_ids(source_ids, ids)
            copy_blocks(
                self._device, source, theirs, self._pool, ours, Layers(start, count), slot.digest,
                self._workspace,
            )  # fmt: skip
            return self._finish(slot)

    def sum(self, start: int, count: int, ids: I32) -> BlockMove | None:
        """Compute the digest that :meth:`gather` would return, without a payload."""
        slot = self._take()
        if slot is None:
            return None
        with _Returning(self, slot):
            self._wait_for_layers(start + count)
            (table,) = slot.upload_ids(ids)
            sum_blocks(
                self._device, self._pool, table, Layers(start, count), slot.digest, self._workspace
            )
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


class _Returning:
    """Returns a slot to the ring if queueing raises; nothing uses the slot then."""

    def __init__(self, stream: BlockStream, slot: _Slot) -> None:
        self._stream, self._slot = stream, slot

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stream.release(self._slot)


@cache
def _host_digest() -> Callable[[U8], int]:
    """Return the fastest digest function of this host: compiled if built, else NumPy."""
    try:
        from ..cpu import CpuBackend
    except ImportError:
        return payload_digest
    return CpuBackend(None).payload_digest
