"""The kernels that a device must provide; models and scheduler use only this interface.

Every kernel writes into ``out`` arguments that the caller owns, and keeps no allocation after the
call. A row's result must not depend on the other rows of the call (their number
or content). So logits are bitwise equal however a request is batched or chunked.

Arrays are in the memory where the backend computes: NumPy arrays on a CPU, device arrays elsewhere,
annotated as NumPy arrays. Callers get arrays from :meth:`Backend.empty`, :meth:`Backend.upload` and
:meth:`Backend.parameters`, slice and reshape them, and pass them to kernels. On a CPU all floats
are float32 and bfloat16 weights are uint16 bits. Another backend may hold activations, keys and
values in its own element type. Logits are float32 everywhere.

Shapes: ``T`` rows (tokens of all chunks of a step), ``H`` hidden, ``Hq``/``Hk`` query and KV
heads, ``D`` head dim, ``NB`` pool blocks, ``BS`` block size, ``S`` chunks (sequences).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.proto.block_moves import BlockStream
from baton.proto.layout import KVLayout
from baton.proto.wire.tickets import DeviceTicket

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
A = TypeVar("A", bound=np.generic)
Weights = npt.NDArray[np.generic]
"""float32, or uint16 holding bfloat16 bits."""


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """A matrix in the blocks of a GGUF file, or in 8-bit floats.

    ``kind``: the name of the block format, or F8_E4M3. ``blocks[rows, bytes of a row]``.
    ``columns``: weights of a row. ``scales``: of 8-bit floats, float32 ``[rows, groups]``;
    ``group``: columns that share one.
    """

    kind: str
    blocks: U8
    columns: int
    scales: F32 | None = None
    group: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.blocks), self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.blocks.nbytes


def checked_parts(parts: Sequence[Weights | QuantizedWeights]) -> list[Weights]:
    """Return the parts of one matrix for a backend without products of quantized weights.

    Raises ValueError for such parts, and for parts with different numbers of columns.
    """
    arrays = [part for part in parts if not isinstance(part, QuantizedWeights)]
    if len(arrays) < len(parts):
        raise ValueError("quantized weights are not packed by these kernels, or not with others")
    if not arrays or any(a.ndim != 2 or a.shape[1] != arrays[0].shape[1] for a in arrays):
        raise ValueError("weights must be matrices with the same number of columns")
    return arrays


Activation = Literal["silu", "gelu_tanh", "quick_gelu", "tanh", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "quick_gelu", "tanh", "gelu")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as one process sees it.

    ``ordinal``: its number in this process, which depends on CUDA_VISIBLE_DEVICES. ``uuid``: the
    same text in all processes, so that two processes can tell whether they share the GPU.
    """

    ordinal: int
    uuid: str
    name: str

    @property
    def device(self) -> str:
        """Its name in reports: ``cuda:1 GPU-5e2f90a1-...``."""
        return f"cuda:{self.ordinal} {self.uuid}"


class PackedLinear(Protocol):
    """A weight matrix in the backend's own layout."""

    @property
    def in_features(self) -> int:
        """Columns of the input."""
        ...

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...


class Mapping(Protocol):
    """Mapped memory of another process; its arrays must not be used after the close."""

    def close(self) -> None:
        """Unmap the memory."""
        ...


