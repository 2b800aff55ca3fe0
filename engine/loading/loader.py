"""Loads a model folder into a pipeline: backend, weights, KV memory, card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from baton import __version__
from baton.proto.contexts.speech import TTSContext
from baton.proto.errors import CheckpointError, ConfigError, InternalError
from baton.proto.layout import FEATURES, AudioCard, KVLayout, ModelCard, model_name
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults
from baton.runtime.process.cores import MAX_THREADS, Threads, default_threads, plural
from baton.runtime.process.log import get_logger
from baton.runtime.process.memory import size_text

from ..audio.chunks import codec_fingerprint, read_layout
from ..audio.codec_kernels import codec_numerics
from ..kernels.backend import Backend
from ..kernels.fp8 import DTYPE as FP8
from ..kernels.host_backend import HostBackend
from ..kernels.load import load_backend
from ..kernels.memory import Allocate, aligned_zeros, blocks_beside_widened, widened_bytes
from ..kernels.quantized import NUMERICS as QUANTIZED_NUMERICS
from ..models.contexts import contexts_of
from ..models.registry import architecture_of
from ..models.weights import Progress
from ..pipeline.embeddings import EmbeddingsPipeline
from ..pipeline.model import KVManager, PipelineModel
from ..pipeline.steps import StepComputer
from ..pipeline.text_generation import TextGenerationPipeline
from .checkpoint import Checkpoint, load_checkpoint
from .embedding_config import (
    EMBED,
    GENERATE,
    EmbeddingSettings,
    load_embedding_settings,
)  # fmt: skip
from .json_files import read_json
from .kv_types import AUTO, set_kv_type
from .model_config import CrossConfig, ModelConfig, stated_sizes
from .own_family import own_family
from .runner_config import RunnerConfig, with_folder
from .tasks import model_task

F32 = npt.NDArray[np.float32]
_log = get_logger()

Model = TypeVar("Model")
_MOST_PACKED, _MOST_PADDING = 16, 64 << 20
"""Limit of the packed weights by their bytes in the files; unused memory costs nothing."""


@dataclass(slots=True, frozen=True)
class Runner:
    """A loaded text model."""

    card: ModelCard
    pipeline: TextGenerationPipeline
    backend: Backend
    generation_defaults: SamplingParamsGenerationConfigDefaults

    @property
    def pool(self) -> F32:
        """The KV pool ``[L, NB, 2, Hk, BS, D]``, shared with the pipeline."""
        return self.pipeline.pool

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.pipeline.kv.num_blocks


@dataclass(slots=True, frozen=True)
class EmbeddingRunner:
    """A loaded embedding model."""

    card: ModelCard
    pipeline: EmbeddingsPipeline
    backend: Backend


def _task(checkpoint: Checkpoint, config: RunnerConfig) -> str:
    return model_task(checkpoint.config, checkpoint.folder, config.task)


def load_runner(
    config: RunnerConfig,
    on_progress: Progress | None = None,
    allocate: Allocate = aligned_zeros,
    backend: Backend | None = None,
    weights: int = -1,
) -> Runner:
    """Load a text model.

    ``on_progress(done, total)``: bytes of weights packed so far. ``allocate``: allocates the memory
    of the KV pool, which may be shared. ``backend``: used instead of the configured backend.
    ``weights``: descriptor of memory that other workers of the model share; -1 without any.
    Raises :class:`CheckpointError` for the folder, :class:`ConfigError` for the settings.
    """
    config = with_folder(config)
    checkpoint = load_checkpoint(config.model)
    generator = architecture_of(checkpoint.config, checkpoint.folder).generator
    own = own_family()
    if generator is None or _task(checkpoint, config) != GENERATE:
        raise ConfigError(f"{checkpoint.folder} is an embedding model; it cannot generate text")
    make = generator()
    length = checkpoint.served_length(config.max_length)
    backend = backend or _load_backend(config)
    if own is not None:
        if not backend.on_host:
            raise ConfigError(f"{own.said} runs on the CPU: leave --device cuda out")
        make = own.decoder(read_json(checkpoint.folder / "config.json"), make)
        weights = -1  # the class may load them in another way
    set_kv_type(checkpoint, backend, config.kv_type, config.kv_types)
    layout = _layout(config, checkpoint, backend)
    if not backend.on_host:
        from ..pipeline.device_steps import check_device

        check_device(checkpoint.folder, checkpoint.config, layout, tower=config.vision)
    if config.num_blocks or config.kv_bytes or backend.on_host:
        _num_blocks(config.num_blocks, config.kv_bytes, layout)  # fail before reading the weights
    extra = {"vision": False} if make.sees and not config.vision else {}
    with _sizes_in_errors(checkpoint.config):
        model = with_shared_weights(
            checkpoint,
            backend,
            weights,
            partial(
                make,
                checkpoint,
                backend,
                length,
                on_progress,
                block_size=config.block_size,
                **extra,
            ),
            tower=not extra,
        )
    count, kv_bytes = config.num_blocks, config.kv_bytes
    if not backend.on_host and not count and not kv_bytes:
        kv_bytes = device_bytes(config, backend) - model.weights_bytes
        count = max(0, blocks_beside_widened(kv_bytes, layout, length))
    blocks = _num_blocks(count, kv_bytes, layout)
    size = blocks * layout.block_bytes * layout.num_layers
    served = _fit_pool(length, blocks, layout)
    if not backend.on_host:
        space = widened_bytes(layout, served)
        _state_memory(config, backend, model.weights_bytes, size, space)
    kv = model.load_kv_manager(backend, size, allocate)
    numerics = _numerics(checkpoint, backend, length)
    card = _card(config, checkpoint, numerics, layout, served, model.weights_bytes, backend)
    checkpoint.tensors.release_pages()
    computer = _device_steps(model, backend, served, kv)
    pipeline = TextGenerationPipeline(model, kv, config.layer_group, computer)
    return Runner(card, pipeline, backend, checkpoint.generation.defaults)


@contextmanager
def _sizes_in_errors(config: ModelConfig) -> Iterator[None]:
    """Add the sizes of config.json to the error about a tensor that does not fit them."""
    try:
        yield
    except CheckpointError as error:
        if "tensor '" not in str(error):
            raise
        raise CheckpointError(f"{error} ({stated_sizes(config)})") from None


def device_bytes(config: RunnerConfig, backend: Backend) -> int:
    """Return the bytes of a GPU's memory that a worker may use."""
    return int(backend.memory_bytes() * config.gpu_memory_utilization / config.device_sharers)


