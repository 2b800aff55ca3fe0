"""From a model folder to something that executes plans: backend, weights, pool, card."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.errors import CheckpointError, ConfigError
from ..proto.layout import KVLayout, ModelCard
from ..proto.sampling import SamplingParamsGenerationConfigDefaults
from .checkpoint import Checkpoint, load_checkpoint
from .executor import Executor
from .kernels import load_backend
from .kernels.backend import Backend
from .kernels.memory import aligned_zeros
from .models.decoder import Progress
from .models.registry import build_model

F32 = npt.NDArray[np.float32]

DEFAULT_KV_BYTES = 256 << 20


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load and how much memory to give it.

    ``model``: folder. ``backend``: "auto", "cpu" or "numpy". ``block_size``: tokens per KV
    block. ``num_blocks`` or ``kv_bytes``: size of the pool (``num_blocks`` wins).
    ``max_length``: longest context served, 0 for the model's own limit; a pool that holds
    fewer tokens lowers it. ``name``: what clients call the model, by default the folder's
    name. ``layer_group``: layers between two reports of a streaming chunk, 0 for a quarter
    of the model. ``full_digest``: fingerprint all weight bytes instead of samples.
    """

    model: str
    backend: str = "auto"
    block_size: int = 16
    num_blocks: int = 0
    kv_bytes: int = DEFAULT_KV_BYTES
    max_length: int = 0
    name: str = ""
    layer_group: int = 0
    full_digest: bool = False


@dataclass(slots=True, frozen=True)
class Runner:
    """A loaded model. ``pool``: float32 ``[L, NB, 2, Hk, BS, D]``, shared with the executor."""

    card: ModelCard
    pool: F32
    executor: Executor
    backend: Backend
    generation_defaults: SamplingParamsGenerationConfigDefaults

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self.pool.shape[1])


def load_runner(config: RunnerConfig, on_progress: Progress | None = None) -> Runner:
    """Load a model.

    ``on_progress(done, total)``: bytes of weights packed so far. Raises
    :class:`CheckpointError` for the folder, :class:`ConfigError` for the settings.
    """
    checkpoint = load_checkpoint(config.model)
    length = _served_length(config, checkpoint)
    layout = _layout(config, checkpoint)
    blocks = _num_blocks(config, layout)
    backend = load_backend(config.backend)
    model = build_model(checkpoint, backend, length, on_progress)
    pool = make_pool(layout, blocks)
    numerics = _numerics(checkpoint, backend, length)
    served = _fit_pool(length, blocks, layout)
    card = _card(config, checkpoint, numerics, layout, served, model.weights_bytes)
    executor = Executor(model, pool, config.layer_group)
    return Runner(card, pool, executor, backend, checkpoint.generation.defaults)


def make_pool(layout: KVLayout, blocks: int) -> F32:
    """KV pool, float32 ``[L, NB, 2, Hk, BS, D]`` of zeros, aligned to cache lines.

    Zeros cost nothing until touched, and a block sent before it is full leaks no old memory.
    """
    shape = (layout.num_layers, blocks, *layout.block_shape)
    return aligned_zeros(4 * math.prod(shape)).view(np.float32).reshape(shape)


def _served_length(config: RunnerConfig, checkpoint: Checkpoint) -> int:
    rope = checkpoint.config.rope
    if not 0 <= config.max_length <= rope.ceiling():
        raise ConfigError(
            f"max_length {config.max_length} outside 1..{rope.ceiling()} of {checkpoint.folder}"
        )
    return config.max_length or rope.default_length()


def _layout(config: RunnerConfig, checkpoint: Checkpoint) -> KVLayout:
    if config.block_size < 1:
        raise ConfigError(f"block_size {config.block_size} must be positive")
    model = checkpoint.config
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
    )


def _num_blocks(config: RunnerConfig, layout: KVLayout) -> int:
    blocks = config.num_blocks or config.kv_bytes // (layout.block_bytes * layout.num_layers)
    if blocks < 1:
        raise ConfigError(
            f"the KV pool holds no block: num_blocks {config.num_blocks}, kv_bytes "
            f"{config.kv_bytes}, one block {layout.block_bytes * layout.num_layers} bytes"
        )
    return blocks


def _fit_pool(length: int, blocks: int, layout: KVLayout) -> int:
    """The longest context served: a longer one than the pool holds could never run.

    The model itself keeps ``length``, which may have chosen its rope frequencies.
    """
    return min(length, blocks * layout.block_size)


def _card(
    config: RunnerConfig,
    checkpoint: Checkpoint,
    numerics: str,
    layout: KVLayout,
    length: int,
    weights_bytes: int,
) -> ModelCard:
    name = config.name or Path(config.model).resolve().name
    if not name:
        raise CheckpointError(f"{config.model}: the model needs a name")
    return ModelCard(
        name=name,
        architecture=checkpoint.config.architecture,
        fingerprint=checkpoint.fingerprint(full=config.full_digest),
        numerics=numerics,
        vocab_size=checkpoint.config.vocab_size,
        max_length=length,
        eos_token_ids=sorted(checkpoint.generation.eos_token_ids),
        layout=layout,
        weights_bytes=weights_bytes,
    )


def _numerics(checkpoint: Checkpoint, backend: Backend, length: int) -> str:
    """Everything beside the weights that decides a result's bits."""
    parts = [backend.numerics, "+".join(checkpoint.weight_dtypes())]
    if length > checkpoint.config.rope.default_length():
        parts.append(f"rope-{length}")  # the served length chose the frequencies
    return "/".join(parts)
