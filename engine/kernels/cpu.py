"""The compiled CPU kernels; a call uses one core or several.

Invariant: a row's bits depend on its own inputs alone, not on the number of threads. ``numerics``
names the instruction set; together with the revision of the C code this determines every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

import numpy as np
import xxhash

from baton.proto.layout import KV_TYPES

from ..kernels import _cpu
from .audio import HostAudio, with_margins
from .backend import (
    ACTIVATIONS,
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
from .digest import payload_digest as numpy_digest
from .host_arrays import HostArrays
from .host_backend import AfterPart, HostPictures
from .memory import Arena
from .shared_weights import SharedArena, opened

REVISIONS = {"amx": 4, "avx512bf16": 2, "avx512": 1, "avx2": 1, "plain": 1}
"""Increase an instruction set's number when a change of the C code changes a bit of its results."""

_start_threads = _cpu.start_threads
_THREADS_SHIFT = 8
"""The extension takes an instruction set's index, and in higher bits the number of helpers."""


@dataclass(slots=True)
class CpuLinear:
    """Weights as panels ``[ceil(out / panel), in, panel]`` of float32 or bfloat16.

    With tiles (``amx``), bfloat16 panels are padded to 32 terms with pairs of terms innermost:
    ``[.., ceil(in / 32), 16, 16, 2]``; with ``avx512bf16`` to pairs: ``[.., ceil(in / 2), 16, 2]``.

    ``bias`` is padded to whole panels; ``isa`` is the instruction set that packed them.
    """

    in_features: int
    out_features: int
    bf16: bool
    panels: U8
    bias: F32 | None
    isa: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


QUANTIZED = {name: (index, *sizes) for index, (name, *sizes) in enumerate(_cpu.quantized_kinds())}
"""Kinds of quantized weights: index, weights and bytes of a block, of a step of a panel."""
QUANTIZED_PANEL = 16
"""Outputs of a panel of quantized weights."""


@dataclass(slots=True)
class QuantizedPart:
    """Outputs of one kind, as panels ``[ceil(out / 16), steps, bytes of a step]``."""

    kind: int
    out_features: int
    panels: U8
    bias: F32 | None


@dataclass(slots=True)
class CpuQuantized:
    """Weights in the integers of a GGUF file; parts stacked on ``out`` may be of other kinds."""

    in_features: int
    out_features: int
    parts: list[QuantizedPart]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(p.panels.nbytes + (0 if p.bias is None else p.bias.nbytes) for p in self.parts)