def _state_memory(
    config: RunnerConfig, backend: Backend, weights: int, kv: int, widened: int
) -> None:
    """Log how a worker divides its GPU's memory. Raises ConfigError if the KV blocks do not fit.

    ``widened``: bytes for a layer's blocks of an int8 pool as bfloat16. Another process may have
    taken memory since, so an allocation can still fail.
    """
    total, free = backend.memory_bytes(), backend.free_bytes()
    sizes = {"total": total, "free": free, "weights": weights, "kv": kv, "widened": widened}
    _log.info("memory.device", **sizes, workers=config.device_sharers)
    if kv + widened > free:
        shown = {name: size_text(size) for name, size in sizes.items()}
        beside = f" and {shown['widened']} to widen a context's int8 blocks" if widened else ""
        raise ConfigError(
            f"{shown['kv']} of KV blocks{beside} do not fit: the GPU has {shown['total']}, of "
            f"which {shown['free']} are free beside {shown['weights']} of weights of this worker; "
            "if other processes use this GPU, divide it by gpu_memory_utilization, or give "
            "kv_memory"
        )


def with_shared_weights(
    checkpoint: Checkpoint,
    backend: Backend,
    weights: int,
    load: Callable[[], Model],
    *,
    tower: bool,
) -> Model:
    """Load a model with packed weights in shared memory, or private ones if that is impossible.

    ``weights``: descriptor of the memory; -1: none. ``tower``: whether a model that sees loads all
    of it.
    """
    if weights < 0 or backend.name != "cpu":
        return load()
    from ..kernels.cpu import CpuBackend
    from ..kernels.shared_weights import OtherWeights

    if not isinstance(backend, CpuBackend):
        raise InternalError(f"{backend!r} has another name than its own")
    limit = _MOST_PACKED * checkpoint.tensors.nbytes + _MOST_PADDING
    try:
        with backend.sharing(weights, _weights_key(checkpoint, tower=tower), limit):
            model = load()
    except (OSError, OtherWeights) as error:
        _log.warning("weights.private", error=str(error) or "the memory holds other weights")
        return load()
    _log.info("weights.shared", nbytes=backend.shared_bytes)
    return model


