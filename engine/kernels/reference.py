"""The kernels in NumPy: the reference for every compiled kernel, and the fallback without one.

Each method defines its kernel, written to be read beside
:class:`~baton.engine.kernels.backend.Backend`. ``NumpyBackend(np.float64)`` computes (and
expects its float arguments) in float64 and is the reference in tests; the default is float32.
Matrix products use BLAS, where a row's bits depend on the number of rows, so
``row_independent`` is False.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from baton.proto.layout import KV_TYPES

from .audio import HostAudio, with_margins
from .backend import (
    F32,
    I32,
    I64,
    U8,
    Activation,
    PackedLinear,
    QuantizedWeights,
    Weights,
    checked_parts,
)
from .digest import payload_digest
from .host_arrays import HostArrays
from .host_backend import AfterPart, HostPictures
from .kv_rows import appended, converted, kv_type, opened, row_dim, spread

Floats = npt.NDArray[Any]


def widen(weights: Weights, dtype: npt.DTypeLike = np.float32) -> Floats:
    """Return float weights as ``dtype``; uint16 arrays hold bfloat16 bits."""
    if weights.dtype == np.uint16:
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    if weights.dtype.kind != "f":
        raise ValueError(f"weights are {weights.dtype}, not float32 or bfloat16 bits (uint16)")
    return weights.astype(dtype, copy=False)


@dataclass(slots=True)
class NumpyLinear:
    """Weights transposed once to ``[in, out]``, so that a single row reads them in order."""

    weight: Floats
    bias: Floats | None

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
        """Bytes of memory."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


MOST_SCORES = 1 << 24
"""Scores of attention over whole rows that are held at once."""


