"""Loads one half of a picture model: the text encoders, or the transformer and the VAE decoder.

Both halves open the whole folder, so that their cards are equal, but read the weights of their
parts alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.contexts.pixels import PixelContext
from baton.proto.errors import CheckpointError, ConfigError
from baton.proto.layout import FEATURES, ModelCard, model_name
from baton.proto.picture_requests import (
    PICTURE_MULTIPLE,
    STATE_KEY_TOKENS,
    STATE_VOCABULARY,
    longest_row,
)

from ..kernels.host_backend import HostBackend, PictureBackend
from ..kernels.load import load_backend
from ..kernels.memory import Allocate, aligned_zeros, host_pool
from ..loading.checkpoint import digest_tensors
from ..loading.embedding_config import DRAW
from ..loading.kv_types import AUTO
from ..loading.loader import device_bytes, load_host_kernels
from ..loading.runner_config import RunnerConfig
from ..models.weights import Progress
from ..pipeline.model import KVManager
from .folder import DRAWING_PARTS, PictureFolder, open_folder
from .memory import largest_picture, picture_bytes
from .pipeline import Denoiser, PromptEncoder
from .prompt_decoder import PROMPT_BLOCK_SIZE
from .serving import DrawingPipeline, EncodingPipeline

F32 = npt.NDArray[np.float32]

_DEVICE_SPACE = 256 << 20
"""Memory of a GPU for patches and scores, of which limited parts are computed at once."""


@dataclass(slots=True, frozen=True)
class PictureRunner:
    """A loaded half of a picture model."""

    card: ModelCard
    pipeline: EncodingPipeline | DrawingPipeline
    backend: HostBackend
    """Moves blocks of the pool, which is in host memory also if a GPU computes."""

    @property
    def pool(self) -> F32:
        """The pool of states ``[1, NB, 2, 1, BS, D]``, shared with the pipeline."""
        return self.pipeline.pool

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.pipeline.kv.num_blocks


def load_encoder(
    config: RunnerConfig,
    on_progress: Progress | None = None,
    allocate: Allocate = aligned_zeros,
    backend: PictureBackend | None = None,
) -> PictureRunner:
    """Load the text encoders, for a prefill worker.

    Parameters and errors as in :func:`.loader.load_runner`.
    """
    folder = open_folder(config.model)
    backend = _checked(folder, backend or _backend(config))
    kv = _blocks(config, folder, allocate)
    encoder = PromptEncoder(folder, backend, on_progress)
    pipeline = EncodingPipeline(encoder, kv, folder.family.pooled_width)
    card = _card(config, folder, backend, kv, folder.family.encoder_parts)
    return PictureRunner(card, pipeline, _mover(backend))


def load_denoiser(
    config: RunnerConfig,
    on_progress: Progress | None = None,
    allocate: Allocate = aligned_zeros,
    backend: PictureBackend | None = None,
) -> PictureRunner:
    """Load transformer and VAE decoder, for a decode worker.

    Parameters and errors as in :func:`.loader.load_runner`.
    """
    folder = open_folder(config.model)
    backend = _checked(folder, backend or _backend(config))
    memory = _picture_memory(config, folder, backend)
    pixels = _largest(memory, folder)  # fail before reading the weights
    kv = _blocks(config, folder, allocate)
    denoiser = Denoiser(folder, backend, on_progress, memory=memory)
    pooled, unit = folder.family.pooled_width, folder.pixels_per_token
    pipeline = DrawingPipeline(denoiser, kv, pooled, unit)
    card = _card(config, folder, backend, kv, DRAWING_PARTS)
    card = msgspec.structs.replace(card, max_pixels=pixels)
    return PictureRunner(card, pipeline, _mover(backend))


def _picture_memory(config: RunnerConfig, folder: PictureFolder, backend: PictureBackend) -> int:
    """Return the bytes for the arrays of a picture; on a GPU by default the worker's share."""
    if config.picture_bytes or backend.on_host:
        return config.picture_bytes
    share = device_bytes(config, backend)
    return max(1, share - folder.parts_bytes(DRAWING_PARTS) - _DEVICE_SPACE)


