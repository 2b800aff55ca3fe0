"""Array management for backends that compute in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.proto.layout import KV_TYPES, KVLayout
from baton.proto.wire.tickets import DeviceTicket

from .backend import F32, I32, U8, A, Backend, Gpu, Mapping
from .memory import host_pool


class HostArrays:
    """The array methods of a backend whose kernels read NumPy arrays."""

    kv_types: tuple[str, ...] = KV_TYPES
    kv_dtype = "float32"
    kv_rounding = "float32"
    on_host = True
    head_sizes: tuple[int, ...] = ()
    column_multiple = 1
    quantized_kinds: frozenset[str] = frozenset()
    wide_weights = False
    computes: Backend | None = None
    """The device that computes, if these kernels only move blocks, as of pictures on a GPU."""
    gpu: Gpu | None = None
    """The GPU of that device."""
    shared_bytes = 0
    """Bytes of weights that other processes may map too."""
    threads = 1
    """Threads that share the work of a call."""

    @property
    def lost(self) -> str:
        """Error of the device that computes; "" on the host."""
        return "" if self.computes is None else self.computes.lost

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> F32:
        """Return float32 ``[rows, columns]``, content undefined."""
        return np.empty((rows, columns), np.float32)

    def upload(self, array: npt.NDArray[A]) -> npt.NDArray[A]:
        """Return the array itself, because kernels read host memory."""
        return array

    def download(self, x: F32) -> F32:
        """Return the array itself."""
        return x

    def parameters(self, weights: npt.NDArray[A]) -> npt.NDArray[A]:
        """Return the weights unchanged."""
        return weights

    def end_loading(self) -> None:
        """Do nothing: loading leaves no memory behind."""

    def kv_pool(
        self, shape: tuple[int, ...], allocate: Callable[[int], U8], dtype: str = ""
    ) -> F32:
        """Allocate a zeroed KV pool with ``allocate``."""
        return host_pool(shape, allocate, dtype or "float32")

    def pool_ticket(self, pool: F32) -> DeviceTicket | None:
        """Return None: the pool is in host memory."""
        return None

    def open_pool(self, ticket: DeviceTicket, layout: KVLayout) -> tuple[Mapping, F32]:
        """Raise ValueError: host kernels cannot read a GPU's memory."""
        raise ValueError("this worker computes on the CPU")

    def block_stream(self, pool: F32, nbytes: int) -> None:
        """Return None: block moves in host memory are synchronous."""

    def free_bytes(self) -> int:
        """Return the bytes of the machine's memory that no process uses."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def memory_bytes(self) -> int:
        """Return the machine's memory in bytes."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def plan_attention(self, row_offsets: I32, positions: I32) -> object:
        """Return None: attention on the host needs no plan."""
        return None

    def synchronize(self) -> None:
        """Return at once: kernels on the host have finished when they return."""

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        """``out[i] = x[rows[i]]``."""
        np.take(x, rows, axis=0, out=out)

    def put_rows(self, x: F32, rows: I32, out: F32, *, add: bool = False) -> None:
        """``out[rows[i]] = x[i]``, or ``+= x[i]`` with ``add``."""
        if x.shape != (len(rows), *out.shape[1:]):
            raise ValueError(f"x has shape {x.shape}, not {(len(rows), *out.shape[1:])}")
        if rows.size and not 0 <= rows.min() <= rows.max() < len(out):
            raise ValueError(f"rows {rows.min()} .. {rows.max()} outside 0..{len(out) - 1}")
        if add:
            out[rows] += x
        else:
            out[rows] = x
