"""The CUDA kernels as a Backend: bfloat16 in memory, float32 inside, on any :class:`Device`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.layout import ELEMENTS, INT8_SCALE_BYTES, KVLayout
from baton.proto.wire.tickets import DeviceTicket

from ..backend import (
    F32,
    I32,
    U8,
    A,
    Activation,
    Gpu,
    Mapping,
    PackedLinear,
    QuantizedWeights,
    Weights,
    checked_parts,
)
from ..bfloat16 import bfloat16_bits
from ..fp8 import DTYPE as FP8
from ..fp8 import dequantized
from ..memory import widened_bytes
from . import attention, elementwise
from .block_moves import BlockMover, BlockStream, LayerMarks
from .checks import BF16
from .device import Device
from .linear import (
    PIECE,
    Fp8Matrix,
    fp8_linear,
    fp8_linear_silu_mul,
    in_pieces,
    linear,
    linear_silu_mul,
)
from .row_plan import RowPlan
from .staging import Staging

HANDLE_BYTES = 64
"""Size of a CUDA IPC handle."""
ALIGNED = 256
"""Alignment of CUDA allocations, and so of pools, in bytes."""
REVISION = 3
"""Increase it when a change of the CUDA code changes a bit of any result."""

_LOGITS_AT_ONCE = 4


@dataclass(slots=True, frozen=True)
class CudaLinear:
    """Weights as bfloat16 ``[out, in]`` and bias as float32 ``[out]``, on the device."""

    weight: Any
    bias: Any

    @property
    def in_features(self) -> int:
        """Columns of the input."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return int(self.weight.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))


@dataclass(slots=True, frozen=True)
class CudaFp8Linear:
    """Weights in 8-bit floats and bias as float32 ``[out]``, on the device."""

    weight: Fp8Matrix
    bias: Any

    @property
    def in_features(self) -> int:
        """Columns of the input."""
        return self.weight.depth

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        parts = (self.weight.codes, self.weight.scales, self.bias)
        return sum(int(part.nbytes) for part in parts if part is not None)


