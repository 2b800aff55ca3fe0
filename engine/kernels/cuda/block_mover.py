"""Copies KV blocks between a device's pool and host memory or another pool of the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from ..digest import payload_digest
from .blocks import (
    WORKSPACE_WORDS,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    sum_blocks,
    upload_ids,
)
from .device import Device, DeviceArray
from .payload import PayloadLayout

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class BlockMover:
    """Copies blocks as bfloat16, as in the pool, and computes the payload's digest in passing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._digest = device.zeros((1,), np.uint64)
        self._workspace = device.zeros((WORKSPACE_WORDS,), np.uint64)

    def gather(self, pool: DeviceArray, start: int, count: int, ids: I32, out: U8) -> int:
        """Copy blocks ``ids`` of layers ``start..`` into ``out``; return the digest."""
        layout = _layout(pool, count, len(ids))
        if out.nbytes != layout.nbytes:
            raise ValueError(f"out has {out.nbytes} bytes, the blocks {layout.nbytes}")
        staging = self._packed(pool, start, layout, ids)
        out[:] = self._device.download(staging)
        return self._sum()

    def scatter(self, pool: DeviceArray, start: int, count: int, ids: I32, payload: U8) -> int:
        """Inverse of :meth:`gather`; return the digest of the written bytes."""
        layout = _layout(pool, count, len(ids))
        if payload.nbytes != layout.nbytes:
            raise ValueError(f"the payload has {payload.nbytes} bytes, the blocks {layout.nbytes}")
        staging = self._device.upload(payload.reshape(-1))
        self._unpack(staging, layout, pool, start, ids)
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
        copy_blocks(
            device,
            source,
            upload_ids(device, source_ids),
            target,
            upload_ids(device, target_ids),
            self._digest,
            self._workspace,
            layer_start=start,
            layer_count=count,
        )
        return self._sum()

    def sum(self, pool: DeviceArray, start: int, count: int, ids: I32) -> int:
        """Return the digest that :meth:`gather` would return."""
        sum_blocks(
            self._device,
            pool,
            upload_ids(self._device, ids),
            self._digest,
            self._workspace,
            layer_start=start,
            layer_count=count,
        )
        return self._sum()

    def digest(self, payload: U8) -> int:
        """Return the digest of bytes in host memory."""
        return _host_digest()(payload)

    def _packed(
        self, pool: DeviceArray, start: int, layout: PayloadLayout, ids: I32
    ) -> DeviceArray:
        device = self._device
        staging = device.empty((layout.nbytes,), np.uint8)
        gather_blocks(
            device,
            pool,
            upload_ids(device, ids),
            layout,
            staging,
            self._digest,
            self._workspace,
            layer_start=start,
        )
        return staging

    def _unpack(
        self,
        staging: DeviceArray,
        layout: PayloadLayout,
        pool: DeviceArray,
        start: int,
        ids: I32,
    ) -> None:
        device = self._device
        scatter_blocks(
            device,
            staging,
            layout,
            upload_ids(device, ids),
            pool,
            self._digest,
            self._workspace,
            layer_start=start,
        )

    def _sum(self) -> int:
        return int(self._device.download(self._digest)[0])


@cache
def _host_digest() -> Callable[[U8], int]:
    """Return the fastest digest function of this host: compiled if built, else NumPy."""
    try:
        from ..cpu import CpuBackend
    except ImportError:
        return payload_digest
    return CpuBackend(None).payload_digest


def _layout(pool: DeviceArray, layers: int, blocks: int) -> PayloadLayout:
    _, _, _, heads, block_size, head_dim = pool.shape
    return PayloadLayout(layers, blocks, heads, block_size, head_dim)