class NumpyBackend(HostArrays, HostAudio, HostPictures):
    """Kernels on NumPy arrays; see :class:`~baton.engine.kernels.backend.Backend`."""

    name = "numpy"
    row_independent = False

    def __init__(self, dtype: npt.DTypeLike = np.float32) -> None:
        self._dtype = np.dtype(dtype)
        self.numerics = f"numpy-{np.__version__}-{self._dtype.name}"

    def pack_linear(
        self, parts: Sequence[Weights | QuantizedWeights], bias: F32 | None = None
    ) -> NumpyLinear:
        """Pack weights ``[out_i, in]`` (float32, or uint16 bfloat16 bits), stacked on ``out``."""
        arrays = checked_parts(parts)
        weight = np.concatenate([widen(p, self._dtype).T for p in arrays], axis=1)
        if bias is not None and bias.shape != (weight.shape[1],):
            raise ValueError(f"bias has shape {bias.shape}, not ({weight.shape[1]},)")
        return NumpyLinear(np.ascontiguousarray(weight), bias)

    def linear(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        if not isinstance(weight, NumpyLinear):
            raise TypeError(f"weight was packed by another backend: {type(weight).__name__}")
        _shape("x", x, (None, weight.in_features))
        _shape("out", out, (len(x), weight.out_features))
        np.matmul(x, weight.weight, out=out)
        if weight.bias is not None:
            out += weight.bias

    def embed(self, ids: I32, table: Weights | QuantizedWeights, out: F32) -> None:
        """``out[t] = table[ids[t]]``; the table is float32 or uint16 bfloat16 bits ``[V, H]``."""
        (table,) = checked_parts([table])
        _shape("out", out, (len(ids), table.shape[1]))
        _below("token ids", ids, len(table))
        out[:] = widen(table[ids], self._dtype)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight`` per row ``[T, H]``."""
        _shape("x", x, (None, len(weight)))
        _shape("out", out, x.shape)
        out[:] = _rms(x, weight, eps)

    def add_rms_norm(self, x: F32, residual: F32, weight: F32, eps: float, out: F32) -> None:
        """``residual += x`` in place, then ``out = rms_norm(residual)``."""
        _shape("x", x, (None, len(weight)))
        _shape("residual", residual, x.shape)
        _shape("out", out, x.shape)
        residual += x
        out[:] = _rms(residual, weight, eps)

    def qk_norm_rope_append(
        self,
        qkv: F32,
        positions: I32,
        slots: I64,
        cos_sin: F32,
        q_norm: F32 | None,
        k_norm: F32 | None,
        eps: float,
        kv_layer: F32,
        q_out: F32,
        rounding: str = "",
    ) -> None:
        """Normalise and rotate q and k; write q to ``q_out``, k and v into the paged cache."""
        blocks, _, kv_heads, block_size, _ = kv_layer.shape
        dim, kind = row_dim(kv_layer), kv_type(kv_layer)
        rounding = rounding or kind
        if KV_TYPES.index(rounding) < KV_TYPES.index(kind):
            raise ValueError(f"{kind} cannot hold {rounding}")
        _shape("q_out", q_out, (len(qkv), None, dim))
        heads = q_out.shape[1]
        _shape("qkv", qkv, (None, (heads + 2 * kv_heads) * dim))
        _below("positions", positions, len(cos_sin))
        _below("slots", slots, blocks * block_size)
        rows = qkv.reshape(len(qkv), heads + 2 * kv_heads, dim)
        q, k, v = np.split(rows, [heads, heads + kv_heads], axis=1)
        q = q if q_norm is None else _rms(q, q_norm, eps)
        k = k if k_norm is None else _rms(k, k_norm, eps)
        table = cos_sin[positions][:, None, :]
        q, k = _rotate(q, table), _rotate(k, table)
        if rounding == "int8":
            q, k = spread(q), spread(k)
        q_out[:] = q
        block, offset = np.divmod(slots, block_size)
        kv_layer[block, 0, :, offset] = appended(k, kind, rounding)
        kv_layer[block, 1, :, offset] = appended(v, kind, rounding)

    def attention(
        self,
        q: F32,
        kv_layer: F32,
        block_tables: I32,
        row_offsets: I32,
        positions: I32,
        scale: float,
        window: int,
        out: F32,
        plan: object = None,
        halves: bool = False,
    ) -> None:
        """Causal paged attention with grouped heads; see the protocol."""
        _shape("q", q, (None, None, row_dim(kv_layer)))
        _shape("out", out, (len(q), q.shape[1] * q.shape[2]))
        _shape("positions", positions, (len(q),))
        _shape("block_tables", block_tables, (len(row_offsets) - 1, None))
        _offsets(row_offsets, len(q))
        block_size = kv_layer.shape[3]
        for sequence, table in enumerate(block_tables):
            rows = slice(row_offsets[sequence], row_offsets[sequence + 1])
            if rows.start == rows.stop:
                continue
            where = positions[rows]
            _below("positions", where, len(table) * block_size)
            first = max(0, int(where.min()) - window + 1) // block_size if window else 0
            used = table[first : where.max() // block_size + 1]
            _below("block ids", used, len(kv_layer))
            keys_at = np.arange(first * block_size, (first + len(used)) * block_size)
            blocks = opened(kv_layer[used])
            out[rows] = _attend(q[rows], blocks, _mask(where, keys_at, window), scale)

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        """``out[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:]``."""
        width = out.shape[1]
        _shape("gate_up", gate_up, (len(out), 2 * width))
        gate, up = gate_up[:, :width], gate_up[:, width:]
        with np.errstate(over="ignore"):  # exp(-gate) = inf gives the correct limit, 0
            out[:] = gate / (1 + np.exp(-gate)) * up

    def gated_mlp(
        self,
        x: F32,
        gate_up: PackedLinear,
        down: PackedLinear,
        products: F32,
        active: F32,
        out: F32,
    ) -> None:
        """``out = (silu(x @ gate.T) * (x @ up.T)) @ down.T``."""
        self.linear(x, gate_up, products)
        self.silu_mul(products, active)
        self.linear(active, down, out)

    def layer_norm(self, x: F32, weight: F32, bias: F32, eps: float, out: F32) -> None:
        """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` per row ``[T, H]``."""
        _shape("x", x, (None, len(weight)))
        _shape("bias", bias, weight.shape)
        _shape("out", out, x.shape)
        out[:] = _standardized(x, eps) * weight + bias

    def add_layer_norm(
        self, x: F32, residual: F32, weight: F32, bias: F32, eps: float, out: F32
    ) -> None:
        """``residual += x`` in place, then ``out = layer_norm(residual)``."""
        _shape("residual", residual, x.shape)
        residual += x
        self.layer_norm(residual, weight, bias, eps, out)

    def convolve(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[t] = x[t : t + taps].ravel() @ weight.T + bias``."""
        taps, columns = len(x) - len(out) + 1, x.shape[1]
        if taps < 1 or not x.flags.c_contiguous:
            raise ValueError(f"x has {len(x)} rows, fewer than out, or is not contiguous")
        shape, strides = (len(out), taps * columns), (x.strides[0], x.itemsize)
        self.linear(np.lib.stride_tricks.as_strided(x, shape, strides), weight, out)

    def snake(self, x: F32, scales: F32, out: F32, first: int = 0) -> None:
        """``out[first + t] = x[t] + sin(scales[0] * x[t])^2 * scales[1]``, else zeros."""
        _shape("scales", scales, (2, x.shape[1]))
        _shape("out", out, (None, x.shape[1]))
        active = with_margins(out, len(x), first)
        active[:] = x + np.sin(scales[0] * x) ** 2 * scales[1]

    def add_snake(self, x: F32, residual: F32, scales: F32, out: F32, first: int = 0) -> None:
        """``residual += x`` in place, then ``snake(residual)``."""
        _shape("residual", residual, x.shape)
        _shape("scales", scales, (2, x.shape[1]))
        _shape("out", out, (None, x.shape[1]))
        residual += x
        self.snake(residual, scales, out, first)

    def depthwise(
        self, x: F32, weight: F32, bias: F32, dilation: int, scales: F32 | None, out: F32
    ) -> None:
        """Convolve every column by itself, then apply snake if there are ``scales``."""
        taps, rows = len(weight), len(x)
        if taps % 2 == 0 or dilation < 1:
            raise ValueError(f"{taps} taps are even, or dilation {dilation} is not positive")
        _shape("x", x, (None, weight.shape[1]))
        _shape("bias", bias, (weight.shape[1],))
        _shape("out", out, x.shape)
        if scales is not None:
            _shape("scales", scales, (2, x.shape[1]))
        out[:] = bias
        for tap in range(taps):
            shift = (tap - taps // 2) * dilation
            first, end = max(0, -shift), min(rows, rows - shift)
            if first < end:
                out[first:end] += x[first + shift : end + shift] * weight[tap]
        if scales is not None:
            self.snake(out, scales, out)

    def soft_clip(self, x: F32, out: F32) -> None:
        """``out = tanh(x)``, ``[N]``."""
        _shape("out", out, x.shape)
        np.tanh(x, out=out)

    def dense_attention(
        self,
        q: F32,
        kv: F32,
        bias: F32 | None,
        scale: float,
        out: F32,
        after_part: AfterPart | None = None,
    ) -> None:
        """``out[T, H * D] = softmax(scale * q[T, H, D] @ k.T + bias) @ v``; ``kv[2, H, S, D]``."""
        rows, heads, dim = q.shape
        _shape("kv", kv, (2, heads, None, dim))
        _shape("out", out, (rows, heads * dim))
        plane = rows, kv.shape[2]
        if bias is not None and bias.shape not in ((1, *plane), (heads, *plane)):
            raise ValueError(f"bias has shape {bias.shape}, scores {(heads, *plane)}")
        each = max(1, MOST_SCORES // (heads * kv.shape[2]))
        for start in range(0, rows, each):
            if start and after_part is not None:
                after_part()
            part = slice(start, start + each)
            out[part] = _dense(q[part], kv, None if bias is None else bias[:, part], scale)

    def activate(self, x: F32, kind: Activation, out: F32) -> None:
        """Apply an activation to every element; see the protocol."""
        _shape("out", out, x.shape)
        inner: Floats
        match kind:
            case "gelu":
                out[:] = x * _normal_cdf(x)
                return
            case "tanh":
                np.tanh(x, out=out)
                return
            case "silu":
                inner = x
            case "quick_gelu":
                inner = x * x.dtype.type(1.702)
            case "gelu_tanh":
                inner = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
            case _:
                raise ValueError(f"no activation {kind!r}")
        with np.errstate(over="ignore"):  # exp(-inner) = inf gives the correct limit, 0
            out[:] = x / (1 + np.exp(-inner))

    def add_scaled(self, x: F32, scale: F32, residual: F32) -> None:
        """``residual[T, H] += x[T, H] * scale[H]`` in place."""
        _shape("x", x, (None, len(scale)))
        _shape("residual", residual, x.shape)
        residual += x * scale

    def group_norm(
        self,
        x: F32,
        groups: int,
        weight: F32,
        bias: F32,
        eps: float,
        silu: bool,
        out: F32,
        after_part: AfterPart | None = None,
    ) -> None:
        """Normalise ``x[P, C]`` over all rows and the channels of each group."""
        rows, width = x.shape
        _shape("weight", weight, (width,))
        _shape("bias", bias, (width,))
        _shape("out", out, x.shape)
        if groups < 1 or width % groups:
            raise ValueError(f"{width} columns do not divide into {groups} groups")
        grouped = x.reshape(rows, groups, -1).transpose(1, 0, 2).reshape(groups, -1)
        normed = _standardized(grouped, eps).reshape(groups, rows, -1).transpose(1, 0, 2)
        if after_part is not None:
            after_part()
        out[:] = normed.reshape(x.shape) * weight + bias
        if silu:
            self.activate(out, "silu", out)

    def gather_blocks(
        self, pool: F32, layer_start: int, layer_count: int, block_ids: I32, out: U8
    ) -> int:
        """Copy blocks layer-major into contiguous ``out`` and return the XXH3-64 of the copy."""
        picked = _picked(pool, layer_start, layer_count, block_ids, out)
        view = out.view(pool.dtype).reshape(picked)
        for layer in range(layer_count):
            np.take(pool[layer_start + layer], block_ids, axis=0, out=view[layer])
        return self.checksum(out)

    def scatter_blocks(
        self, pool: F32, layer_start: int, layer_count: int, block_ids: I32, payload: U8
    ) -> int:
        """Inverse of :meth:`gather_blocks`; return the XXH3-64 of the written bytes."""
        picked = _picked(pool, layer_start, layer_count, block_ids, payload)
        values = np.frombuffer(payload, pool.dtype).reshape(picked)
        pool[layer_start : layer_start + layer_count, block_ids] = values
        return self.checksum(payload)

    def copy_blocks(
        self,
        source: F32,
        target: F32,
        layer_start: int,
        layer_count: int,
        source_ids: I32,
        target_ids: I32,
    ) -> int:
        """Copy blocks from pool to pool; see the protocol."""
        if source.dtype != target.dtype:
            raise ValueError("source and target have different types")
        _shape("target", target, (len(source), None, *source.shape[2:]))
        _shape("target_ids", target_ids, source_ids.shape)
        if np.may_share_memory(source, target):
            raise ValueError("source and target overlap")
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise ValueError("target is not a C-contiguous writable array")
        payload = _taken(source, layer_start, layer_count, source_ids)
        return self.scatter_blocks(target, layer_start, layer_count, target_ids, payload)

    def convert_blocks(
        self,
        source: F32,
        target: F32,
        layers: tuple[int, int, int],
        source_ids: I32,
        target_ids: I32,
        first: int,
    ) -> None:
        """Copy tokens between pools with other block sizes or types; see the protocol."""
        start, to, count = layers
        _exist(source, start, count, source_ids)
        _exist(target, to, count, target_ids)
        if source.shape[2:4] != target.shape[2:4] or row_dim(source) != row_dim(target):
            raise ValueError(f"pools of {source.shape} and {target.shape} differ in their rows")
        if np.may_share_memory(source, target) or not target.flags.writeable or first < 0:
            raise ValueError("the target cannot be written, or the first token is negative")
        part = target[to : to + count]
        converted(source[start : start + count], part, source_ids, target_ids, first)

    def sum_blocks(self, pool: F32, layer_start: int, layer_count: int, block_ids: I32) -> int:
        """Return the XXH3-64 that :meth:`gather_blocks` would return."""
        return self.checksum(_taken(pool, layer_start, layer_count, block_ids))

    def checksum(self, payload: U8) -> int:
        """Return the XXH3-64 of a payload."""
        return xxhash.xxh3_64_intdigest(payload.data)

    def payload_digest(self, payload: U8) -> int:
        """Return the digest of a payload packed or unpacked by a GPU; see :mod:`.digest`."""
        return payload_digest(payload)


def _rms(x: Floats, weight: Floats, eps: float) -> Floats:
    """Apply RMSNorm to the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + x.dtype.type(eps)) * weight
    return normed


def _standardized(x: Floats, eps: float) -> Floats:
    """Scale the last axis to mean 0 and variance 1."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    scaled: Floats = centred / np.sqrt(variance + x.dtype.type(eps))
    return scaled


def _normal_cdf(x: Floats) -> Floats:
    """Return the normal distribution function of ``x``, by math.erfc because NumPy has no erf."""
    wide = x.astype(np.float64) / math.sqrt(2)
    upper = np.fromiter(map(math.erfc, -wide.ravel()), np.float64, wide.size)
    return (upper.reshape(x.shape) / 2).astype(x.dtype)


def _rotate(x: Floats, cos_sin: Floats) -> Floats:
    """Rotate-half RoPE on the last axis; ``cos_sin`` broadcasts over heads."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _mask(positions: I32, keys_at: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.bool_]:
    """Return the keys that each row sees, ``[rows, keys]``."""
    behind = positions[:, None] - keys_at[None, :]
    seen = behind >= 0
    return seen & (behind < window) if window else seen


def _dense(q: Floats, kv: Floats, bias: Floats | None, scale: float) -> Floats:
    """Return the attention ``[rows, heads * dim]`` of all rows to all keys."""
    keys, values = kv
    scores = q.transpose(1, 0, 2) @ keys.transpose(0, 2, 1) * q.dtype.type(scale)
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Floats = scores @ values / scores.sum(axis=-1, keepdims=True)
    return mixed.transpose(1, 0, 2).reshape(len(q), -1)


def _attend(q: Floats, blocks: Floats, seen: npt.NDArray[np.bool_], scale: float) -> Floats:
    """Softmax attention of ``q[R, Hq, D]`` over ``blocks[n, 2, Hk, BS, D]``, ``[R, Hq * D]``."""
    rows, heads, dim = q.shape
    kv_heads = blocks.shape[2]
    group = heads // kv_heads
    out = np.empty_like(q)
    # A slot that no row sees may contain NaN, and 0 * NaN must not get into a sum.
    used = np.any(seen, axis=0, keepdims=True).T
    for head in range(kv_heads):
        keys = np.where(used, blocks[:, 0, head].reshape(-1, dim), 0)
        values = np.where(used, blocks[:, 1, head].reshape(-1, dim), 0)
        mine = slice(head * group, (head + 1) * group)
        scores = q[:, mine] @ keys.T * q.dtype.type(scale)
        scores = np.where(seen[:, None, :], scores, -np.inf)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out[:, mine] = scores @ values / scores.sum(axis=-1, keepdims=True)
    return out.reshape(rows, heads * dim)


def _shape(name: str, array: Floats, expected: tuple[int | None, ...]) -> None:
    """Raise ValueError unless the shape matches; None matches any length."""
    same = len(array.shape) == len(expected) and all(
        want is None or want == have for want, have in zip(expected, array.shape, strict=True)
    )
    if not same:
        raise ValueError(f"{name} has shape {array.shape}, not {expected}")


def _below(name: str, values: npt.NDArray[Any], limit: int) -> None:
    """Raise ValueError unless all values are in ``[0, limit)``."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise ValueError(f"{name} outside 0..{limit - 1}: {values.min()} .. {values.max()}")


def _offsets(row_offsets: I32, rows: int) -> None:
    """Raise ValueError unless the offsets ascend from 0 to ``rows``."""
    ends = len(row_offsets) and row_offsets[0] == 0 and row_offsets[-1] == rows
    if not ends or (np.diff(row_offsets) < 0).any():
        raise ValueError(f"row_offsets do not ascend from 0 to {rows}")


def _exist(pool: F32, layer_start: int, layer_count: int, block_ids: I32) -> None:
    """Raise ValueError unless the pool has these layers and blocks."""
    if not (layer_start >= 0 and 0 <= layer_count <= len(pool) - layer_start):
        raise ValueError(f"layers {layer_start}+{layer_count} outside 0..{len(pool)}")
    _below("block ids", block_ids, pool.shape[1])


def _taken(pool: F32, layer_start: int, layer_count: int, block_ids: I32) -> U8:
    """Return the bytes of blocks, layer-major."""
    if not pool.flags.c_contiguous:
        raise ValueError("pool is not a C-contiguous array")
    _exist(pool, layer_start, layer_count, block_ids)
    taken = np.take(pool[layer_start : layer_start + layer_count], block_ids, axis=1)
    return taken.reshape(-1).view(np.uint8)


def _picked(
    pool: F32, layer_start: int, layer_count: int, block_ids: I32, payload: U8
) -> tuple[int, ...]:
    """Check the blocks against the pool and the payload; return the shape of the blocks."""
    _exist(pool, layer_start, layer_count, block_ids)
    picked = (layer_count, len(block_ids), *pool.shape[2:])
    if payload.nbytes != int(np.prod(picked)) * pool.itemsize or not payload.flags.c_contiguous:
        raise ValueError(f"payload of {payload.nbytes} bytes does not hold blocks {picked}")
    return picked
