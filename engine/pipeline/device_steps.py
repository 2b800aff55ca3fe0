"""Steps on a GPU: decode steps replay a captured graph, other steps launch kernels one by one.

A graph is captured per bucket of rows. It has separate buffers, which are filled before each
replay; unused rows of a bucket have no keys and write nothing. A step that needs more than a
graph's rows can express (a grammar, penalties, log-probabilities, prompt chunks) is launched
kernel by kernel. Its results are the same except for the split of attention's sums. So is a step
whose launches the driver refuses to capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...proto.errors import BatonError, ConfigError, InternalError
from ...proto.layout import KVLayout
from ...runtime.process.log import get_logger
from ..kernels.backend import Backend
from ..kernels.cuda import attention, elementwise, sampling
from ..kernels.cuda.backend import CudaBackend
from ..kernels.cuda.cupy_device import CupyDevice
from ..kernels.cuda.device import CaptureFailed
from ..loading.model_config import ModelConfig
from ..models.decoder import Decoder
from ..scheduling.plan import Chunk, Sampled
from .decode_graph import DecodeGraph, GraphModel, GraphSizes
from .device_sampler import DeviceSampler, SampleRows
from .model import LayerDone, ModelInputs, PipelineModel

BUCKETS = (1, 2, 4, 8, *range(16, 257, 8))
"""Row counts for which graphs are captured; larger steps are launched kernel by kernel."""


_log = get_logger()


def load_device() -> CudaBackend:
    """Return the kernels of this machine's GPU. Raises ConfigError if they cannot run."""
    return CudaBackend(CupyDevice())


def check_device(folder: Path, config: ModelConfig, layout: KVLayout) -> None:
    """Raise ConfigError for a model that the GPU's kernels do not support."""
    group = config.num_heads // layout.num_kv_heads
    why = (
        attention.refusal(layout.head_dim, layout.block_size, group)
        or elementwise.refusal(config.hidden_size, config.intermediate_size)
        or sampling.refusal(config.vocab_size)
    )
    if why:
        raise ConfigError(f"{folder}: {why}")


def make_device_steps(
    model: PipelineModel, backend: Backend, length: int, layout: KVLayout, blocks: int
) -> DeviceSteps:
    """Return the object that computes the steps of a model on a GPU.

    ``length``: longest context served. ``blocks``: of the KV pool. Raises ConfigError for a model
    that runs on the host alone.
    """
    if not isinstance(backend, CudaBackend) or not isinstance(model, Decoder):
        raise ConfigError(f"{type(model).__name__} models are not supported on {backend.name}")
    sizes = GraphSizes(layout.blocks_for(length), length, blocks * layout.block_size)
    return DeviceSteps(model, backend, sizes)


class DeviceSteps:
    """A model on a GPU and its sampler.

    ``sizes``: sizes of a graph's buffers. ``buckets``: ascending; empty = no graphs.
    """

    can_stop = False  # launched kernels cannot be stopped and would still write

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
        self._graphs: dict[int, DecodeGraph | None] = {}  # None: this bucket cannot be captured
        self.replays = 0

    def run(
        self, chunks: Sequence[Chunk], inputs: ModelInputs, failed: dict[bytes, BatonError]
    ) -> list[Sampled]:
        """Run the rows and sample."""
        try:
            return self._run(chunks, inputs, failed)
        except Exception:
            # Kernels queued before the error still write to blocks that the caller frees now.
            self._backend.device.synchronize()
            raise

    def _run(
        self, chunks: Sequence[Chunk], inputs: ModelInputs, failed: dict[bytes, BatonError]
    ) -> list[Sampled]:
        drawn = [chunk for chunk in chunks if chunk.sample is not None]
        asked = self._sampler.rows_of(drawn, failed)
        if asked.plain and not failed and len(drawn) == len(inputs.tokens) == len(chunks):
            sampled = self._replayed(chunks, inputs, asked, failed)
            if sampled is not None:
                return sampled
        inputs.layer_done = self._marking(inputs.layer_done)
        logits = self._model.execute(inputs).next_token_logits
        if logits is None:
            raise InternalError("the model returns no logits")
        if not drawn:
            self._backend.device.synchronize()
            return []
        return self._sampler.draw(logits, drawn, asked, failed)

    def _replayed(
        self,
        chunks: Sequence[Chunk],
        inputs: ModelInputs,
        asked: SampleRows,
        failed: dict[bytes, BatonError],
    ) -> list[Sampled] | None:
        """Run a decode step as a graph; None if no graph holds it."""
        bucket = next((b for b in self._buckets if b >= len(chunks)), None)
        graph = None if bucket is None else self._graph(bucket)
        if bucket is None or graph is None or not graph.fits(inputs):
            return None
        try:
            sampled = graph.run(chunks, inputs, asked, failed)
        except CaptureFailed as error:
            self._graphs[bucket] = None
            _log.warning("graph.not_captured", rows=bucket, error=str(error))
            return None
        self.replays += 1
        if inputs.layer_done is not None:
            for layer in range(len(inputs.pool)):
                inputs.layer_done(layer + 1)
        return sampled

    def _marking(self, told: LayerDone | None) -> LayerDone:
        """Record an event before reporting a layer: the layer is queued but computed later."""

        def layer_done(layer_end: int) -> None:
            self._backend.marks.set(layer_end)
            if told is not None:
                told(layer_end)

        return layer_done

    def clear(self, pool: Any, block: int) -> None:
        """Zero a block, in the order of the launched kernels."""
        for layer in pool:
            target = layer[block]
            self._backend.device.write(target, np.zeros(target.shape, target.dtype))

    def _graph(self, bucket: int) -> DecodeGraph | None:
        """Return the graph of ``bucket`` rows, created on first use; None if it has none."""
        if bucket not in self._graphs:
            self._graphs[bucket] = DecodeGraph(
                self._model, self._backend, self._sampler, self._sizes, bucket
            )
        return self._graphs[bucket]
