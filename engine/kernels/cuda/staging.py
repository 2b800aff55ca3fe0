"""Copies of weights to the device through pinned memory, filled by threads ahead of the copies.

A copy from a file's pages straight to a device goes through a small buffer of the driver, one
thread fills it, and the caller waits. Here several threads copy pieces from the page cache into
pinned slots while the device reads the slots before them, and round float32 values to bfloat16 on
the way. A slot is filled again when the device has read it; nothing else waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bfloat16 import round_into
from .device import Device, DeviceArray, Event

PIECE, SLOTS, THREADS = 8 << 20, 8, 4
"""Bytes of a slot, slots, and threads that fill them."""

Words = npt.NDArray[np.uint16]
Source = Words | npt.NDArray[np.float32]


class Staging:
    """Uploads arrays to one device, piece by piece. One thread at a time calls it.

    ``piece``: bytes of a slot. Pinned memory is allocated by the first upload and freed by
    :meth:`close`.
    """

    def __init__(
        self, device: Device, piece: int = PIECE, slots: int = SLOTS, threads: int = THREADS
    ) -> None:
        if piece < 2 or slots < 1 or threads < 1:
            raise ValueError(f"{slots} slots of {piece} bytes and {threads} threads: at least 1")
        self._device, self._count, self._threads = device, slots, threads
        self._words = piece // 2
        self._slots: list[Any] = []
        self._read: list[Event | None] = []  # when the device has read each slot

    def upload(self, parts: Sequence[Source]) -> DeviceArray:
        """Return the parts ``[out_i, in]`` one below the other on the device; all C-contiguous.

        uint16 words stay as they are, float32 values become bfloat16 bits. The parts are read when
        this returns; the device may still be reading the slots.
        """
        rows, width = sum(map(len, parts)), parts[0].shape[1]
        if any(part.shape[1:] != (width,) or not part.flags.c_contiguous for part in parts):
            raise ValueError("parts have equal widths and are contiguous")
        target: Any = self._device.empty((rows, width), np.uint16)
        flat = target.reshape(-1)
        filled: list[tuple[int, int, int, Future[None]]] = []
        with ThreadPoolExecutor(self._threads, thread_name_prefix="baton-staging") as threads:
            for turn, (at, source) in enumerate(self._pieces(parts)):
                slot = turn % self._count
                if len(filled) == self._count:
                    self._send(flat, filled.pop(0))
                if slot == len(self._slots):
                    self._slots.append(self._device.host_buffer((self._words,), np.uint16))
                    self._read.append(None)
                filled.append((slot, at, len(source), threads.submit(self._fill, slot, source)))
            for each in filled:
                self._send(flat, each)
        array: DeviceArray = target
        return array

    def close(self) -> None:
        """Free the pinned memory after the device has read it; a later upload allocates it anew."""
        for event in self._read:
            if event is not None:
                event.wait()
        self._slots, self._read = [], []

    def _pieces(self, parts: Sequence[Source]) -> Iterator[tuple[int, Source]]:
        """Yield the pieces and where they begin."""
        begin = 0
        for part in parts:
            flat = part.reshape(-1)
            for at in range(0, len(flat), self._words):
                yield begin + at, flat[at : at + self._words]
            begin += len(flat)

    def _fill(self, slot: int, source: Source) -> None:
        """Copy or round a piece into a slot, when the device has read what is there."""
        event = self._read[slot]
        if event is not None:
            event.wait()
        words = self._slots[slot][: len(source)]
        if source.dtype == np.uint16:
            np.copyto(words, source)  # without Python's lock
        else:
            round_into(words, source.view(np.float32))

    def _send(self, flat: Any, filled: tuple[int, int, int, Future[None]]) -> None:
        """Queue the copy of a slot to the device."""
        slot, at, count, ready = filled
        ready.result()
        self._device.write(flat[at : at + count], self._slots[slot][:count])
        self._read[slot] = self._device.record()
