"""Arrays of backends that compute in the host's own memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...proto.layout import KVLayout
from ...proto.messages import DeviceTicket
from .backend import F32, I32, U8, A, Mapping
from .memory import host_pool


class HostArrays:
    """The part of a backend that says where arrays live, for one that reads NumPy's."""

    kv_dtype = "float32"
    on_host = True

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> F32:
        """Float32 ``[rows, columns]`` of any content."""
        return np.empty((rows, columns), np.float32)

    def upload(self, array: npt.NDArray[A]) -> npt.NDArray[A]:
        """The array itself: kernels read the host's memory."""
        return array

    def parameters(self, weights: npt.NDArray[A]) -> npt.NDArray[A]:
        """The weights themselves."""
        return weights

    def kv_pool(self, shape: tuple[int, ...], allocate: Callable[[int], U8]) -> F32:
        """KV pool of zeros in the memory that ``allocate`` gives."""
        return host_pool(shape, allocate)

    def pool_ticket(self, pool: F32) -> DeviceTicket | None:
        """None: the memory is the host's."""
        return None

    def open_pool(self, ticket: DeviceTicket, layout: KVLayout) -> tuple[Mapping, F32]:
        """Raise ValueError: a kernel of the host does not reach a GPU's memory."""
        raise ValueError("this worker computes on the CPU")

    def block_stream(self, pool: F32, nbytes: int) -> None:
        """None: blocks of the host move at once."""

    def memory_bytes(self) -> int:
        """The machine's memory."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def plan_attention(self, row_offsets: I32, positions: I32) -> object:
        """None: attention reads its rows where they are."""
        return None

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        """``out[i] = x[rows[i]]``."""
        np.take(x, rows, axis=0, out=out)