class _PerThread(threading.local):
    """The mover of the calling thread, made at its first use."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @cached_property
    def mover(self) -> BlockMover:
        return BlockMover(self._device)


class _BlockMoves:
    """The moves of KV blocks. Other threads than the compute thread call them too."""

    def __init__(self, device: Device) -> None:
        self._local = _PerThread(device)  # each thread needs separate buffers

    def gather_blocks(
        self, pool: Any, layer_start: int, layer_count: int, block_ids: I32, out: U8
    ) -> int:
        """Copy blocks of some layers to the host; return the digest of the copy."""
        return self._local.mover.gather(pool, layer_start, layer_count, block_ids, out)

    def scatter_blocks(
        self, pool: Any, layer_start: int, layer_count: int, block_ids: I32, payload: U8
    ) -> int:
        """Inverse of :meth:`gather_blocks`; return the digest of the written bytes."""
        return self._local.mover.scatter(pool, layer_start, layer_count, block_ids, payload)

    def copy_blocks(
        self,
        source: Any,
        target: Any,
        layer_start: int,
        layer_count: int,
        source_ids: I32,
        target_ids: I32,
    ) -> int:
        """Copy blocks from pool to pool on the device; return the digest of their bytes."""
        return self._local.mover.copy(
            source, target, layer_start, layer_count, source_ids, target_ids
        )

    def sum_blocks(self, pool: Any, layer_start: int, layer_count: int, block_ids: I32) -> int:
        """Return the digest that :meth:`gather_blocks` would return."""
        return self._local.mover.sum(pool, layer_start, layer_count, block_ids)

    def checksum(self, payload: U8) -> int:
        """Return the digest of a payload in host memory."""
        return self._local.mover.digest(payload)


class CudaBackend(_BlockMoves):
    """Kernels of one GPU; see :class:`~baton.engine.kernels.backend.Backend`.

    Arrays are device arrays, annotated as CPU arrays. Activations, weights, keys and
    values are bfloat16 bits (uint16), logits float32. A KV pool may be int8
    (:mod:`.reference_int8`). Rows are not independent: large products use
    cuBLAS, which chooses its kernel by the number of rows. Wrong arguments raise ValueError before
    anything is launched.
    """

    name = "cuda"
    row_independent = False
    kv_types: tuple[str, ...] = ("bfloat16", "int8")
    kv_dtype = "bfloat16"
    kv_rounding = "bfloat16"
    on_host = False
    head_sizes: tuple[int, ...] = attention.PREFILL_DIMS
    column_multiple = elementwise.VECTOR
    quantized_kinds = frozenset({FP8})
    wide_weights = False

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.device = device
        self.gpu: Gpu | None = device.gpu
        self.threads, self.shared_bytes = 1, 0
        self.numerics = f"{device.name}-{REVISION}-bf16"
        self._fp8_space: Any = device.empty((0,), np.uint16)
        self._widened: Any = device.empty((0,), np.uint16)
        self.marks = LayerMarks(device)
        self.staging = Staging(device)
        """Of weights; closed when a model, or a part of one, is loaded."""

    @property
    def lost(self) -> str:
        """Error after which only a new process can compute; "" while the GPU works."""
        return self.device.lost

    # ------------------------------------------------------------------ arrays

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> Any:
        """Return activations bfloat16 ``[rows, columns]``, or float32 for ``logits``."""
        return self.device.empty((rows, columns), np.float32 if logits else np.uint16)

    def upload(self, array: npt.NDArray[A]) -> Any:
        """Return a copy on the device, with the same type."""
        return self.device.upload(np.ascontiguousarray(array))

    def download(self, x: Any) -> Any:
        """Return bfloat16 or float32 values as a float32 array in host memory."""
        found = self.device.download(x)
        if found.dtype != BF16:
            return found
        return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def parameters(self, weights: npt.NDArray[A]) -> Any:
        """Return a bfloat16 copy on the device of float32 values or bfloat16 bits."""
        if weights.ndim == 2:
            return self.staging.upload([_uploadable(weights)])
        return self.device.upload(parameter_bits(weights))

    def end_loading(self) -> None:
        """Return the pinned memory of weights to the system."""
        self.staging.close()
        self.device.trim_host()

    def kv_pool(
        self, shape: tuple[int, ...], allocate: Callable[[int], U8], dtype: str = ""
    ) -> Any:
        """Allocate a zeroed KV pool in device memory; ``allocate`` is not used."""
        return self.device.shareable(shape, ELEMENTS[dtype or self.kv_types[0]])

    def reserve_widened(self, layout: KVLayout, length: int) -> None:
        """Allocate the memory in which prefill attention reads blocks of an int8 pool.

        It holds a layer's blocks of a context of ``length`` tokens. Nothing for other pools.
        """
        self._widened = self.device.empty((widened_bytes(layout, length) // 2,), np.uint16)

    def pool_ticket(self, pool: Any) -> DeviceTicket:
        """Return the pool's handle, offset and GPU, for decode workers on GPUs of this host."""
        handle, offset = self.device.export(pool)
        return DeviceTicket(host_id(), handle, offset, int(pool.nbytes), self.device.gpu.uuid)

    def open_pool(self, ticket: DeviceTicket, layout: KVLayout) -> tuple[Mapping, Any]:
        """Map another process's pool ``[L, NB, 2, Hk, BS, D]``; its blocks are only read."""
        block = layout.num_layers * layout.block_bytes
        if layout.dtype != self.kv_dtype or ticket.nbytes < block or ticket.nbytes % block:
            raise ValueError(f"pool size {ticket.nbytes} is not a multiple of block size {block}")
        if ticket.host != host_id():
            raise ValueError("the pool is on another host")
        if ticket.offset % ALIGNED:
            raise ValueError(f"the pool's offset {ticket.offset} is not aligned to {ALIGNED} bytes")
        if len(ticket.handle) != HANDLE_BYTES:  # CuPy would raise an IndexError
            raise ValueError(f"the handle has {len(ticket.handle)} bytes, not {HANDLE_BYTES}")
        shape = (layout.num_layers, ticket.nbytes // block, *layout.block_shape)
        element = ELEMENTS[layout.dtype]
        return self.device.open(ticket.handle, ticket.offset, shape, element, ticket.gpu)

    def convert_blocks(
        self,
        source: Any,
        target: Any,
        layers: tuple[int, int, int],
        source_ids: Any,
        target_ids: Any,
        first: int,
    ) -> None:
        """Raise ValueError: pools on GPUs have equal blocks; their cards refuse others."""
        raise ValueError("blocks on a GPU are not converted")

    def block_stream(self, pool: Any, nbytes: int) -> BlockStream:
        """Return a stream for asynchronous moves of the pool's blocks."""
        return BlockStream(self.device, pool, self.marks, nbytes)

    def free_bytes(self) -> int:
        """Return the bytes of the GPU's memory that no process uses."""
        return self.device.free_bytes()

    def memory_bytes(self) -> int:
        """Return the GPU's total memory in bytes."""
        return self.device.memory_bytes()

    def plan_attention(self, row_offsets: I32, positions: I32) -> RowPlan:
        """Return the work lists of the rows, for :meth:`attention`."""
        return RowPlan(self.device, row_offsets, positions)

    def synchronize(self) -> None:
        """Wait for all queued kernels."""
        self.device.synchronize()

    def take_rows(self, x: Any, rows: Any, out: Any) -> None:
        """``out[i] = x[rows[i]]``."""
        count, width = out.shape[0], _width(out.shape[1:])
        elementwise.embed(self.device, rows, x.reshape(len(x), width), out.reshape(count, width))

    def put_rows(self, x: Any, rows: Any, out: Any, *, add: bool = False) -> None:
        """``out[rows[i]] = x[i]``, or ``+= x[i]`` with ``add``; rows outside are left out."""
        elementwise.put_rows(self.device, x, rows, out, add=add)

    # ------------------------------------------------------------------ products

    def pack_linear(
        self, parts: Sequence[Weights | QuantizedWeights], bias: F32 | None = None
    ) -> CudaLinear | CudaFp8Linear:
        """Pack weights ``[out_i, in]`` (float32, or uint16 bfloat16 bits), stacked on ``out``.

        Or 8-bit floats, whose products have the bits of the nearest bfloat16 weights.
        Rows of zeros make ``out`` a multiple of 4: the sampler reads four logits at once.
        """
        narrow = [part for part in parts if isinstance(part, QuantizedWeights)]
        if len(narrow) == len(parts) and all(_is_readable(part) for part in narrow):
            return self._pack_fp8(narrow, bias)
        arrays = checked_parts([_widened(part) for part in parts])
        stacked = [_uploadable(part) for part in arrays]
        missing = -sum(map(len, stacked)) % _LOGITS_AT_ONCE
        if missing:
            stacked.append(np.zeros((missing, arrays[0].shape[1]), np.uint16))
            bias = None if bias is None else np.pad(bias, (0, missing))
        weight = self.staging.upload(stacked)
        return CudaLinear(weight, None if bias is None else self.device.upload(bias))

    def _pack_fp8(self, parts: Sequence[QuantizedWeights], bias: F32 | None) -> CudaFp8Linear:
        """Pack parts with scales of one width; a scale of a whole row is repeated."""
        codes = np.concatenate([part.blocks for part in parts])
        found = [part.scales for part in parts if part.scales is not None]
        groups = max(scales.shape[1] for scales in found)
        scales = np.concatenate([
            scales if scales.shape[1] == groups else np.repeat(scales, groups, axis=1)
            for scales in found
        ])  # fmt: skip
        missing = -len(codes) % _LOGITS_AT_ONCE
        codes = np.pad(codes, ((0, missing), (0, 0)))
        scales = np.pad(scales, ((0, missing), (0, 0)))
        bias = None if bias is None else np.pad(bias, (0, missing))
        laid, depth = in_pieces(codes), codes.shape[1]
        widths = [part.group for part in parts if part.scales is not None and groups > 1
                  and part.scales.shape[1] == groups]  # fmt: skip
        pieces = widths[0] // PIECE if widths else laid.shape[1] // PIECE
        upload = self.device.upload
        codes_there: Any = self.staging.upload([laid.view(np.uint16)])
        weight = Fp8Matrix(
            codes_there.view(np.uint8), upload(scales.astype(np.float32)), depth, pieces
        )
        if weight.space > self._fp8_space.shape[0]:
            self._fp8_space = self.device.empty((weight.space,), np.uint16)
        return CudaFp8Linear(weight, None if bias is None else upload(bias))

    def linear(self, x: Any, weight: PackedLinear, out: Any) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        if isinstance(weight, CudaFp8Linear):
            fp8_linear(self.device, x, weight.weight, weight.bias, out, self._fp8_space)
            return
        if not isinstance(weight, CudaLinear):
            raise ValueError("weight was packed by another backend")  # noqa: TRY004
        linear(self.device, x, weight.weight, weight.bias, out)

    # ------------------------------------------------------------------ rows

    def embed(self, ids: Any, table: Any, out: Any) -> None:
        """``out[t] = table[ids[t]]``."""
        elementwise.embed(self.device, ids, table, out)

    def rms_norm(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight`` per row ``[T, H]``."""
        elementwise.rms_norm(self.device, x, weight, eps, out)

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
        """``residual += x`` in place, then ``out = rms_norm(residual)``."""
        elementwise.add_rms_norm(self.device, x, residual, weight, eps, out)

    def silu_mul(self, gate_up: Any, out: Any) -> None:
        """``out[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:]``."""
        elementwise.silu_mul(self.device, gate_up, out)

    def gated_mlp(
        self,
        x: Any,
        gate_up: PackedLinear,
        down: PackedLinear,
        products: Any,
        active: Any,
        out: Any,
    ) -> None:
        """``out = (silu(x @ gate.T) * (x @ up.T)) @ down.T``."""
        if isinstance(gate_up, CudaLinear) and gate_up.bias is None:
            linear_silu_mul(self.device, x, gate_up.weight, products, active)
        elif not (
            isinstance(gate_up, CudaFp8Linear)
            and gate_up.bias is None
            and fp8_linear_silu_mul(self.device, x, gate_up.weight, products, active)
        ):
            self.linear(x, gate_up, products)
            self.silu_mul(products, active)
        self.linear(active, down, out)

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
        """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` per row ``[T, H]``."""
        elementwise.layer_norm(self.device, x, weight, bias, eps, out)

    def add_layer_norm(
        self, x: Any, residual: Any, weight: Any, bias: Any, eps: float, out: Any
    ) -> None:
        """``residual += x`` in place, then ``out = layer_norm(residual)``."""
        elementwise.add_layer_norm(self.device, x, residual, weight, bias, eps, out)

    def activate(self, x: Any, kind: Activation, out: Any) -> None:
        """Apply an activation to every element; ``out`` may be ``x``."""
        elementwise.activate(self.device, x, kind, out)

    # ------------------------------------------------------------------ attention

    def qk_norm_rope_append(
        self,
        qkv: Any,
        positions: Any,
        slots: Any,
        cos_sin: Any,
        q_norm: Any,
        k_norm: Any,
        eps: float,
        kv_layer: Any,
        q_out: Any,
        rounding: str = "",
    ) -> None:
        """Normalise and rotate q and k; write q to ``q_out``, k and v into the paged cache."""
        elementwise.qk_norm_rope_append(
            self.device, qkv, positions, slots, cos_sin, q_norm, k_norm, eps, kv_layer, q_out
        )

    def attention(
        self,
        q: Any,
        kv_layer: Any,
        block_tables: Any,
        row_offsets: Any,
        positions: Any,
        scale: float,
        window: int,
        out: Any,
        plan: object = None,
        halves: bool = False,
    ) -> None:
        """Causal paged attention with grouped heads; ``plan``: from :meth:`plan_attention`."""
        if not isinstance(plan, RowPlan):
            raise ValueError("attention needs a plan from plan_attention")  # noqa: TRY004
        rows, heads, dim = q.shape
        out = out.reshape(rows, heads, dim)
        kv_heads = kv_layer.shape[2]
        # The decode kernel has fewer head sizes; the prefill kernel takes any number of rows.
        decoded = plan.decoded if dim in attention.HEAD_DIMS else 0
        if decoded:
            work = plan.decode(kv_heads, window)
            attention.decode_attention(
                self.device,
                q[:decoded],
                kv_layer,
                block_tables[:decoded],
                work.plan,
                work.shape,
                scale,
                work.partial(q[:decoded]),
                work.stats(q[:decoded]),
                out[:decoded],
            )
        if decoded < rows and kv_layer.dtype == np.int8:
            self._attend_widened(
                q, kv_layer, block_tables, positions, scale, window, out, plan, decoded
            )
        elif decoded < rows:
            attention.prefill_attention(
                self.device,
                q[decoded:],
                kv_layer,
                block_tables[decoded:],
                positions[decoded:],
                plan.prefill(decoded, heads // kv_heads, window),
                scale,
                window,
                out[decoded:],
            )

    def _attend_widened(
        self,
        q: Any,
        kv_layer: Any,
        block_tables: Any,
        positions: Any,
        scale: float,
        window: int,
        out: Any,
        plan: RowPlan,
        first: int,
    ) -> None:
        """Compute the rows from ``first`` on over an int8 layer, some sequences at a time."""
        _, _, kv_heads, size, length = kv_layer.shape
        block = (2, kv_heads, size, length - INT8_SCALE_BYTES)
        elements = math.prod(block)
        capacity, group = self._widened.shape[0] // elements, q.shape[1] // kv_heads
        tables = block_tables[first:]
        for work in plan.widened(first, group, window, size, tables.shape[1], capacity):
            count = work.entries.shape[0]
            blocks = self._widened[: count * elements].reshape(count, *block)
            elementwise.widen_kv(self.device, kv_layer, tables, work.entries, blocks)
            attention.prefill_attention(
                self.device,
                q[first:][work.rows],
                blocks,
                work.tables,
                positions[first:][work.rows],
                work.tiles,
                scale,
                window,
                out[first:][work.rows],
            )


def _is_readable(part: QuantizedWeights) -> bool:
    """True if the kernels read the codes of a part: its scales hold for whole pieces."""
    if part.scales is None or part.kind != FP8:
        return False
    return part.scales.shape[1] == 1 or part.group % PIECE == 0


def _widened(part: Weights | QuantizedWeights) -> Weights | QuantizedWeights:
    """Return bfloat16 bits of 8-bit floats that the kernels do not read."""
    if not isinstance(part, QuantizedWeights) or part.scales is None or part.kind != FP8:
        return part
    return bfloat16_bits(dequantized(part.blocks, part.scales, part.group))


def host_id() -> str:
    """Return an id of this boot of this machine; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _uploadable(weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bfloat16 bits as they are, and other values as float32, which the upload rounds."""
    kind = np.uint16 if weights.dtype == np.uint16 else np.float32
    return np.ascontiguousarray(weights, kind)


def parameter_bits(weights: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 values in bfloat16; bits stay as they are."""
    if weights.dtype == np.uint16:
        return np.ascontiguousarray(weights)
    return bfloat16_bits(weights.astype(np.float32, copy=False))


def _width(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
