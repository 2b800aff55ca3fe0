"""Passes a checkpoint's tensors to a backend, reports progress and rejects unused tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError

from ..kernels.backend import Backend, PackedLinear, QuantizedWeights
from ..kernels.bfloat16 import bfloat16_bits
from ..kernels.fp8 import DTYPE as FP8
from ..loading.safetensors import TensorStore, Weights, is_narrow, widened

F32 = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
Order = npt.NDArray[np.intp]
A = TypeVar("A", bound=np.generic)

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "embeddings.position_ids")
"""Tensors in old checkpoints that are redundant because the config implies them."""


class TensorSource(Protocol):
    """A checkpoint, or one part of a model with several parts."""

    @property
    def tensors(self) -> TensorStore:
        """All tensors by name."""
        ...

    @property
    def architecture(self) -> str:
        """Name of the model in error messages."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor as float32 or uint16 bfloat16 bits; CheckpointError for another shape."""
        ...


class WeightLoader:
    """Reads tensors by name, checks their shapes, packs them, reports progress in bytes.

    ``norms_added``: what is added to the weights of norms.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        backend: Backend,
        on_progress: Progress | None,
        *,
        norms_added: float = 0.0,
    ) -> None:
        self._norms_added = np.float32(norms_added)
        self.packed_bytes = 0
        self.unused: list[str] = []
        """Prefixes of tensors that a model leaves out, such as a tower that it does not load."""
        self._checkpoint = checkpoint
        self.backend = backend
        self._on_progress = on_progress
        self._total = checkpoint.tensors.nbytes
        self._done = 0
        self._taken: set[str] = set()

    @property
    def tensors(self) -> TensorStore:
        """All tensors by name."""
        return self._checkpoint.tensors

    def equal(self, one: str, other: str, shape: tuple[int, ...]) -> bool:
        """True if two tensors of a shape have the same values."""
        left, right = (self._checkpoint.take(name, shape) for name in (one, other))
        if left.dtype == right.dtype:
            return np.array_equal(left, right)
        return np.array_equal(widened(left), widened(right))

    def take(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor of the given shape: float32, or uint16 bfloat16 bits."""
        tensor = self._checkpoint.take(name, shape)
        self._note(name)
        return tensor

    def _note(self, name: str) -> None:
        """Count a tensor as read."""
        if name not in self._taken:
            entry = self._checkpoint.tensors.entry(name)
            self._taken.add(name)
            self._done += entry.end - entry.begin
            for partner in self._checkpoint.tensors.partners(name):
                self._note(partner)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weights | QuantizedWeights:
        """Return the table of an embedding in the backend's form."""
        if self._stays_quantized(name) and not self._is_fp8(name):
            return self._blocks(name, shape)
        return self.backend.parameters(self._matrix(name, shape))

    def _stays_quantized(self, name: str) -> bool:
        """True if the backend computes with the blocks of a tensor."""
        return self._checkpoint.tensors.entry(name).dtype in self.backend.quantized_kinds

    def _is_fp8(self, name: str) -> bool:
        return self._checkpoint.tensors.entry(name).dtype == FP8

    def _blocks(self, name: str, shape: tuple[int, int]) -> QuantizedWeights:
        """Return a quantized tensor in its blocks."""
        tensors = self._checkpoint.tensors
        tensors.check(name, shape)
        self._note(name)
        if self._is_fp8(name):
            codes, scales, group = tensors.codes(name)
            return QuantizedWeights(FP8, codes, shape[1], scales, group)
        rows = np.frombuffer(tensors.raw(name), np.uint8).reshape(shape[0], -1)
        return QuantizedWeights(tensors.entry(name).dtype, rows, shape[1])

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a matrix: float32, or uint16 bfloat16 bits, also if it was quantized."""
        return self._narrow(name, self.take(name, shape))

    def _narrow(self, name: str, tensor: Weights) -> Weights:
        """Round a dequantized matrix to bfloat16: half the memory, for less than it has lost."""
        if not self._is_narrow(name) or tensor.dtype == np.uint16:
            return tensor
        return bfloat16_bits(widened(tensor))

    def _is_narrow(self, name: str) -> bool:
        """True if a matrix that is computed in floats becomes bfloat16."""
        dtype = self._checkpoint.tensors.entry(name).dtype
        return dtype == "BF16" or (is_narrow(dtype) and not self.backend.wide_weights)

    def vector(self, name: str, size: int) -> F32:
        """Return a copy of the tensor ``[size]`` as float32."""
        return widened(self.take(name, (size,)))

    def norm(self, name: str, size: int) -> F32:
        """Return the weights ``[size]`` of a norm in the backend's form."""
        return self.backend.parameters(self.vector(name, size) + self._norms_added)

    def halves(self, parts: Sequence[tuple[str, int]]) -> bool:
        """True if the weights of all modules ``(name, out_features)`` have few digits."""
        return all(self._is_narrow(f"{name}.weight") for name, _ in parts)

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool,
        orders: Sequence[Order | None] | None = None,
        columns: Order | None = None,
    ) -> PackedLinear:
        """Pack the modules ``(name, out_features)`` into one matrix, with biases if requested.

        ``orders``: for each module, the order in which its outputs are packed, or None.
        ``columns``: the order of its inputs. The index -1 gives a row or column of zeros.
        Quantized weights stay as they are if the backend computes with them, all modules are
        quantized, and the inputs keep their order.
        """
        tensors = [(f"{name}.weight", (out, in_features)) for name, out in parts]
        weights: list[Weights | QuantizedWeights]
        if columns is None and all(self._stays_quantized(name) for name, _ in tensors):
            weights = [self._blocks(name, shape) for name, shape in tensors]
        else:
            weights = [*self._floats(tensors, columns)]
        biases = [self.vector(f"{name}.bias", out) for name, out in parts] if bias else []
        if orders is not None:
            weights = [_in_order(w, order) for w, order in zip(weights, orders, strict=True)]
            biases = [_ordered(b, order) for b, order in zip(biases, orders, strict=bias)]
        packed = self.backend.pack_linear(weights, np.concatenate(biases) if bias else None)
        self.packed_bytes += packed.nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
        return packed

    def _floats(
        self, tensors: Sequence[tuple[str, tuple[int, int]]], columns: Order | None
    ) -> Sequence[Weights]:
        """Return matrices of one element type, with their columns in an order."""
        weights: Sequence[Weights] = [self._matrix(name, shape) for name, shape in tensors]
        if len({w.dtype for w in weights}) > 1:
            weights = [widened(w) for w in weights]
        return weights if columns is None else [_ordered(w.T, columns).T for w in weights]

    def finish(self, unused: Sequence[str] = ()) -> None:
        """End the loading. Raises CheckpointError for weights that the model does not use.

        ``unused``: tensors that may be present without being used; a name that ends with a dot
        is a prefix.
        """
        prefixes = tuple(name for name in (*unused, *self.unused) if name.endswith("."))
        for name in self._checkpoint.tensors:
            known = name in self._taken or name in unused or name.endswith(_IGNORED_SUFFIXES)
            known = known or name.startswith(prefixes)
            if not known:
                raise CheckpointError(
                    f"{self._checkpoint.tensors.path(name)}: tensor '{name}' is not used by "
                    f"{self._checkpoint.architecture} with this config.json"
                )
        self.backend.end_loading()
        if self._on_progress is not None:
            self._on_progress(self._total, self._total)


def _in_order(
    weights: Weights | QuantizedWeights, order: Order | None
) -> Weights | QuantizedWeights:
    if isinstance(weights, QuantizedWeights):  # blocks of zeros are weights of zero
        scales = None if weights.scales is None else _ordered(weights.scales, order)
        return replace(weights, blocks=_ordered(weights.blocks, order), scales=scales)
    return _ordered(weights, order)


def _ordered(array: npt.NDArray[A], order: Order | None) -> npt.NDArray[A]:
    if order is None:
        return array
    taken = array[order]
    taken[order < 0] = 0
    return taken