def _weights_key(checkpoint: Checkpoint, *, tower: bool) -> str:
    """Name the weights of a checkpoint. Samples of the data do not show every edit of a file."""
    digest = blake2b(f"{__version__}/{tower}/{checkpoint.fingerprint()}".encode(), digest_size=16)
    for path in sorted({checkpoint.tensors.path(name) for name in checkpoint.tensors}):
        found = path.stat()
        digest.update(
            f"{path.resolve()} {found.st_size} {found.st_mtime_ns} {found.st_ino}".encode()
        )
    return digest.hexdigest()


def threads_of(config: RunnerConfig) -> Threads:
    """Return the number of compute threads that a worker with this configuration has, and why."""
    if config.threads:
        return Threads(config.threads, "as set")
    return default_threads(config.thread_sharers, config.threads_taken)


def load_host_kernels(config: RunnerConfig) -> HostBackend:
    """Load the CPU's kernels. Raises ConfigError for a wrong number of threads."""
    if not 0 <= config.threads <= MAX_THREADS:
        raise ConfigError(f"threads {config.threads} must be 0 to {MAX_THREADS}")
    asked = threads_of(config).count
    kernels = load_backend(config.backend, threads=asked)
    if kernels.threads < asked and kernels.name == "cpu":
        _log.warning("threads.refused", asked=asked, started=kernels.threads)
    return kernels


def device_title(config: RunnerConfig, kernels: Backend) -> str:
    """Return the text for the device of a worker: its GPU, or the CPU with threads and reason."""
    if kernels.gpu is not None:
        return kernels.gpu.device
    count, why = kernels.threads, threads_of(config).why
    reason = why if kernels.name == "cpu" else f"{kernels.name} kernels"
    return f"cpu, {count} {plural(count, 'thread')} ({reason})"


def _load_backend(config: RunnerConfig) -> Backend:
    if config.backend != "cuda":
        return load_host_kernels(config)
    from ..pipeline.device_steps import load_device

    return load_device(config.ordinal, config.instance)


def _device_steps(
    model: PipelineModel, backend: Backend, length: int, kv: KVManager
) -> StepComputer | None:
    """Return the object that computes steps on a GPU; None for a model on the host."""
    if backend.on_host:
        return None
    from ..pipeline.device_steps import make_device_steps

    return make_device_steps(model, backend, length, kv)


def load_embedder(
    config: RunnerConfig, on_progress: Progress | None = None, weights: int = -1
) -> EmbeddingRunner:
    """Load an embedding model. Parameters and errors as in :func:`load_runner`."""
    config = with_folder(config)
    checkpoint = load_checkpoint(config.model)
    entry = architecture_of(checkpoint.config, checkpoint.folder)
    if entry.embedder is None or _task(checkpoint, config) != EMBED:
        raise ConfigError(f"{checkpoint.folder} is a text model; to embed with it set task=embed")
    if config.backend == "cuda":
        raise ConfigError("embedding models run on the CPU: leave --device cuda out")
    if config.kv_type != AUTO:
        raise ConfigError("embedding models keep no keys and values: leave --kv-type out")
    settings = load_embedding_settings(checkpoint.folder) or entry.pooling
    length = _embedded_length(config, checkpoint, settings)
    backend = load_host_kernels(config)
    layout = _layout(config, checkpoint, backend)
    block_size = config.block_size
    load = partial(entry.embedder, checkpoint, backend, length, on_progress, block_size=block_size)
    with _sizes_in_errors(checkpoint.config):
        model = with_shared_weights(checkpoint, backend, weights, load, tower=True)
    numerics = f"{_numerics(checkpoint, backend, length)}/{settings.numerics}"
    card = msgspec.structs.replace(
        _card(config, checkpoint, numerics, layout, length, model.weights_bytes, backend),
        task=EMBED,
        embedding_size=checkpoint.config.hidden_size,
    )
    checkpoint.tensors.release_pages()
    return EmbeddingRunner(card, EmbeddingsPipeline(model, layout, settings), backend)


def _embedded_length(
    config: RunnerConfig, checkpoint: Checkpoint, settings: EmbeddingSettings
) -> int:
    length = checkpoint.served_length(config.max_length)
    return length if config.max_length else min(length, settings.max_length or length)


def _layout(config: RunnerConfig, checkpoint: Checkpoint, backend: Backend) -> KVLayout:
    if config.block_size < 1:
        raise ConfigError(f"block_size {config.block_size} must be positive")
    model = checkpoint.config
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=backend.kv_dtype,
    )


