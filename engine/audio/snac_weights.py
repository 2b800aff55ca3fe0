"""The folder of a SNAC codec: ``config.json`` and ``model.safetensors``.

Published SNAC folders have ``pytorch_model.bin``, a pickle, which is never read here:
``tools/convert_snac.py`` converts it. A convolution's weight is stored as a direction and a
length per output (weight norm). Both are folded into one matrix here.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError

from ..loading.json_files import read_json
from ..loading.safetensors import SINGLE_NAME, TensorStore, widened

F32 = npt.NDArray[np.float32]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Factors = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=1, le=64)], ...], msgspec.Meta(max_length=16)
]

_DIRECTION = ("parametrizations.weight.original1", "weight_v")
_LENGTH = ("parametrizations.weight.original0", "weight_g")
_UNUSED = ("encoder.",)


class SnacConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``config.json`` of a SNAC codec; the names and defaults are the package's.

    ``vq_strides``: latent steps per entry, of each codebook. ``decoder_rates``: factors by which
    the decoder raises the number of steps.
    """

    sampling_rate: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 44100
    encoder_dim: Size = 64
    encoder_rates: Factors = (3, 3, 7, 7)
    latent_dim: Size | None = None
    decoder_dim: Size = 1536
    decoder_rates: Factors = (7, 7, 3, 3)
    attn_window_size: int | None = 32
    codebook_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    codebook_dim: Size = 8
    vq_strides: Factors = (8, 4, 2, 1)
    noise: bool = True
    depthwise: bool = True

    @property
    def latent_width(self) -> int:
        """Channels of the decoder's input."""
        return self.latent_dim or self.encoder_dim << len(self.encoder_rates)

    @property
    def samples_per_latent(self) -> int:
        """Samples of audio per latent step."""
        return int(np.prod(self.decoder_rates, dtype=np.int64))

    @property
    def frame_latents(self) -> int:
        """Latent steps per frame; a frame has one entry of the coarsest codebook."""
        return self.vq_strides[0]

    @property
    def frame_samples(self) -> int:
        """Samples of audio per frame."""
        return self.frame_latents * self.samples_per_latent

    @property
    def frame_entries(self) -> tuple[int, ...]:
        """Entries per frame, of each codebook."""
        return tuple(self.vq_strides[0] // stride for stride in self.vq_strides)


def load_snac_config(folder: Path) -> SnacConfig:
    """Read ``config.json``. Raises CheckpointError for settings that are not supported."""
    path = folder / "config.json"
    try:
        config = msgspec.convert(read_json(path), SnacConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    problem = _problem(config)
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    return config


def _problem(config: SnacConfig) -> str:
    """Return why a codec with this config cannot be decoded, or an empty text."""
    strides = config.vq_strides
    if config.attn_window_size is not None:
        return f"attn_window_size {config.attn_window_size}: attention is not supported, only null"
    if not config.depthwise:
        return "depthwise false is not supported"
    if not config.decoder_rates or config.decoder_dim >> len(config.decoder_rates) == 0:
        return f"decoder_dim {config.decoder_dim} is too small for {config.decoder_rates}"
    if config.samples_per_latent > 1 << 16:
        return f"decoder_rates {config.decoder_rates} exceed 65536 samples per latent step"
    if not strides or strides[-1] != 1:
        return f"vq_strides {strides}: the last stride must be 1"
    if any(coarse % fine for coarse, fine in pairwise(strides)):
        return f"vq_strides {strides}: every stride must be a multiple of the next"
    return ""


class SnacWeights:
    """The tensors of a codec, folded and checked; rejects tensors that the decoder does not use."""

    def __init__(self, folder: Path) -> None:
        if not (folder / SINGLE_NAME).is_file() and (folder / "pytorch_model.bin").is_file():
            raise CheckpointError(
                f"{folder}: pytorch_model.bin is a pickle, which could run code when read; "
                f"convert it with tools/convert_snac.py {folder}"
            )
        self._tensors = TensorStore.open(folder)
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> F32:
        """Return a tensor as float32. Raises CheckpointError for another shape or a missing one."""
        found = self._tensors.entry(name).shape
        if found != shape:
            raise CheckpointError(
                f"{self._tensors.path(name)}: tensor '{name}' has shape {list(found)}, "
                f"config.json requires {list(shape)}"
            )
        self._taken.add(name)
        return widened(self._tensors.tensor(name))

    def folded(self, module: str, shape: tuple[int, ...]) -> F32:
        """Return ``length * direction / |direction|`` of a module, per index of the first axis.

        A module may also have a plain ``weight``.
        """
        for direction, length in zip(_DIRECTION, _LENGTH, strict=True):
            if f"{module}.{direction}" in self._tensors:
                return self._product(f"{module}.{direction}", f"{module}.{length}", shape)
        return self.take(f"{module}.weight", shape)

    def _product(self, direction: str, length: str, shape: tuple[int, ...]) -> F32:
        vectors = self.take(direction, shape).astype(np.float64)
        lengths = self.take(length, (shape[0], *(1 for _ in shape[1:]))).astype(np.float64)
        norms = np.sqrt(np.sum(vectors**2, axis=tuple(range(1, len(shape))), keepdims=True))
        if not (norms > 0).all():
            path = self._tensors.path(direction)
            raise CheckpointError(f"{path}: tensor '{direction}' has a vector of length 0")
        return np.asarray(vectors * (lengths / norms), np.float32)

    def leave(self, prefix: str) -> None:
        """Mark the tensors below ``prefix`` as known and unused."""
        self._taken.update(name for name in self._tensors if name.startswith(prefix))

    def finish(self) -> None:
        """Raise CheckpointError for tensors that the decoder neither used nor left."""
        for name in self._tensors:
            if name not in self._taken and not name.startswith(_UNUSED):
                path = self._tensors.path(name)
                raise CheckpointError(f"{path}: tensor '{name}' is not used with this config.json")
