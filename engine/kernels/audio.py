"""The kernels of audio decoders, beside those of all models; their form for host memory.

Audio is channels-last, ``[T, C]``: row ``t`` holds all channels of one instant. A row's bits depend
only on the rows that its formula names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .backend import F32, I32, A, Backend, PackedLinear, Weights


class AudioBackend(Protocol):
    """The kernels of one device that decode audio, all in float32."""

    name: str
    numerics: str
    """Name of the arithmetic; equal names give equal bits."""
    row_independent: bool
    """True if a row's bits do not depend on the number of rows (False: NumPy with BLAS)."""
    on_host: bool
    """True if arrays are NumPy arrays."""
    column_multiple: int
    """The columns of arrays and weights must be a multiple of this; a weight may have one row."""

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> F32:
        """Return float32 ``[rows, columns]``, content undefined."""
        ...

    def upload(self, array: npt.NDArray[A]) -> npt.NDArray[A]:
        """Return a host array where kernels can read it: itself on a CPU, a copy elsewhere."""
        ...

    def download(self, x: F32) -> F32:
        """Return float32 values in host memory: the array itself on a CPU, a copy elsewhere."""
        ...

    def pack_linear(self, parts: Sequence[Weights], bias: F32 | None = None) -> PackedLinear:
        """Pack float32 weights ``[out_i, in]``, stacked on ``out``."""
        ...

    def linear(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        ...

    def look_up(
        self, ids: I32, table: F32, weight: PackedLinear, stride: int, out: F32, *, add: bool
    ) -> None:
        """``out[t] = table[ids[t // stride]] @ weight.T + bias``; ``add`` adds to ``out``.

        ``ids`` in host memory, ``table[V, D]``, ``out[len(ids) * stride, C]``. Raises ValueError
        for ids outside the table.
        """
        ...

    def convolve(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[t] = x[t : t + taps].ravel() @ weight.T + bias``, float32 weights.

        ``x[T + taps - 1, C]``, ``out[T, out]``; ``taps * C`` columns of weights, the first tap
        first.
        """
        ...

    def snake(self, x: F32, scales: F32, out: F32, first: int = 0) -> None:
        """``out[first + t] = x[t] + sin(scales[0] * x[t])^2 * scales[1]``, zeros in other rows.

        ``x[T, C]``, ``scales[2, C]``, ``out[at least first + T, C]``.
        """
        ...

    def add_snake(self, x: F32, residual: F32, scales: F32, out: F32, first: int = 0) -> None:
        """``residual += x`` in place, then :meth:`snake` of ``residual``."""
        ...

    def depthwise(
        self, x: F32, weight: F32, bias: F32, dilation: int, scales: F32 | None, out: F32
    ) -> None:
        """Convolve every column by itself, then apply :meth:`snake` if there are ``scales``.

        ``out[t] = bias + sum over j of x[t + (j - taps // 2) * dilation] * weight[j]``, with zeros
        outside ``x[T, C]``; ``weight[taps, C]``, taps odd.
        """
        ...

    def soft_clip(self, x: F32, out: F32) -> None:
        """``out = tanh(x)``, ``[N]``."""
        ...


class HostAudio:
    """The methods of :class:`AudioBackend` that are the same for all kernels in host memory."""

    def look_up(
        self: Backend,
        ids: I32,
        table: F32,
        weight: PackedLinear,
        stride: int,
        out: F32,
        *,
        add: bool,
    ) -> None:
        """``out[t] = table[ids[t // stride]] @ weight.T + bias``; ``add`` adds to ``out``."""
        if len(out) != len(ids) * stride:
            raise ValueError(f"out has {len(out)} rows, not {len(ids)} times {stride}")
        rows = np.empty((len(ids), table.shape[1]), out.dtype)
        vectors = np.empty((len(ids), out.shape[1]), out.dtype)
        self.embed(np.ascontiguousarray(ids, np.int32), table, rows)
        self.linear(rows, weight, vectors)
        repeated = np.repeat(vectors, stride, axis=0)
        if add:
            out += repeated
        else:
            out[:] = repeated


def with_margins(out: F32, rows: int, first: int) -> F32:
    """Return ``rows`` rows of ``out`` from ``first`` on, and fill the others with zeros.

    Raises ValueError, and writes nothing, if ``out`` has no such rows.
    """
    if not 0 <= first <= len(out) - rows:
        raise ValueError(f"{rows} rows from {first} on do not fit {len(out)} rows")
    out[:first] = 0
    out[first + rows :] = 0
    return out[first : first + rows]
