"""Scratch arrays of the forward pass, reused between calls."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


class Allocator(Protocol):
    """Allocates activations; every backend is one."""

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> F32:
        """Return activations ``[rows, columns]``, content undefined; float32 for ``logits``."""
        ...


class Workspace:
    """Named device arrays; they grow to the next power of two of rows.

    ``exact``: they grow to the rows asked for, for a caller with a limit of memory.
    """

    def __init__(self, backend: Allocator, *, exact: bool = False) -> None:
        self._backend, self._exact = backend, exact
        self._arrays: dict[str, F32] = {}

    def rows(self, name: str, rows: int, columns: int, *, logits: bool = False) -> F32:
        """Return the first ``rows`` of the array ``name``, contiguous ``[rows, columns]``.

        The content is undefined: calls with the same name share memory.
        ``logits``: float32, whatever the backend computes in.
        """
        array = self._arrays.get(name)
        if array is None or len(array) < rows or array.shape[1] != columns:
            capacity = max(1, rows) if self._exact else 1 << max(0, rows - 1).bit_length()
            array = self._arrays[name] = self._backend.empty(capacity, columns, logits=logits)
        return array[:rows]

    def clear(self) -> None:
        """Free all arrays; the next calls allocate new ones."""
        self._arrays.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held by all arrays."""
        return sum(array.nbytes for array in self._arrays.values())
