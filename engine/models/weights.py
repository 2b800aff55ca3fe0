"""Passes a checkpoint's tensors to a backend, reports progress and rejects unused tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...proto.errors import CheckpointError
from ..kernels.backend import Backend, PackedLinear
from ..loading.checkpoint import Checkpoint
from ..loading.safetensors import Weights

F32 = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "embeddings.position_ids")
"""Tensors in old checkpoints that are redundant because the config implies them."""


class WeightLoader:
    """Reads tensors by name, checks their shapes, packs them, reports progress in bytes."""

    def __init__(
        self, checkpoint: Checkpoint, backend: Backend, on_progress: Progress | None
    ) -> None:
        self.packed_bytes = 0
        self._checkpoint = checkpoint
        self._backend = backend
        self._on_progress = on_progress
        self._total = checkpoint.tensors.nbytes
        self._done = 0
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor of the given shape: float32, or uint16 bfloat16 bits."""
        tensor = self._checkpoint.take(name, shape)
        if name not in self._taken:
            entry = self._checkpoint.tensors.entry(name)
            self._taken.add(name)
            self._done += entry.end - entry.begin
        return tensor

    def vector(self, name: str, size: int) -> F32:
        """Return a copy of the tensor ``[size]`` as float32."""
        return widened(self.take(name, (size,)))

    def norm(self, name: str, size: int) -> F32:
        """Return the weights ``[size]`` of a norm in the backend's form."""
        return self._backend.parameters(self.vector(name, size))

    def halves(self, parts: Sequence[tuple[str, int]]) -> bool:
        """True if the weights of all these modules ``(name, out_features)`` are bfloat16."""
        entry = self._checkpoint.tensors.entry
        return all(entry(f"{name}.weight").dtype == "BF16" for name, _ in parts)

    def linear(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool
    ) -> PackedLinear:
        """Pack the modules ``(name, out_features)`` into one matrix, with biases if requested."""
        weights = [self.take(f"{name}.weight", (out, in_features)) for name, out in parts]
        if len({w.dtype for w in weights}) > 1:
            weights = [widened(w) for w in weights]
        biases = [self.vector(f"{name}.bias", out) for name, out in parts] if bias else []
        packed = self._backend.pack_linear(weights, np.concatenate(biases) if bias else None)
        self.packed_bytes += packed.nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
        return packed

    def finish(self, unused: Sequence[str] = ()) -> None:
        """Report the end. Raises CheckpointError for weights that the model does not use.

        ``unused``: tensors that may be present without being used.
        """
        for name in self._checkpoint.tensors:
            known = name in self._taken or name in unused or name.endswith(_IGNORED_SUFFIXES)
            if not known:
                raise CheckpointError(
                    f"{self._checkpoint.tensors.path(name)}: tensor '{name}' is not used by "
                    f"{self._checkpoint.config.architecture} with this config.json"
                )
        if self._on_progress is not None:
            self._on_progress(self._total, self._total)


def widened(tensor: Weights) -> F32:
    """Return a float32 copy; uint16 arrays hold bfloat16 bits."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)
