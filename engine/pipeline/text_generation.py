"""Running a plan: rows out of chunks, one forward pass, one token per sampling chunk.

Errors stay with the request that caused them: a chunk that does not fit the model or the
pool is left out of the pass, and a row with non-finite logits or an error in sampling fails
alone. What fails the pass itself fails every request in it, as the cause cannot be told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .models.decoder import Batch, Decoder, LayerDone
from .plan import Chunk, Sampled, StepPlan, StepResult
from .sampler import sample

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
OnLayers = Callable[[bytes, int], None]


class Executor:
    """Owns the forward pass over one KV pool; used from one thread.

    ``pool``: KV pool ``[L, NB, 2, Hk, BS, D]``. ``layer_group``: layers between two reports
    to ``on_layers``.
    """

    def __init__(self, model: Decoder, pool: F32, layer_group: int = 0) -> None:
        self.model = model
        self.pool = pool
        self.layers_done = 0  # since start; another thread may read it
        self.layer_group = layer_group or max(1, -(-len(pool) // 4))
        self._blocks, self._block_size = pool.shape[1], pool.shape[4]

    def execute(self, plan: StepPlan, on_layers: OnLayers | None = None) -> StepResult:
        """Run a plan and sample.

        ``on_layers(request, layer_end)`` is called while the step runs for every chunk with
        ``stream_layers``: keys and values of layers ``0 .. layer_end`` are in the pool.
        """
        began = time.perf_counter()
        failed: dict[bytes, str] = {}
        chunks, batch = self._admit(plan.chunks, failed)
        sampled = [] if batch is None else self._run(chunks, batch, on_layers, failed)
        seconds = time.perf_counter() - began
        return StepResult(plan.step, tuple(sampled), seconds, plan.num_tokens, failed)

    def _run(
        self,
        chunks: Sequence[Chunk],
        batch: Batch,
        on_layers: OnLayers | None,
        failed: dict[bytes, str],
    ) -> list[Sampled]:
        try:
            logits = self.model.forward(batch, self.pool, self._reporter(chunks, on_layers))
        except Exception as error:  # whatever it is, the loop must go on
            failed.update({c.request: f"forward pass: {_describe(error)}" for c in chunks})
            return []
        return sample_rows(logits, [c for c in chunks if c.sample is not None], failed)

    def _admit(
        self, chunks: Sequence[Chunk], failed: dict[bytes, str]
    ) -> tuple[Sequence[Chunk], Batch | None]:
        """Chunks the kernels can take, laid out; the others are failed."""
        chunks = _without(chunks, self._misfit, failed)
        batch = make_batch(chunks, self._block_size) if chunks else None
        if batch is None or self._in_range(batch.tokens, batch.block_tables):
            return chunks, batch
        # Only now, as it is rare, look for the culprits one by one.
        chunks = _without(chunks, self._stray, failed)
        return chunks, make_batch(chunks, self._block_size) if chunks else None

    def _misfit(self, chunk: Chunk) -> str | None:
        end = chunk.start + len(chunk.tokens)
        if not len(chunk.tokens) or chunk.start < 0 or end > self.model.max_length:
            return f"positions {chunk.start}..{end} outside 0..{self.model.max_length}"
        if len(chunk.block_table) * self._block_size < end:
            return f"{len(chunk.block_table)} blocks do not hold {end} tokens"
        return None

    def _stray(self, chunk: Chunk) -> str | None:
        if self._in_range(chunk.tokens, chunk.block_table):
            return None
        vocab = self.model.config.vocab_size
        return f"token ids outside 0..{vocab - 1} or blocks outside 0..{self._blocks - 1}"

    def _in_range(self, tokens: I32, blocks: I32) -> bool:
        return bool(
            tokens.min() >= 0
            and tokens.max() < self.model.config.vocab_size
            and blocks.min() >= 0
            and blocks.max() < self._blocks
        )

    def _reporter(self, chunks: Sequence[Chunk], on_layers: OnLayers | None) -> LayerDone:
        """What the model calls after each layer."""
        streaming = [c.request for c in chunks if c.stream_layers] if on_layers else []
        layers = len(self.pool)

        def layer_done(layer_end: int) -> None:
            self.layers_done += 1
            if on_layers and (layer_end % self.layer_group == 0 or layer_end == layers):
                for request in streaming:
                    on_layers(request, layer_end)

        return layer_done


def _without(
    chunks: Sequence[Chunk], fault: Callable[[Chunk], str | None], failed: dict[bytes, str]
) -> Sequence[Chunk]:
    """Chunks without a fault; the others go to ``failed``."""
    faults = {c.request: reason for c in chunks if (reason := fault(c)) is not None}
    failed.update(faults)
    return [c for c in chunks if c.request not in faults]


def make_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Lay chunks out as rows: positions, cache slots, padded tables, offsets."""
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
    sampling = [i for i, c in enumerate(chunks) if c.sample is not None]
    return Batch(
        tokens=np.concatenate([c.tokens for c in chunks]).astype(np.int32, copy=False),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=tables,
        row_offsets=offsets,
        logit_rows=(offsets[1:][sampling] - 1).astype(np.int64),
    )


def sample_rows(logits: F32, chunks: Sequence[Chunk], failed: dict[bytes, str]) -> list[Sampled]:
    """Draw a token per row of ``logits``; rows that cannot be drawn from go to ``failed``."""
    sampled = []
    # A sum is finite only if every logit is: NaN and infinities survive addition.
    finite = np.isfinite(logits.sum(axis=1))
    for row, chunk, usable in zip(logits, chunks, finite, strict=True):
        if chunk.sample is None:
            continue
        if not usable:
            failed[chunk.request] = "the model produced non-finite logits"
            continue
        try:
            token, logprobs = sample(row, chunk.sample)
        except Exception as error:  # one request's parameters, one failure
            failed[chunk.request] = f"sampling: {_describe(error)}"
            continue
        sampled.append(Sampled(chunk.request, token, logprobs))
    return sampled


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