class CpuBackend(HostArrays, HostAudio, HostPictures):
    """Kernels in C; see :class:`~baton.engine.kernels.backend.Backend`.

    ``isa`` selects an instruction set by name (``amx``, ``avx512bf16``, ``avx512``, ``avx2``,
    ``plain``); None selects the fastest one of this machine. ``amx`` uses matrix tiles for bfloat16
    weights and for the parts of attention that may be rounded. There it rounds the other factor to
    bfloat16, sums in float32, and computes a gated MLP in one kernel. ``avx512bf16`` rounds the
    same factors, and adds in another order. Elsewhere both equal ``avx512``. Wrong arguments raise
    ValueError before anything is written. ``floats``: a model's quantized weights become float32.

    ``threads``: threads that share the work of a call. All backends of a process share the helper
    threads; a call that finds them in use by another one computes alone.
    """

    name = "cpu"
    row_independent = True

    def __init__(self, isa: str | None = None, threads: int = 1, *, floats: bool = False) -> None:
        usable = {name: (index, panels) for index, name, *panels in _cpu.instruction_sets()}
        chosen = next(iter(usable)) if isa is None else isa
        if chosen not in usable:
            raise ValueError(f"instruction set {isa!r} is not one of {', '.join(usable)}")
        self._isa, (self._panel_floats, self._panel_halves, self._terms_halves) = usable[chosen]
        self.numerics = f"cpu-{REVISIONS[chosen]}-{chosen}"
        self.quantized_kinds = frozenset[str]() if floats else frozenset(QUANTIZED)
        self.wide_weights = floats
        self.threads = _start_threads(threads)
        self._call = self._isa | (self.threads - 1) << _THREADS_SHIFT
        self._arena = Arena()
        self.shared_bytes = 0

    def pack_linear(
        self, parts: Sequence[Weights | QuantizedWeights], bias: F32 | None = None
    ) -> CpuLinear | CpuQuantized:
        """Pack weights ``[out_i, in]`` (float32, or uint16 bfloat16 bits), stacked on ``out``.

        The packed weights are bfloat16 if all parts are. Parts of quantized weights may be of
        several kinds, but not mixed with others.
        """
        quantized = [part for part in parts if isinstance(part, QuantizedWeights)]
        if len(quantized) == len(parts) > 0:
            return self._pack_quantized(quantized, bias)
        return self._pack(checked_parts(parts), bias)

    def _pack_quantized(self, parts: Sequence[QuantizedWeights], bias: F32 | None) -> CpuQuantized:
        if any(part.columns != parts[0].columns for part in parts):
            raise ValueError("weights must be matrices with the same number of columns")
        packed, rows, columns = [], 0, parts[0].columns
        for name, group in groupby(parts, lambda part: part.kind):
            together = list(group)
            if name not in QUANTIZED:
                raise ValueError(f"there are no products of {name} weights")
            kind, items, nbytes, span, step = QUANTIZED[name]
            if columns % items or any(
                part.blocks.shape[1] != columns // items * nbytes for part in together
            ):
                raise ValueError(f"{columns} columns are not the blocks of {name} that were given")
            out = sum(len(part.blocks) for part in together)
            padded = -(-out // QUANTIZED_PANEL) * QUANTIZED_PANEL
            steps = -(-columns // span)
            panels = self._arena.zeros(padded // QUANTIZED_PANEL * steps * step)
            start = 0
            for part in together if not self._arena.filled else ():
                _cpu.pack_quantized(kind, np.ascontiguousarray(part.blocks), panels, start)
                start += len(part.blocks)
            added = None
            if bias is not None:
                added = np.zeros(padded, np.float32)
                added[:out] = bias[rows : rows + out]
            _cpu.note_packed(panels.nbytes)
            packed.append(QuantizedPart(kind, out, panels, added))
            self._arena.keep(packed[-1])
            rows += out
        return CpuQuantized(columns, rows, packed)

    def _pack(self, parts: Sequence[Weights], bias: F32 | None) -> CpuLinear:
        rows, columns = sum(len(part) for part in parts), int(parts[0].shape[1])
        bf16 = all(part.dtype == np.uint16 for part in parts)
        panel = self._panel_halves if bf16 else self._panel_floats
        padded = -(-rows // panel) * panel
        terms = -(-columns // self._terms_halves) * self._terms_halves if bf16 else columns
        panels = self._arena.zeros(padded * terms * (2 if bf16 else 4))
        start = 0
        for part in parts if not self._arena.filled else ():
            _cpu.pack(self._call, np.ascontiguousarray(part), panels, bf16, start)
            start += len(part)
        _cpu.note_packed(panels.nbytes)
        if bias is not None:
            bias = np.pad(np.asarray(bias, np.float32), (0, padded - rows))
        packed = CpuLinear(columns, rows, bf16, panels, bias, self._isa)
        self._arena.keep(packed)
        return packed

    @contextmanager
    def sharing(self, memory: int, key: str, limit: int) -> Iterator[None]:
        """Pack the matrices of a model into shared memory, or take those that are there.

        ``memory``: descriptor; ``key``: names model and kernels; ``limit``: most bytes. Raises
        OtherWeights if the memory does not fit the model, OSError if it cannot be used.
        """
        private = self._arena
        key = f"{key}/{self.numerics}/{self.wide_weights}/{_build()}"
        with opened(memory, key) as (own, filled):
            self._arena = arena = SharedArena(own, filled, limit)
            try:
                yield
                arena.finish(key)
                self.shared_bytes = arena.used
            finally:
                self._arena = private

    def linear(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        if not isinstance(weight, CpuLinear | CpuQuantized):
            raise ValueError("weight was packed by another backend")  # noqa: TRY004
        if x.shape[-1] != weight.in_features:
            raise ValueError(f"x has {x.shape[-1]} columns, not {weight.in_features}")
        if out.shape[-1] != weight.out_features:
            raise ValueError(f"out has {out.shape[-1]} columns, not {weight.out_features}")
        if isinstance(weight, CpuQuantized):
            first = 0
            for part in weight.parts:
                _cpu.quantized_linear(
                    self._call, part.kind, x, part.panels, part.bias, out, first, part.out_features
                )
                first += part.out_features
            return
        if weight.isa != self._isa:
            raise ValueError("weight was packed by another backend")
        _cpu.linear(self._call, x, weight.panels, weight.bf16, weight.bias, out)

    def embed(self, ids: I32, table: Weights | QuantizedWeights, out: F32) -> None:
        """``out[t] = table[ids[t]]``; the table is float32, uint16 bfloat16 bits or quantized."""
        if isinstance(table, QuantizedWeights):
            _cpu.embed_quantized(ids, QUANTIZED[table.kind][0], table.blocks, out)
            return
        _cpu.embed(ids, table, table.dtype == np.uint16, out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight`` per row ``[T, H]``."""
        _cpu.rms_norm(self._call, x, None, weight, eps, out)

    def add_rms_norm(self, x: F32, residual: F32, weight: F32, eps: float, out: F32) -> None:
        """``residual += x`` in place, then ``out = rms_norm(residual)``."""
        _cpu.rms_norm(self._call, x, residual, weight, eps, out)

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
        kind = KV_TYPES.index(rounding) if rounding else -1
        _cpu.rope_append(
            self._call, qkv, positions, slots, cos_sin, q_norm, k_norm, eps, kv_layer, q_out, kind
        )

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
        _cpu.attention(
            self._call,
            q,
            kv_layer,
            block_tables,
            row_offsets,
            positions,
            scale,
            window,
            out,
            halves,
        )

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        """``out[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:]``."""
        _cpu.silu_mul(self._call, gate_up, out)

    def gated_mlp(
        self,
        x: F32,
        gate_up: PackedLinear,
        down: PackedLinear,
        products: F32,
        active: F32,
        out: F32,
    ) -> None:
        """``out = (silu(x @ gate.T) * (x @ up.T)) @ down.T``; one kernel if tiles are available."""
        if (
            isinstance(gate_up, CpuLinear)
            and isinstance(down, CpuLinear)
            and gate_up.isa == down.isa == self._isa
            and gate_up.bf16
            and down.bf16
            and x.shape[-1] == gate_up.in_features
            and gate_up.out_features == 2 * down.in_features
            and out.shape[-1] == down.out_features
            and _cpu.gated_mlp(
                self._call,
                x,
                gate_up.panels,
                gate_up.bias,
                down.in_features,
                down.panels,
                down.bias,
                out,
            )
        ):
            return
        self.linear(x, gate_up, products)
        self.silu_mul(products, active)
        self.linear(active, down, out)

    def layer_norm(self, x: F32, weight: F32, bias: F32, eps: float, out: F32) -> None:
        """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` per row ``[T, H]``."""
        _cpu.layer_norm(self._call, x, None, weight, bias, eps, out)

    def add_layer_norm(
        self, x: F32, residual: F32, weight: F32, bias: F32, eps: float, out: F32
    ) -> None:
        """``residual += x`` in place, then ``out = layer_norm(residual)``."""
        _cpu.layer_norm(self._call, x, residual, weight, bias, eps, out)

    def convolve(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[t] = x[t : t + taps].ravel() @ weight.T + bias``; float32 weights only."""
        if not isinstance(weight, CpuLinear) or weight.isa != self._isa:
            raise ValueError("weight was packed by another backend")
        if (len(x) - len(out) + 1) * x.shape[-1] != weight.in_features:
            raise ValueError(f"x has shape {x.shape}, which does not fit {len(out)} rows of out")
        if out.shape[-1] != weight.out_features:
            raise ValueError(f"out has {out.shape[-1]} columns, not {weight.out_features}")
        _cpu.convolve(self._call, x, weight.panels, weight.bf16, weight.bias, out)

    def snake(self, x: F32, scales: F32, out: F32, first: int = 0) -> None:
        """``out[first + t] = x[t] + sin(scales[0] * x[t])^2 * scales[1]``, else zeros."""
        _cpu.snake(self._isa, x, None, scales, with_margins(out, len(x), first))

    def add_snake(self, x: F32, residual: F32, scales: F32, out: F32, first: int = 0) -> None:
        """``residual += x`` in place, then ``snake(residual)``."""
        _cpu.snake(self._isa, x, residual, scales, with_margins(out, len(x), first))

    def depthwise(
        self, x: F32, weight: F32, bias: F32, dilation: int, scales: F32 | None, out: F32
    ) -> None:
        """Convolve every column by itself, then apply snake if there are ``scales``."""
        _cpu.depthwise(self._isa, x, weight, bias, dilation, scales, out)

    def soft_clip(self, x: F32, out: F32) -> None:
        """``out = tanh(x)``, ``[N]``."""
        _cpu.soft_clip(self._isa, x, out)

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
        _cpu.dense_attention(self._call, q, kv, bias, scale, out, after_part)

    def activate(self, x: F32, kind: Activation, out: F32) -> None:
        """Apply an activation to every element; see the protocol."""
        if kind == "gelu":
            _cpu.gelu(self._call, x, out)
        else:
            _cpu.activate(self._call, ACTIVATIONS.index(kind), x, out)

    def add_scaled(self, x: F32, scale: F32, residual: F32) -> None:
        """``residual[T, H] += x[T, H] * scale[H]`` in place."""
        _cpu.add_scaled(self._isa, x, scale, residual)

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
        _cpu.group_norm(self._isa, x, groups, weight, bias, eps, silu, out, after_part)

    def gather_blocks(
        self, pool: F32, layer_start: int, layer_count: int, block_ids: I32, out: U8
    ) -> int:
        """Copy blocks layer-major into contiguous ``out`` and return the XXH3-64 of the copy."""
        digest = _cpu.gather(self._isa, pool, layer_start, layer_count, block_ids, out)
        return self.checksum(out) if digest is None else digest

    def scatter_blocks(
        self, pool: F32, layer_start: int, layer_count: int, block_ids: I32, payload: U8
    ) -> int:
        """Inverse of :meth:`gather_blocks`; return the XXH3-64 of the written bytes."""
        digest = _cpu.scatter(self._isa, pool, layer_start, layer_count, block_ids, payload)
        return self.checksum(payload) if digest is None else digest

    def copy_blocks(
        self,
        source: F32,
        target: F32,
        layer_start: int,
        layer_count: int,
        source_ids: I32,
        target_ids: I32,
    ) -> int:
        """Copy blocks from pool to pool in one pass; see the protocol."""
        digest = _cpu.copy_blocks(
            self._isa, source, target, layer_start, layer_count, source_ids, target_ids
        )
        if digest is None:
            payload = _payload(source, layer_count, source_ids)
            digest = self.gather_blocks(source, layer_start, layer_count, source_ids, payload)
            self.scatter_blocks(target, layer_start, layer_count, target_ids, payload)
        return digest

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
        _cpu.convert_blocks(
            self._isa, source, target, start, count, to, count, source_ids, target_ids, first
        )

    def sum_blocks(self, pool: F32, layer_start: int, layer_count: int, block_ids: I32) -> int:
        """Return the XXH3-64 that :meth:`gather_blocks` would return; writes nothing."""
        digest = _cpu.sum_blocks(self._isa, pool, layer_start, layer_count, block_ids)
        if digest is None:
            payload = _payload(pool, layer_count, block_ids)
            digest = self.gather_blocks(pool, layer_start, layer_count, block_ids, payload)
        return digest

    def checksum(self, payload: U8) -> int:
        """Return the XXH3-64 of a payload."""
        digest = _cpu.checksum(self._isa, payload)
        return xxhash.xxh3_64_intdigest(payload.data) if digest is None else digest

    def payload_digest(self, payload: U8) -> int:
        """Return the digest of a payload packed or unpacked by a GPU; see :mod:`.digest`."""
        digest = _cpu.payload_digest(self._isa, payload)
        return numpy_digest(payload) if digest is None else digest


@cache
def _build() -> str:
    """Return a digest of the compiled kernels: another build may pack otherwise."""
    return blake2b(Path(_cpu.__file__).read_bytes(), digest_size=16).hexdigest()


def _payload(pool: F32, layer_count: int, block_ids: I32) -> U8:
    """Allocate a copy of the blocks, for kernels that cannot compute the digest while copying."""
    block = pool.itemsize * math.prod(pool.shape[2:])
    return np.empty(layer_count * len(block_ids) * block, np.uint8)