class Backend(Protocol):
    """The kernels of one device."""

    name: str
    numerics: str
    """Name of the arithmetic (kernels, build, instruction set); equal names give equal bits."""
    row_independent: bool
    """True if a row's bits do not depend on the other rows (False: NumPy with BLAS)."""
    kv_types: tuple[str, ...]
    """Types of keys and values that the kernels have, as KVLayout names them."""
    kv_dtype: str
    """Type in which a model's keys and values are kept, one of these."""
    kv_rounding: str
    """Type to which they are rounded before, not wider than ``kv_dtype``."""
    on_host: bool
    """True if arrays are NumPy arrays, so that other code may read them without a copy."""
    head_sizes: tuple[int, ...]
    """Ascending head sizes of attention over whole sequences; empty: any."""
    column_multiple: int
    """The columns of activations and weights must be a multiple of this."""
    gpu: Gpu | None
    """The GPU that computes; None for a CPU."""
    quantized_kinds: frozenset[str]
    """Kinds of :class:`QuantizedWeights` that the kernels use as they are."""
    wide_weights: bool
    """True if other quantized weights become float32 instead of bfloat16."""
    shared_bytes: int
    """Bytes of packed weights in memory that other processes may map too."""
    threads: int
    """Threads of the host that compute; results do not depend on their number."""

    @property
    def lost(self) -> str:
        """Error after which only a new process can compute; "" while the kernels work."""
        ...

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> F32:
        """Return activations ``[rows, columns]``, content undefined; float32 for ``logits``."""
        ...

    def upload(self, array: npt.NDArray[A]) -> npt.NDArray[A]:
        """Return a host array where kernels can read it: itself on a CPU, a copy elsewhere."""
        ...

    def download(self, x: F32) -> F32:
        """Return activations or float32 values as a float32 array in host memory."""
        ...

    def parameters(self, weights: npt.NDArray[A]) -> npt.NDArray[A]:
        """Return host rows, a table or a norm's weights in the kernels' element type."""
        ...

    def end_loading(self) -> None:
        """Free the memory that only loading needs; later weights allocate it anew."""
        ...

    def kv_pool(
        self, shape: tuple[int, ...], allocate: Callable[[int], U8], dtype: str = ""
    ) -> F32:
        """Allocate a zeroed KV pool ``[L, NB, 2, Hk, BS, E]``; ``allocate``: for host memory.

        ``dtype``: one of ``kv_types``, by default the first. ``E``: as KVLayout states it.
        """
        ...

    def pool_ticket(self, pool: F32) -> DeviceTicket | None:
        """Return a ticket by which processes of this host can map the pool; None if impossible."""
        ...

    def open_pool(self, ticket: DeviceTicket, layout: KVLayout) -> tuple[Mapping, F32]:
        """Map another process's pool on the device for reading: the mapping and the array.

        Raises ValueError if the ticket does not fit, OSError if the pool cannot be opened.
        """
        ...

    def block_stream(self, pool: F32, nbytes: int) -> BlockStream | None:
        """Return a stream of asynchronous block moves, of about ``nbytes`` each.

        None if block moves are synchronous.
        """
        ...

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that no process uses."""
        ...

    def memory_bytes(self) -> int:
        """Return the total memory of the machine or device that holds the arrays."""
        ...

    def plan_attention(self, row_offsets: I32, positions: I32) -> object:
        """Plan :meth:`attention` from host arrays; pass the result as ``plan``."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued kernels; on a CPU none are queued."""
        ...

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        """``out[i] = x[rows[i]]``; ``[R, ...]`` of ``[T, ...]``."""
        ...

    def put_rows(self, x: F32, rows: I32, out: F32, *, add: bool = False) -> None:
        """``out[rows[i]] = x[i]``, or ``+= x[i]`` with ``add``; ``[R, H]`` into ``[T, H]``.

        The rows are distinct. Raises ValueError for rows outside ``out`` that are in host memory;
        rows on a device that are outside are left out.
        """
        ...

    def pack_linear(
        self, parts: Sequence[Weights | QuantizedWeights], bias: F32 | None = None
    ) -> PackedLinear:
        """Pack weights ``[out_i, in]`` (float32, or uint16 bfloat16 bits), stacked on ``out``.

        Or quantized weights of :attr:`quantized_kinds`; such parts may be of several kinds.
        """
        ...

    def linear(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        ...

    def embed(self, ids: I32, table: Weights | QuantizedWeights, out: F32) -> None:
        """``out[t] = table[ids[t]]``; the table is float32 or uint16 bfloat16 bits ``[V, H]``.

        Or it is of :attr:`quantized_kinds`.
        """
        ...

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight`` per row ``[T, H]``."""
        ...

    def add_rms_norm(self, x: F32, residual: F32, weight: F32, eps: float, out: F32) -> None:
        """``residual += x`` in place, then ``out = rms_norm(residual)``."""
        ...

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
        """Normalise and rotate q and k, then write q out and k, v into the paged cache.

        Per row of ``qkv[T, (Hq + 2 Hk) * D]``: optional per-head RMSNorm of q and k, rotate-half
        RoPE with ``cos_sin[max_position, D]`` (first half cos, second half sin); q goes to
        ``q_out[T, Hq, D]``, k and v into ``kv_layer[NB, 2, Hk, BS, D]`` at flat slot
        ``block * BS + offset``. The slots of one call are distinct. ``rounding``: the type to
        which keys and values are rounded, by default that of ``kv_layer``.
        """
        ...

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
        """Causal paged attention with grouped query heads.

        Row ``t`` of sequence ``s`` (``row_offsets[S+1]``) attends to positions
        ``max(0, p - window + 1) .. p`` (``window`` 0: all), ``p = positions[t]``, through
        ``block_tables[S, Nmax]``; ``out[T, Hq * D]``. KV is read in tiles aligned to absolute
        positions, in order. ``positions`` is the last visible position of a row, not the place of
        its own key: if all rows get the sequence's last position, attention is bidirectional.
        ``plan``: result of :meth:`plan_attention` for the same rows; a CPU has none. ``halves``:
        factors may be rounded to bfloat16, as in a model with bfloat16 weights.
        """
        ...

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        """``out[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:]``."""
        ...

    def gated_mlp(
        self,
        x: F32,
        gate_up: PackedLinear,
        down: PackedLinear,
        products: F32,
        active: F32,
        out: F32,
    ) -> None:
        """``out[T, H] = (silu(x @ gate.T) * (x @ up.T)) @ down.T``, biases included.

        ``gate_up`` is gate stacked on up. ``products[T, 2 F]`` and ``active[T, F]`` are scratch
        space for intermediate results; their content is undefined after the call.
        """
        ...

    def layer_norm(self, x: F32, weight: F32, bias: F32, eps: float, out: F32) -> None:
        """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` per row ``[T, H]``."""
        ...

    def add_layer_norm(
        self, x: F32, residual: F32, weight: F32, bias: F32, eps: float, out: F32
    ) -> None:
        """``residual += x`` in place, then ``out = layer_norm(residual)``."""
        ...

    def activate(self, x: F32, kind: Activation, out: F32) -> None:
        """Apply an activation to every element ``[T, F]``; ``out`` may be ``x``, but not for gelu.

        ``x * (1 + erf(x / sqrt(2))) / 2`` (gelu), ``tanh(x)``, or ``x * sigmoid(u)``, with ``u``:
        ``x`` (silu), ``1.702 x`` (quick_gelu), ``sqrt(8 / pi) (x + 0.044715 x^3)`` (gelu_tanh).
        """
        ...

    def gather_blocks(
        self, pool: F32, layer_start: int, layer_count: int, block_ids: I32, out: U8
    ) -> int:
        """Copy blocks of some layers into contiguous ``out`` and checksum them.

        Copies ``pool[layer_start:+layer_count, block_ids]``, layer-major, and returns the
        XXH3-64 of the copied bytes.
        """
        ...

    def scatter_blocks(
        self, pool: F32, layer_start: int, layer_count: int, block_ids: I32, payload: U8
    ) -> int:
        """Inverse of :meth:`gather_blocks`; returns the XXH3-64 of the payload it wrote."""
        ...

    def copy_blocks(
        self,
        source: F32,
        target: F32,
        layer_start: int,
        layer_count: int,
        source_ids: I32,
        target_ids: I32,
    ) -> int:
        """Copy blocks of some layers from one pool to another and checksum them.

        ``target[l, target_ids[i]] = source[l, source_ids[i]]`` for ``layer_count`` layers from
        ``layer_start``. The pools ``[L, NB, 2, Hk, BS, D]`` share no memory and differ only in
        ``NB``; ``source`` may be read-only. Returns the XXH3-64 of the copied bytes, equal to the
        result of :meth:`gather_blocks` for the same source blocks. Wrong arguments raise
        ValueError before anything is written.
        """
        ...

    def convert_blocks(
        self,
        source: F32,
        target: F32,
        layers: tuple[int, int, int],
        source_ids: I32,
        target_ids: I32,
        first: int,
    ) -> None:
        """Copy tokens between pools with other block sizes or types of keys and values.

        ``layers``: first layer in ``source``, first layer in ``target``, their number. Token
        ``first + i`` of the blocks ``source_ids`` becomes token ``i`` of ``target_ids``; tokens
        after the last one are zeros. Wrong arguments raise ValueError before anything is written.
        """
        ...

    def sum_blocks(self, pool: F32, layer_start: int, layer_count: int, block_ids: I32) -> int:
        """Return the XXH3-64 that :meth:`gather_blocks` would return; ``pool`` may be read-only.

        Wrong arguments raise ValueError.
        """
        ...

    def checksum(self, payload: U8) -> int:
        """XXH3-64 of a payload."""
        ...
