"""The kernels of audio decoders on a GPU: ``audio.cu``, in float32, on a separate stream.

Semantics: :class:`~baton.engine.kernels.audio.AudioBackend`. Wrong types, shapes or orders raise
ValueError before the launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import I32, A, PackedLinear, Weights
from .checks import check_array, check_below, check_multiple
from .device import Argument, Array, Device, DeviceArray, Kernel

REVISION = 1
"""Increase it when a change of ``audio.cu`` changes a bit of any result."""
WORD = 4
"""Channels per load and store; the width of rows is a multiple of it."""

_THREADS = 256
_TILE = 64
_INT_MAX = 2**31 - 1


@dataclass(slots=True, frozen=True)
class AudioLinear:
    """Weights as float32 ``[in, out]`` and bias as float32 ``[out]``, on the device."""

    weight: Any
    bias: Any

    @property
    def in_features(self) -> int:
        """Columns of the input."""
        return int(self.weight.shape[0])

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return int(self.weight.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))


class CudaAudio:
    """The kernels of audio decoders; see :class:`~baton.engine.kernels.audio.AudioBackend`.

    ``device``: one whose stream has the steps of a model. The kernels here run on a new stream of
    lower priority, so their launches are part of no captured step and no step waits for them.
    Arrays are device arrays, annotated as CPU arrays. Not thread-safe.
    """

    name = "cuda"
    row_independent = True
    on_host = False
    column_multiple = WORD

    def __init__(self, device: Device) -> None:
        self.device = device.another_stream()
        self.numerics = f"{device.name}-audio{REVISION}-f32"
        self._entries: Any = None  # ids on the device
        self._samples: Array | None = None  # pinned memory

    # ------------------------------------------------------------------ arrays

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> Any:
        """Return float32 ``[rows, columns]``, content undefined."""
        return self.device.empty((rows, columns), np.float32)

    def upload(self, array: npt.NDArray[A]) -> Any:
        """Return a copy on the device, with the same type."""
        return self.device.upload(np.ascontiguousarray(array))

    def download(self, x: Any) -> Any:
        """Return a copy in host memory; the calling thread sleeps until the queued work is done."""
        check_array("x", x, np.float32, x.shape)
        count = math.prod(x.shape)
        if self._samples is None or len(self._samples) < count:
            self._samples = self.device.host_buffer((count,), np.float32)
        pinned = self._samples[:count].reshape(x.shape)
        self.device.read(x, pinned)
        self.device.record().wait()
        return np.array(pinned, subok=False)

    def pack_linear(self, parts: Sequence[Weights], bias: Any = None) -> AudioLinear:
        """Upload float32 weights ``[out_i, in]``, stacked on ``out``.

        Raises ValueError unless ``in`` is a multiple of 4 and ``out`` is one or 1.
        """
        weight = np.concatenate(parts)
        check_array("weight", weight, np.float32, (None, None))
        if bias is not None:
            check_array("bias", bias, np.float32, (len(weight),))
        check_multiple("the depth of weight", weight.shape[1], WORD)
        if len(weight) != 1:
            check_multiple("the width of weight", len(weight), WORD)
        uploaded = None if bias is None else self.upload(bias)
        return AudioLinear(self.upload(np.ascontiguousarray(weight.T)), uploaded)

    # ------------------------------------------------------------------ kernels

    def look_up(
        self, ids: I32, table: Any, weight: PackedLinear, stride: int, out: Any, *, add: bool
    ) -> None:
        """``out[t] = table[ids[t // stride]] @ weight.T + bias``; ``add`` adds to ``out``."""
        packed = _checked(weight)
        check_array("ids", ids, np.int32, (None,))
        check_array("table", table, np.float32, (None, packed.in_features))
        check_array("out", out, np.float32, (len(ids) * stride, packed.out_features))
        check_multiple("the width of out", packed.out_features, WORD)
        check_below("ids", ids, len(table))
        if not len(ids):
            return
        if self._entries is None or len(self._entries) < len(ids):
            self._entries = self.device.empty((len(ids),), np.int32)
        entries = self._entries[: len(ids)]
        self.device.write(entries, ids)
        width, dim = packed.out_features // WORD, packed.in_features
        args = (entries, table, packed.weight, packed.bias, out)
        self._each("look_up", _words(out), args, width, dim, stride, int(add))

    def linear(self, x: Any, weight: PackedLinear, out: Any) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        check_array("x", x, np.float32, (len(out), weight.in_features))
        self._product(x, weight, out)

    def convolve(self, x: Any, weight: PackedLinear, out: Any) -> None:
        """``out[t] = x[t : t + taps].ravel() @ weight.T + bias``."""
        check_array("x", x, np.float32, (None, None))
        taps, channels = x.shape[0] - out.shape[0] + 1, x.shape[1]
        if taps < 1 or taps * channels != weight.in_features:
            raise ValueError(f"x has shape {x.shape}, which does not fit {len(out)} rows of out")
        self._product(x, weight, out)

    def _product(self, x: DeviceArray, weight: PackedLinear, out: DeviceArray) -> None:
        """Multiply rows of ``weight.in_features`` values that begin at each row of ``x``."""
        packed = _checked(weight)
        check_array("out", out, np.float32, (None, packed.out_features))
        check_multiple("the width of x", x.shape[1], WORD)
        rows, width = out.shape
        if not rows:
            return
        depth, pitch = np.int32(packed.in_features // WORD), np.int32(x.shape[1] // WORD)
        arrays, count = (x, packed.weight, packed.bias, out), np.int32(rows)
        if width == 1:
            grid: tuple[int, ...] = (-(-rows // _THREADS),)
            args: tuple[Argument, ...] = (*arrays, count, depth, pitch)
            self.device.launch(_kernel("narrow_product"), grid, (_THREADS,), args)
            return
        grid = (-(-rows // _TILE), -(-width // _TILE))
        args = (*arrays, count, np.int32(width // WORD), depth, pitch)
        self.device.launch(_kernel("product"), grid, (_THREADS,), args)

    def snake(self, x: Any, scales: Any, out: Any, first: int = 0) -> None:
        """Write the snake of ``x`` into ``out`` from row ``first`` on, zeros around it."""
        self._snake(x, None, scales, out, first)

    def add_snake(self, x: Any, residual: Any, scales: Any, out: Any, first: int = 0) -> None:
        """``residual += x`` in place, then :meth:`snake` of ``residual``."""
        check_array("residual", residual, np.float32, x.shape)
        self._snake(x, residual, scales, out, first)

    def _snake(self, x: Any, residual: Any, scales: Any, out: Any, first: int) -> None:
        check_array("x", x, np.float32, (None, None))
        rows, width = x.shape
        check_array("scales", scales, np.float32, (2, width))
        check_array("out", out, np.float32, (None, width))
        check_multiple("the width of x", width, WORD)
        if not 0 <= first <= len(out) - rows:
            raise ValueError(f"{rows} rows from {first} on do not fit {len(out)} rows")
        args = (x, residual, scales, out)
        self._each("snake", _words(out), args, width // WORD, first, rows)

    def depthwise(
        self, x: Any, weight: Any, bias: Any, dilation: int, scales: Any, out: Any
    ) -> None:
        """Convolve every column by itself, then apply :meth:`snake` if there are ``scales``."""
        check_array("x", x, np.float32, (None, None))
        rows, width = x.shape
        check_array("weight", weight, np.float32, (None, width))
        check_array("bias", bias, np.float32, (width,))
        check_array("out", out, np.float32, x.shape)
        check_multiple("the width of x", width, WORD)
        taps = weight.shape[0]
        if scales is not None:
            check_array("scales", scales, np.float32, (2, width))
        if taps % 2 == 0 or not 0 < dilation <= _INT_MAX // taps:
            raise ValueError(f"{taps} taps are even, or dilation {dilation} is out of range")
        args = (x, weight, bias, scales, out)
        self._each("depthwise", _words(out), args, width // WORD, rows, taps, dilation)

    def soft_clip(self, x: Any, out: Any) -> None:
        """``out = tanh(x)``, ``[N]``."""
        check_array("x", x, np.float32, (None,))
        check_array("out", out, np.float32, x.shape)
        self._each("soft_clip", len(x), (x, out))

    def _each(self, name: str, count: int, args: tuple[Argument, ...], *numbers: int) -> None:
        """Launch ``count`` threads; their number goes after ``args``, before ``numbers``."""
        if count > _INT_MAX - _THREADS:
            raise ValueError(f"{count} words are more than a launch can count")
        if count:
            grid = (-(-count // _THREADS),)
            values = (*args, np.int32(count), *map(np.int32, numbers))
            self.device.launch(_kernel(name), grid, (_THREADS,), values)


def _kernel(name: str) -> Kernel:
    return Kernel("audio.cu", name)


def _words(array: DeviceArray) -> int:
    return math.prod(array.shape) // WORD


def _checked(weight: PackedLinear) -> AudioLinear:
    if not isinstance(weight, AudioLinear):
        raise TypeError(f"weight was packed by another backend: {type(weight).__name__}")
    return weight
