"""Steps on a GPU: decode steps replay a captured graph, everything else is launched as it comes.

A graph is captured per bucket of rows, with buffers of its own that are filled before each
replay; rows of a bucket that no request needs have no keys and write nowhere. Whatever says more
than a graph's rows can hold (a grammar, penalties, log-probabilities, prompt chunks) is launched
kernel by kernel, with the same results but for the cut of attention's sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...proto.errors import BatonError, InternalError
from ..kernels.cuda.backend import CudaBackend
from ..plan import Chunk, Sampled
from .decode_graph import DecodeGraph, GraphModel, GraphSizes
from .device_sampler import DeviceSampler
from .model import LayerDone, ModelInputs

BUCKETS = (1, 2, 4, 8, *range(16, 257, 8))
"""Rows that a graph is captured for; larger steps are launched kernel by kernel."""


class DeviceSteps:
    """A model on a GPU and its sampler.

    ``sizes``: what a graph's buffers must hold. ``buckets``: ascending; none for no graphs.
    """

    can_stop = False  # what was launched goes on to write

    def __init__(
        self,
        model: GraphModel,
        backend: CudaBackend,
        sizes: GraphSizes,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self._model = model
        self._backend = backend
        self._sizes = sizes
        self._buckets = tuple(buckets)
        self._sampler = DeviceSampler(backend.device, model.vocab_size)
        self._graphs: dict[int, DecodeGraph] = {}
        self.replays = 0

    def run(
        self, chunks: Sequence[Chunk], inputs: ModelInputs, failed: dict[bytes, BatonError]
    ) -> list[Sampled]:
        """Run the rows and draw."""
        drawn = [chunk for chunk in chunks if chunk.sample is not None]
        asked = self._sampler.rows_of(drawn, failed)
        if asked.plain and not failed and len(drawn) == len(inputs.tokens) == len(chunks):
            graph = self._graph(len(chunks))
            if graph is not None and graph.fits(inputs):
                self.replays += 1
                sampled = graph.run(chunks, inputs, asked, failed)
                if inputs.layer_done is not None:
                    for layer in range(len(inputs.pool)):
                        inputs.layer_done(layer + 1)
                return sampled
        inputs.layer_done = self._marking(inputs.layer_done)
        logits = self._model.execute(inputs).next_token_logits
        if logits is None:
            raise InternalError("the model gives no logits")
        if not drawn:
            self._backend.device.synchronize()
            return []
        return self._sampler.draw(logits, drawn, asked, failed)

    def _marking(self, told: LayerDone | None) -> LayerDone:
        """Before anybody hears that a layer is queued, mark where: it is computed later."""

        def layer_done(layer_end: int) -> None:
            self._backend.marks.set(layer_end)
            if told is not None:
                told(layer_end)

        return layer_done

    def clear(self, pool: Any, block: int) -> None:
        """Make a block zeros, in the order of what is launched."""
        for layer in pool:
            target = layer[block]
            self._backend.device.write(target, np.zeros(target.shape, target.dtype))

    def _graph(self, rows: int) -> DecodeGraph | None:
        """The smallest bucket's graph that holds ``rows``, captured when it is first needed."""
        bucket = next((b for b in self._buckets if b >= rows), None)
        if bucket is None:
            return None
        graph = self._graphs.get(bucket)
        if graph is None:
            graph = DecodeGraph(self._model, self._backend, self._sampler, self._sizes, bucket)
            self._graphs[bucket] = graph
        return graph
