"""The model interface for pipelines: rows in, logits or hidden states out.

Invariant: a model does not depend on requests. It gets rows grouped by sequence, each with its
slot in the KV cache. The pipeline relates rows and results to requests.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tiled_images import SeenImages
from baton.proto.contexts.validators import validate_text_only
from baton.proto.errors import BatonError, InputError
from baton.proto.layout import KVLayout
from baton.proto.prompt_log_probs import Records

from ..cache.paged_cache import PagedCache
from ..kernels.backend import Backend
from ..kernels.memory import Allocate, aligned_zeros, host_pool
from ..scheduling.plan import Chunk, ChunkImage

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
LayerDone = Callable[[int], None]
ScoreDone = Callable[[int, int, Records], None]


@dataclass(slots=True, frozen=True)
class FeatureRows:
    """Features of an image for rows of a step.

    ``rows``: int32 ``[n]``. ``features``: ``[n, hidden]``, they replace the rows' embeddings.
    ``deep``: for each of the first layers ``[n, hidden]``, added to the rows after that layer.
    """

    rows: I32
    features: F32
    deep: tuple[F32, ...] = ()


@dataclass(slots=True, frozen=True)
class ScoredRows:
    """Rows whose logits give log-probabilities of known tokens.

    ``rows``: int32 ``[k]``, indices into :attr:`ModelInputs.logit_rows`. ``targets``: int32
    ``[k]``. ``top``: number of the most likely tokens to report beside each.
    """

    rows: I32
    targets: I32
    top: int


@dataclass(slots=True)
class ModelInputs:
    """Rows of one forward pass, grouped by sequence.

    ``tokens``, ``positions``: int32 ``[T]``. ``slots``: int64 ``[T]``, cache slot of each
    row. ``block_tables``: int32 ``[S, N]``, padded with 0. ``row_offsets``: int32 ``[S+1]``.
    ``logit_rows``: int32 ``[R]``, ascending, rows whose results are wanted. ``pool``: KV pool
    ``[L, NB, 2, Hk, BS, D]``, written at ``slots``, read through the block tables.
    ``layer_done(n)``: called when keys and values of layers ``0 .. n`` are final; 0 reports other
    progress. ``plan``: the backend's attention plan, for uploaded rows.

    ``rope_positions``: int32 ``[T]``, or ``[3, T]`` for time, row and column; None: ``positions``.
    ``rope_deltas``: int32 ``[S]``, rope position minus position of the next token of each sequence.
    ``cos_sin``: angles ``[N, D]`` that ``rope_positions`` index instead of the model's own table.
    ``images``: parts of images, with rows of the step. ``features``: their features.
    ``seen``: of each sequence, the images that cross-attention reads, or empty. ``cross``: the
    model's plan for them, for uploaded rows.

    ``scored``: groups of rows with known next tokens. The model calls ``score_done(i, first,
    records)`` with log-probabilities of group i from its row ``first`` on, in parts.
    ``sample_rows``: int32, indices into ``logit_rows`` of the rows that sample; None: all.
    """

    tokens: I32
    positions: I32
    slots: I64
    block_tables: I32
    row_offsets: I32
    logit_rows: I32
    pool: F32
    layer_done: LayerDone | None = None
    plan: object = None
    rope_positions: I32 | None = None
    rope_deltas: I32 | None = None
    cos_sin: F32 | None = None
    images: tuple[ChunkImage, ...] = ()
    features: tuple[FeatureRows, ...] = ()
    seen: tuple[SeenImages | None, ...] = ()
    cross: object = None
    scored: tuple[ScoredRows, ...] = ()
    score_done: ScoreDone | None = None
    sample_rows: I32 | None = None


@dataclass(slots=True, frozen=True)
class ModelOutputs:
    """Results of the wanted rows, float32, valid until the model's next call.

    ``next_token_logits``: ``[R, vocab]``, of the last row of each sequence that samples. On a GPU
    rows are padded to a multiple of 4.
    ``logits``: ``[T, vocab]``, of all rows, from models that return them. ``hidden_states``:
    ``[R, hidden]``, after the last norm, from embedding models.
    """

    next_token_logits: F32 | None = None
    logits: F32 | None = None
    hidden_states: F32 | None = None


class PipelineModel(ABC):
    """A loaded model; called by one thread."""

    max_length: int
    """Largest number of positions served."""
    vocab_size: int
    weights_bytes: int
    encode_seconds: float = 0.0
    """Seconds spent on encoding images, since the start."""

    def check(self, context: TextContext) -> None:
        """Raise InputError if the model cannot run the context; by default if it has images."""
        validate_text_only(context)

    def refusal(self, image: ChunkImage) -> BatonError | None:
        """Return why the model cannot encode an image, or None."""
        return InputError("this model takes no images")

    @abstractmethod
    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Run the rows. Raises ValueError for ids, positions or blocks out of range."""

    @abstractmethod
    def prepare_initial_token_inputs(self, context_batch: Sequence[Chunk]) -> ModelInputs:
        """Lay chunks of contexts out as rows.

        A chunk is a snapshot of a context, so another thread may read it while the context
        grows.
        """

    @abstractmethod
    def prepare_next_token_inputs(
        self, next_tokens: I32, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """Lay out one row for the next token of each sequence; block tables must have room for it.

        ``next_tokens``: int32 ``[S]``, in the order of ``prev_model_inputs``.
        """

    def compute_log_probabilities(
        self,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Sequence[int],
        batch_top_n: Sequence[int],
        batch_echo: Sequence[bool],
    ) -> list[TokenLogProbs | None]:
        """Return log-probs of sampled tokens and of the ``batch_top_n`` likeliest; 0 gives None."""
        raise NotImplementedError(f"{type(self).__name__} computes no log-probabilities")

    def estimate_memory_footprint(self) -> int:
        """Return the bytes available for KV memory on this machine after loading the weights."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, frozen=True)
class KVManager:
    """The KV memory of one modality: ``pool`` ``[L, NB, 2, Hk, BS, D]`` and its layout."""

    layout: KVLayout
    pool: F32

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return int(self.pool.shape[1])

    def new_cache(self) -> PagedCache:
        """Create the bookkeeping of all blocks. Only one cache may be in use at a time."""
        return PagedCache(self.num_blocks, self.layout.block_size)


class KVCacheMixin:
    """A model with a paged KV cache, described by ``kv_layout``."""

    kv_layout: KVLayout

    def estimate_kv_cache_size(self, available_cache_memory: int) -> int:
        """Return the bytes of the whole blocks that fit into ``available_cache_memory``."""
        block = self.kv_layout.block_bytes * self.kv_layout.num_layers
        return max(0, available_cache_memory) // block * block

    def load_kv_manager(
        self, session: Backend, available_cache_memory: int, allocate: Allocate = aligned_zeros
    ) -> KVManager:
        """Allocate KV memory on the device of ``session``; one manager serves one modality.

        ``allocate`` allocates host memory. Raises ValueError if not even one block fits.
        """
        layout = self.kv_layout
        size = self.estimate_kv_cache_size(available_cache_memory)
        if not size:
            raise ValueError(f"{available_cache_memory} bytes are too few for one KV block")
        blocks = size // (layout.block_bytes * layout.num_layers)
        shape = (layout.num_layers, blocks, *layout.block_shape)
        return KVManager(layout, session.kv_pool(shape, allocate, layout.dtype))


def make_pool(layout: KVLayout, blocks: int, allocate: Allocate = aligned_zeros) -> F32:
    """Allocate a pool of ``blocks`` blocks in host memory; see :func:`host_pool`."""
    shape = (layout.num_layers, blocks, *layout.block_shape)
    return host_pool(shape, allocate, layout.dtype)


def shared_layers(layout: KVLayout, blocks: int) -> F32:
    """Return a pool in host memory whose layers share the memory of one.

    For models whose keys and values are read by their own layer alone.
    """
    layer = make_pool(msgspec.structs.replace(layout, num_layers=1), blocks)
    shape = (layout.num_layers, *layer.shape[1:])
    return np.lib.stride_tricks.as_strided(layer, shape, (0, *layer.strides[1:]))


def lay_out(chunks: Sequence[Chunk], pool: F32) -> ModelInputs:
    """Lay chunks out as rows: positions, cache slots, padded tables, offsets."""
    block_size = pool.shape[4]
    lengths = np.array([len(c.tokens) for c in chunks], np.int32)
    starts = np.array([c.start for c in chunks], np.int32)
    offsets = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    tables = np.zeros((len(chunks), max(len(c.block_table) for c in chunks)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.block_table)] = chunk.block_table
    sequence = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(offsets[-1], dtype=np.int32) + (starts - offsets[:-1])[sequence]
    blocks = tables[sequence, positions // block_size].astype(np.int64)
    seen = tuple(chunk.seen for chunk in chunks)
    sampling = [i for i, c in enumerate(chunks) if c.sample is not None]
    rope, deltas = _rope(chunks, positions, sequence)
    logit_rows = offsets[1:][sampling] - np.int32(1)
    scored: tuple[ScoredRows, ...] = ()
    sample_rows = None
    if any(c.score is not None for c in chunks):
        logit_rows, scored, sample_rows = _scored(chunks, offsets, logit_rows)
    return ModelInputs(
        tokens=np.concatenate([c.tokens for c in chunks]).astype(np.int32, copy=False),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=tables,
        row_offsets=offsets,
        logit_rows=logit_rows,
        pool=pool,
        rope_positions=rope,
        rope_deltas=deltas,
        images=tuple(
            replace(image, row=int(offset) + image.row)
            for chunk, offset in zip(chunks, offsets[:-1], strict=True)
            for image in chunk.images
        ),
        seen=seen if any(seen) else (),
        scored=scored,
        sample_rows=sample_rows,
    )


def _scored(
    chunks: Sequence[Chunk], offsets: I32, sampling: I32
) -> tuple[I32, tuple[ScoredRows, ...], I32]:
    """Return ``logit_rows``, ``scored`` and ``sample_rows`` of :class:`ModelInputs`.

    ``sampling``: the rows that sample.
    """
    groups = [
        (np.arange(offset, offset + len(c.score.targets), dtype=np.int32), c.score)
        for offset, c in zip(offsets[:-1], chunks, strict=True)
        if c.score is not None
    ]
    every = np.unique(np.concatenate([sampling, *(rows for rows, _ in groups)]))

    def places(rows: I32) -> I32:
        return np.searchsorted(every, rows).astype(np.int32)

    scored = tuple(ScoredRows(places(rows), one.targets, one.top) for rows, one in groups)
    return every, scored, places(sampling)


def _rope(
    chunks: Sequence[Chunk], positions: I32, sequence: npt.NDArray[np.int64]
) -> tuple[I32 | None, I32 | None]:
    """Return ``rope_positions`` and ``rope_deltas`` of :class:`ModelInputs`."""
    apart = any(c.rope_positions is not None for c in chunks)
    if not apart and not any(c.rope_delta for c in chunks):
        return None, None
    deltas = np.array([c.rope_delta for c in chunks], np.int32)
    shifted = positions + deltas[sequence]
    if not apart:
        return shifted, deltas
    rope, row = np.empty((3, len(positions)), np.int32), 0
    for chunk in chunks:
        rows = slice(row, row := row + len(chunk.tokens))
        given = chunk.rope_positions
        rope[:, rows] = shifted[rows] if given is None else given
    return rope, deltas


def uploaded(inputs: ModelInputs, backend: Backend) -> ModelInputs:
    """Return the rows in the memory that the backend's kernels read."""
    rope = inputs.rope_positions
    return replace(
        inputs,
        rope_positions=None if rope is None else backend.upload(rope),
        tokens=backend.upload(inputs.tokens),
        positions=backend.upload(inputs.positions),
        slots=backend.upload(inputs.slots),
        block_tables=backend.upload(inputs.block_tables),
        row_offsets=backend.upload(inputs.row_offsets),
        logit_rows=backend.upload(inputs.logit_rows),
        plan=backend.plan_attention(inputs.row_offsets, inputs.positions),
    )


def narrowed(inputs: ModelInputs) -> ModelInputs:
    """Return a batch of only the wanted rows; ``inputs`` itself if all are wanted."""
    rows = inputs.logit_rows
    if len(rows) == len(inputs.tokens):
        return inputs
    return replace(
        inputs,
        tokens=inputs.tokens[rows],
        positions=inputs.positions[rows],
        slots=inputs.slots[rows],
        row_offsets=np.searchsorted(rows, inputs.row_offsets).astype(np.int32),
        logit_rows=np.arange(len(rows), dtype=np.int32),
        rope_positions=None if inputs.rope_positions is None else inputs.rope_positions[..., rows],
        images=(),
        features=(),
    )


def lay_out_next(next_tokens: I32, before: ModelInputs) -> ModelInputs:
    """Lay out the row after each sequence's last row: :func:`lay_out` without chunks."""
    count, block_size = len(next_tokens), before.pool.shape[4]
    rows = np.arange(count, dtype=np.int32)
    positions = before.positions[before.row_offsets[1:] - 1] + np.int32(1)
    blocks = before.block_tables[rows, positions // block_size].astype(np.int64)
    return ModelInputs(
        tokens=next_tokens,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=before.block_tables,
        row_offsets=np.arange(count + 1, dtype=np.int32),
        logit_rows=rows,
        pool=before.pool,
        rope_positions=None if before.rope_deltas is None else positions + before.rope_deltas,
        rope_deltas=before.rope_deltas,
        seen=before.seen,
    )