def _largest(memory: int, folder: PictureFolder) -> int:
    """Return the most pixels of a picture; 0 without a limit."""
    if not memory:
        return 0
    pixels = largest_picture(folder, memory)
    if not pixels:
        least = picture_bytes(folder, PICTURE_MULTIPLE**2)
        raise ConfigError(
            f"picture_memory of {memory} bytes is too small: the smallest picture needs {least}"
        )
    return pixels


def _backend(config: RunnerConfig) -> PictureBackend:
    if config.backend != "cuda":
        return load_host_kernels(config)
    from ..kernels.cuda.cupy_device import CupyDevice
    from ..kernels.cuda.pictures import CudaPictures

    return CudaPictures(CupyDevice(config.ordinal, instance=config.instance))


def _checked(folder: PictureFolder, backend: PictureBackend) -> PictureBackend:
    """Raise ConfigError for a model that a GPU's kernels do not support; return the backend."""
    if backend.on_host:
        return backend
    from ..kernels.cuda import attention
    from ..kernels.cuda.pictures import refusal

    family, widths = folder.family, folder.vae.block_out_channels
    rows = {
        **family.widths,
        **{f"block_out_channels[{i}] of vae": width for i, width in enumerate(widths)},
    }
    why = refusal(rows, family.head_dim, max(widths))
    if family.decoder is not None and not why:
        group = family.decoder.num_heads // family.decoder.num_kv_heads
        why = attention.refusal(family.decoder.head_dim, PROMPT_BLOCK_SIZE, group)
    if why:
        raise ConfigError(f"{folder.folder}: {why}")
    return backend


def _mover(backend: PictureBackend) -> HostBackend:
    """Return the kernels that move blocks in host memory."""
    if backend.on_host:
        return load_backend(backend.name, threads=backend.threads)
    mover = load_backend()
    mover.computes, mover.gpu = backend, backend.gpu
    return mover


def _blocks(config: RunnerConfig, folder: PictureFolder, allocate: Allocate) -> KVManager:
    if config.block_size < STATE_KEY_TOKENS:
        raise ConfigError(
            f"block_size {config.block_size} is too small for pictures, at least "
            f"{STATE_KEY_TOKENS} are needed"
        )
    if config.kv_type != AUTO:
        raise ConfigError("the state of pictures is float32: leave --kv-type out")
    layout = folder.state_layout(config.block_size)
    blocks = config.num_blocks or config.kv_bytes // layout.block_bytes
    if blocks < 2:
        raise ConfigError(
            f"the KV pool is too small: num_blocks {config.num_blocks}, kv_bytes "
            f"{config.kv_bytes}; a picture needs at least 2 blocks of {layout.block_bytes} bytes"
        )
    return KVManager(layout, host_pool((1, blocks, *layout.block_shape), allocate))


def _card(
    config: RunnerConfig,
    folder: PictureFolder,
    backend: PictureBackend,
    kv: KVManager,
    parts: tuple[str, ...],
) -> ModelCard:
    name = config.name or model_name(str(Path(config.model).resolve()))
    if not name:
        raise CheckpointError(f"{config.model}: no model name can be taken from this path; set one")
    every = {
        part: folder.part(part).tensors for part in (*folder.family.encoder_parts, *DRAWING_PARTS)
    }
    digest = blake2b(digest_size=16)
    for model in (*folder.family.configs, folder.vae, folder.scheduler):
        digest.update(msgspec.msgpack.encode(model))
    for part, tensors in every.items():
        digest.update(part.encode())
        digest_tensors(digest, tensors, full=config.full_digest)
    dtypes = sorted({store.entry(name).dtype for store in every.values() for name in store})
    size = kv.layout.block_size
    return ModelCard(
        name=name,
        architecture=folder.family.architecture,
        fingerprint=digest.hexdigest(),
        numerics=f"{backend.numerics}/{'+'.join(dtypes)}",
        vocab_size=STATE_VOCABULARY,
        max_length=min(config.max_length or longest_row(size), kv.num_blocks * size),
        eos_token_ids=[],
        layout=kv.layout,
        weights_bytes=sum(every[part].nbytes for part in parts),
        task=DRAW,
        kinds=[PixelContext.__name__],
        features=list(FEATURES),
    )
