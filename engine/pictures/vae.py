"""The decoder of the VAE: latents become pixels. Arrays are ``[height, width, channels]``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..kernels.backend import F32, U8, PackedLinear
from ..kernels.host_backend import PictureBackend, pack_conv
from ..models.weights import Progress, WeightLoader
from ..models.workspace import Workspace
from .configs import ModelPart, VaeConfig, no_watch

_EPS = 1e-6


@dataclass(slots=True, frozen=True)
class _Conv:
    weight: PackedLinear
    kernel: int


@dataclass(slots=True, frozen=True)
class _Norm:
    weight: F32
    bias: F32


@dataclass(slots=True, frozen=True)
class _Resnet:
    first_norm: _Norm
    first: _Conv
    second_norm: _Norm
    second: _Conv
    shortcut: _Conv | None


@dataclass(slots=True, frozen=True)
class _Attention:
    norm: _Norm
    qkv: PackedLinear
    o: PackedLinear


@dataclass(slots=True, frozen=True)
class _Level:
    resnets: list[_Resnet]
    enlarge: _Conv | None


class VaeDecoder:
    """A loaded decoder. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        part: ModelPart,
        config: VaeConfig,
        backend: PictureBackend,
        on_progress: Progress | None = None,
    ) -> None:
        loader = WeightLoader(part, backend, on_progress)
        self.after_layer: Callable[[], None] = no_watch
        self.config, self._backend = config, backend
        self._loader, self._space = loader, Workspace(backend, exact=True)
        latent, widths = config.latent_channels, config.block_out_channels[::-1]
        self._post_quant = (
            self._conv("post_quant_conv", latent, latent, 1) if config.use_post_quant_conv else None
        )
        self._first = self._conv("decoder.conv_in", latent, widths[0], 3)
        middle = "decoder.mid_block"
        self._middle = [
            self._resnet(f"{middle}.resnets.{i}", widths[0], widths[0]) for i in range(2)
        ]
        self._attention = (
            self._load_attention(f"{middle}.attentions.0", widths[0])
            if config.mid_block_add_attention
            else None
        )
        self._levels = [self._level(i, widths) for i in range(len(widths))]
        self._norm_out = self._norm("decoder.conv_norm_out", widths[-1])
        self._out = self._conv("decoder.conv_out", widths[-1], config.out_channels, 3)
        loader.finish(unused=("encoder.", "quant_conv."))

    def release(self) -> None:
        """Free what a decoding that was ended has left."""
        self._space.clear()

    def decode(self, latents: F32) -> U8:
        """Return the pixels ``[scale * h, scale * w, 3]`` of latents ``[h, w, C]`` on the host.

        Latents are those of the sampler: they are divided by the scaling factor, then shifted.
        """
        return self._backend.to_pixels(self.image(latents))

    def image(self, latents: F32) -> F32:
        """Return the image ``[scale * h, scale * w, 3 or more]``, about -1 to 1, on the device."""
        config, backend = self.config, self._backend
        scaled = latents / np.float32(config.scaling_factor) + np.float32(config.shift_factor or 0)
        missing = -scaled.shape[2] % backend.column_multiple
        scaled = np.pad(scaled, ((0, 0), (0, 0), (0, missing))) if missing else scaled
        x = backend.activations(backend.upload(scaled.reshape(-1, scaled.shape[2])))
        x = x.reshape(scaled.shape)
        if self._post_quant is not None:
            x = self._convolve(self._post_quant, x)
        x = self._convolve(self._first, x)
        x = self._residual(self._middle[0], x)
        if self._attention is not None:
            x = self._attend(self._attention, x)
        x = self._residual(self._middle[1], x)
        for level in self._levels:
            for resnet in level.resnets:
                x = self._residual(resnet, x)
            if level.enlarge is not None:
                x = self._convolve(level.enlarge, x, scale=2)
        x = self._normalized(self._norm_out, x, x, silu=True)
        if not backend.on_host:
            return self._convolve(self._out, x, exact=True)
        return self._convolve_here(self._out, x).copy()  # without the memory of its wider inputs

    def _convolve(self, conv: _Conv, x: F32, *, scale: int = 1, exact: bool = False) -> F32:
        """Return a convolution; ``exact``: as float32 on every device."""
        height, width = x.shape[0] * scale, x.shape[1] * scale
        out = self._backend.empty(height * width, conv.weight.out_features, logits=exact)
        out = out.reshape(height, width, -1)
        self._backend.conv2d(x, conv.weight, conv.kernel, out, scale=scale)
        return out

    def _convolve_here(self, conv: _Conv, x: F32) -> F32:
        """Convolve with a kernel above 1 into the memory of ``x``, if the result fits there."""
        shape = (*x.shape[:2], conv.weight.out_features)
        if shape[2] > x.shape[2] or not self._backend.on_host:
            return self._convolve(conv, x)
        out = x.reshape(-1)[: math.prod(shape)].reshape(shape)
        self._backend.conv2d(x, conv.weight, conv.kernel, out)
        return out

    def _like(self, x: F32) -> F32:
        return self._backend.empty(x.shape[0] * x.shape[1], x.shape[2]).reshape(x.shape)

    def _add(self, x: F32, residual: F32) -> None:
        channels = x.shape[2]
        self._backend.add(x.reshape(-1, channels), residual.reshape(-1, channels))

    def _normalized(self, norm: _Norm, x: F32, out: F32, *, silu: bool) -> F32:
        rows, result = x.reshape(-1, x.shape[2]), out.reshape(-1, x.shape[2])
        groups = self.config.norm_num_groups
        self._backend.group_norm(rows, groups, norm.weight, norm.bias, _EPS, silu, result)
        return out

    def _residual(self, block: _Resnet, x: F32) -> F32:
        """Return the output of a block, whose arrays take the memory of ``x`` where they can.

        At full size a picture has hundreds of floats per pixel: an array less counts.
        """
        if block.shortcut is None:
            out, inner = x, self._like(x)
        else:
            out, inner = self._convolve(block.shortcut, x), x
        inner = self._normalized(block.first_norm, x, inner, silu=True)
        inner = self._convolve_here(block.first, inner)
        inner = self._normalized(block.second_norm, inner, inner, silu=True)
        self._add(self._convolve_here(block.second, inner), out)
        self.after_layer()
        return out

    def _attend(self, block: _Attention, x: F32) -> F32:
        channels = x.shape[2]
        normed = self._normalized(block.norm, x, self._like(x), silu=False)
        normed = normed.reshape(-1, channels)
        qkv = self._space.rows("qkv", len(normed), 3 * channels)
        self._backend.linear(normed, block.qkv, qkv)
        mixed = self._space.rows("mixed", len(normed), channels)
        self._backend.self_attention(qkv, 1, channels**-0.5, None, mixed)
        delta = self._backend.empty(len(normed), channels)
        self._backend.linear(mixed, block.o, delta)
        self._space.clear()
        self._add(delta.reshape(x.shape), x)
        return x

    def _level(self, index: int, widths: tuple[int, ...]) -> _Level:
        base, out = f"decoder.up_blocks.{index}", widths[index]
        before = widths[max(0, index - 1)]
        resnets = [
            self._resnet(f"{base}.resnets.{i}", before if i == 0 else out, out)
            for i in range(self.config.layers_per_block + 1)
        ]
        last = index == len(widths) - 1
        return _Level(
            resnets, None if last else self._conv(f"{base}.upsamplers.0.conv", out, out, 3)
        )

    def _resnet(self, base: str, inner: int, out: int) -> _Resnet:
        return _Resnet(
            first_norm=self._norm(f"{base}.norm1", inner),
            first=self._conv(f"{base}.conv1", inner, out, 3),
            second_norm=self._norm(f"{base}.norm2", out),
            second=self._conv(f"{base}.conv2", out, out, 3),
            shortcut=None if inner == out else self._conv(f"{base}.conv_shortcut", inner, out, 1),
        )

    def _load_attention(self, base: str, width: int) -> _Attention:
        qkv = [(f"{base}.to_{name}", width) for name in "qkv"]
        return _Attention(
            norm=self._norm(f"{base}.group_norm", width),
            qkv=self._loader.linear(qkv, width, bias=True),
            o=self._loader.linear([(f"{base}.to_out.0", width)], width, bias=True),
        )

    def _conv(self, name: str, inner: int, out: int, kernel: int) -> _Conv:
        weight = self._loader.take(f"{name}.weight", (out, inner, kernel, kernel))
        bias = self._loader.vector(f"{name}.bias", out)
        return _Conv(pack_conv(self._backend, weight, bias), kernel)

    def _norm(self, name: str, size: int) -> _Norm:
        loader = self._loader
        return _Norm(loader.norm(f"{name}.weight", size), loader.norm(f"{name}.bias", size))
