"""Work of a backend that is captured as a graph, with its memory.

A graph keeps the addresses that it was captured with. So the arrays that the work allocates through
its backend are allocated in its first run, and the captured second run gets the same ones. The
parameters that it uploads get a place as well, whose content a replay may change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .device import CaptureFailed, Device, Graph


class CapturedWork:
    """The arrays of a captured function, and its graph once it is captured."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arrays: list[Any] = []
        self._uploads: list[Any] = []
        self._runs = self._taken = self._uploaded = 0
        self.graph: Graph | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (*self._arrays, *self._uploads))

    def begin_run(self) -> None:
        """Start with the first array again."""
        self._runs += 1
        self._taken = self._uploaded = 0

    def end_run(self) -> None:
        """Raise CaptureFailed if this run has used less memory than the first one."""
        if (self._taken, self._uploaded) != (len(self._arrays), len(self._uploads)):
            raise CaptureFailed("the captured run needs other memory than the first one")

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return the next array. Raises CaptureFailed unless the first run has made it."""
        if self._runs == 1:
            self._arrays.append(self._device.empty(shape, dtype))
        array = self._next(self._arrays, self._taken, shape, np.dtype(dtype))
        self._taken += 1
        return array

    def upload(self, values: npt.NDArray[Any]) -> Any:
        """Return the place of the next uploaded values; the first run uploads them."""
        if self._runs == 1:
            self._uploads.append(self._device.upload(values))
        array = self._next(self._uploads, self._uploaded, values.shape, values.dtype)
        self._uploaded += 1
        return array

    @staticmethod
    def _next(arrays: list[Any], at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if at >= len(arrays) or arrays[at].shape != shape or arrays[at].dtype != dtype:
            raise CaptureFailed("the captured run needs other memory than the first one")
        return arrays[at]

    def replay(self, uploads: list[npt.NDArray[Any]]) -> None:
        """Queue the work again with other uploaded values, in the order of the first run."""
        if self.graph is None or len(uploads) != len(self._uploads):
            raise ValueError(f"{len(uploads)} uploads of work that made {len(self._uploads)}")
        for place, values in zip(self._uploads, uploads, strict=True):
            self._device.write(place, values)
        self.graph.replay()
