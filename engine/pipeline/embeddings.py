"""Computes embeddings of texts: one forward pass per batch, pooling, scaling to length 1.

Invariant: a text's embedding depends only on its own tokens, not on the batch. Keys and values
are needed only within a layer, so all layers share the memory of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from baton.proto.contexts.generators import EmbeddingsOutput
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.validators import has_images
from baton.proto.ids import RequestID
from baton.proto.layout import KVLayout

from ..loading.embedding_config import EmbeddingSettings
from ..scheduling.plan import Chunk
from .model import F32, I32, PipelineModel, lay_out, shared_layers

_SMALLEST_NORM = np.float32(1e-12)


class EmbeddingsPipeline:
    """An embedding model with its pooling; for one thread.

    ``layout``: KV blocks of the model.
    """

    def __init__(self, model: PipelineModel, layout: KVLayout, settings: EmbeddingSettings) -> None:
        self.model = model
        self.settings = settings
        self.layers_done = 0  # since the start; other threads may read it
        self._layout = layout
        self._pool = shared_layers(layout, 1)

    def encode(self, batch: Mapping[RequestID, TextContext]) -> dict[RequestID, EmbeddingsOutput]:
        """Return the embeddings of the batch, without contexts the model cannot embed.

        Those are empty contexts, contexts above the model's length, with images or with ids outside
        the vocabulary, and contexts whose embedding is not finite.
        """
        texts = {r: c.tokens.all.astype(np.int32) for r, c in batch.items() if self._fits(c)}
        if not texts:
            return {}
        chunks = self._chunks(texts)
        inputs = lay_out(chunks, self._pool)
        inputs.logit_rows = self._wanted(inputs.row_offsets)
        inputs.layer_done = self._layer_done
        states = self.model.execute(inputs).hidden_states
        if states is None:
            return {}
        vectors = self._pooled(states, inputs.row_offsets)
        usable = np.isfinite(vectors.sum(axis=1)).tolist()
        return {
            request_id: EmbeddingsOutput(vector)
            for request_id, vector, good in zip(texts, vectors, usable, strict=True)
            if good
        }

    def _fits(self, context: TextContext) -> bool:
        if has_images(context):
            return False
        tokens = context.tokens.all
        if not 0 < len(tokens) <= self.model.max_length:
            return False
        return bool(tokens.min() >= 0 and tokens.max() < self.model.vocab_size)

    def _chunks(self, texts: Mapping[RequestID, I32]) -> list[Chunk]:
        """Give each text its own blocks."""
        used, chunks = 0, []
        for tokens in texts.values():
            blocks = self._layout.blocks_for(len(tokens))
            table = np.arange(used, used + blocks, dtype=np.int32)
            used += blocks
            chunks.append(Chunk(b"", 0, tokens, table))
        if used > self._pool.shape[1]:
            self._pool = shared_layers(self._layout, 1 << (used - 1).bit_length())
        return chunks

    def _wanted(self, offsets: I32) -> I32:
        match self.settings.pooling:
            case "mean":
                return np.arange(offsets[-1], dtype=np.int32)
            case "cls":
                return offsets[:-1]
            case _:  # the last token
                return offsets[1:] - np.int32(1)

    def _pooled(self, states: F32, offsets: I32) -> F32:
        """Return one embedding per text, float32 ``[S, dim]``."""
        if self.settings.pooling == "mean":
            rows = pairwise(offsets.tolist())
            vectors = np.stack([states[start:end].mean(axis=0) for start, end in rows])
        else:
            vectors = states.copy()
        if self.settings.normalize:
            norms = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
            vectors /= np.maximum(norms, _SMALLEST_NORM)
        return vectors

    def _layer_done(self, _layer_end: int) -> None:
        self.layers_done += 1