def _num_blocks(num_blocks: int, kv_bytes: int, layout: KVLayout) -> int:
    blocks = num_blocks or kv_bytes // (layout.block_bytes * layout.num_layers)
    if blocks < 1:
        raise ConfigError(
            f"the KV pool is too small: num_blocks {num_blocks}, kv_bytes {kv_bytes}; one "
            f"block needs {layout.block_bytes * layout.num_layers} bytes"
        )
    return blocks


def _fit_pool(length: int, blocks: int, layout: KVLayout) -> int:
    """Return the longest context served: a longer one than the pool holds could never run.

    The model itself keeps ``length``, which may have decided its rope frequencies.
    """
    return min(length, blocks * layout.block_size)


def _card(
    config: RunnerConfig,
    checkpoint: Checkpoint,
    numerics: str,
    layout: KVLayout,
    length: int,
    weights_bytes: int,
    backend: Backend,
) -> ModelCard:
    speech = _speech(checkpoint)
    cross = checkpoint.config if isinstance(checkpoint.config, CrossConfig) else None
    name = config.name or model_name(str(Path(config.model).resolve()))
    if not name:
        raise CheckpointError(f"{config.model}: no model name can be taken from this path; set one")
    return ModelCard(
        name=name,
        architecture=checkpoint.config.architecture,
        fingerprint=_fingerprint(checkpoint, speech, full=config.full_digest),
        numerics=numerics,
        vocab_size=checkpoint.config.vocab_size,
        max_length=length,
        eos_token_ids=sorted(checkpoint.generation.eos_token_ids),
        layout=layout,
        # The images of cross-attention fill the rows of blocks in an order of their own.
        converts=backend.on_host and cross is None,
        image_positions=0 if cross is None else cross.image_positions,
        image_tiles=0 if cross is None else cross.vision.max_tiles,
        weights_bytes=weights_bytes,
        kinds=_kinds(checkpoint, speech),
        features=list(FEATURES),
        audio=speech,
    )


def _fingerprint(checkpoint: Checkpoint, speech: AudioCard | None, *, full: bool) -> str:
    """Return the fingerprint of the model; of a speech model, it includes the codec.

    Otherwise a stream could continue at a decode worker whose codec makes other samples.
    """
    own = checkpoint.fingerprint(full=full)
    if speech is None:
        return own
    both = own + codec_fingerprint(checkpoint.folder, full=full)
    return blake2b(both.encode(), digest_size=16).hexdigest()


def _kinds(checkpoint: Checkpoint, speech: AudioCard | None) -> list[str]:
    """Return the kinds of contexts that the folder's model takes."""
    kinds = contexts_of(checkpoint.config.architecture).kinds
    return [*kinds, TTSContext.__name__] if speech is not None else list(kinds)


def _speech(checkpoint: Checkpoint) -> AudioCard | None:
    """Return the audio of a speech model's folder, None for another model.

    Raises CheckpointError if its speech.json, or the codec that it names, does not fit the model.
    """
    if not contexts_of(checkpoint.config.architecture).speaks:
        return None
    found = read_layout(checkpoint.folder)
    if found is None:
        return None
    layout, codec = found
    layout.check(checkpoint.config.vocab_size)
    return AudioCard(
        sample_rate=codec.sampling_rate,
        frame_samples=codec.frame_samples,
        frame_tokens=layout.frame_tokens,
        codebook_size=layout.codebook_size,
    )


def _numerics(checkpoint: Checkpoint, backend: Backend, length: int) -> str:
    """Return a name for everything except the weights that decides a result's bits."""
    dtypes = checkpoint.weight_dtypes()
    parts = [backend.numerics, "+".join(dtypes)]
    if backend.quantized_kinds.intersection(dtypes) - {FP8}:  # the bits of bfloat16 weights
        parts.append(QUANTIZED_NUMERICS)
    if backend.kv_rounding != backend.kv_types[0]:
        parts.append(f"kv-{backend.kv_rounding}")
    if length > checkpoint.config.rope.default_length():
        parts.append(f"rope-{length}")  # here the served length decides the rope frequencies
    own = own_family()
    if own is not None:
        parts.append(own.numerics(read_json(checkpoint.folder / "config.json")))
    if _speech(checkpoint) is not None:
        parts.append(codec_numerics(backend))
    return "/".join(part for part in parts if part)
