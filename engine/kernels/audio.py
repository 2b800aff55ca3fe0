"""The kernels of audio decoders, which host backends have beside the kernels of all devices.

Audio is decoded on the CPU also where the model runs on a GPU: one core decodes several times
faster than real time. Audio is channels-last, ``[T, C]``: row ``t`` holds all channels of one
instant. A row's bits depend only on the rows that its formula names.
"""

from __future__ import annotations

from typing import Protocol

from .backend import F32, Backend, PackedLinear


class AudioBackend(Backend, Protocol):
    """A backend that computes in host memory and decodes audio."""

    def convolve(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[t] = x[t : t + taps].ravel() @ weight.T + bias``, float32 weights.

        ``x[T + taps - 1, C]``, ``out[T, out]``; ``taps * C`` columns of weights, the first tap
        first.
        """
        ...

    def snake(self, x: F32, scales: F32, out: F32) -> None:
        """``out = x + sin(scales[0] * x)^2 * scales[1]`` per row ``[T, C]``; scales ``[2, C]``."""
        ...

    def add_snake(self, x: F32, residual: F32, scales: F32, out: F32) -> None:
        """``residual += x`` in place, then ``out = snake(residual)``."""
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
