"""Steps on a GPU: decode steps replay a captured graph, other steps launch kernels one by one.

A graph is captured per bucket of rows. It is queued without waiting, and so may the next one be:
its tokens are where the sampler of the first one writes them (:mod:`.device_rows`). Of a step with
masks the forward pass is queued without waiting, and the sampling when the masks are known. A step
that needs more than a graph's rows can express (prompt chunks, sampling by the host) is launched
kernel by kernel. Its results are the same except for the split of attention's sums. So is a step
whose launches the driver refuses to capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.proto.errors import BatonError, ConfigError, InternalError
from baton.proto.layout import KVLayout
from baton.runtime.process.log import get_logger

from ..kernels.backend import Backend
from ..kernels.cuda import attention, elementwise, sampling
from ..kernels.cuda.backend import CudaBackend
from ..kernels.cuda.cupy_device import CupyDevice
from ..kernels.cuda.device import CaptureFailed
from ..loading.model_config import CrossConfig, GemmaConfig, ModelConfig, VisionLanguageConfig
from ..models.decoder import Decoder
from ..scheduling.plan import Applied, Chunk, Sampled
from .decode_graph import DecodeGraph, GraphModel, QueuedStep
from .device_rows import TURNS, DeviceRows, GraphSizes, Needs
from .device_sampler import DeviceSampler
from .model import KVManager, LayerDone, ModelInputs, PipelineModel
from .steps import masked

BUCKETS = (1, 2, 4, 8, *range(16, 257, 8))
"""Row counts for which graphs are captured; larger steps are launched kernel by kernel."""


_log = get_logger()


def load_device(ordinal: int = 0, instance: str = "") -> CudaBackend:
    """Return the kernels of a GPU of this machine. Raises ConfigError if they cannot run.

    ``ordinal``: its number among the GPUs that CUDA_VISIBLE_DEVICES leaves. ``instance``: what this
    variable becomes, for an instance of a split GPU.
    """
    return CudaBackend(CupyDevice(ordinal, instance=instance))


def check_device(
    folder: Path, config: ModelConfig, layout: KVLayout, *, tower: bool = True
) -> None:
    """Raise ConfigError for a model that the GPU's kernels do not support.

    ``tower``: the vision tower is used, if the model has one.
    """
    if isinstance(config, CrossConfig | GemmaConfig):
        raise ConfigError(
            f"{folder}: {config.architecture} runs on the CPU only: leave --device cuda out"
        )
    group = config.num_heads // layout.num_kv_heads
    why = (
        attention.refusal(layout.head_dim, layout.block_size, group)
        or elementwise.refusal(config.hidden_size, config.intermediate_size)
        or sampling.refusal(config.vocab_size)
    )
    if tower and not why and isinstance(config, VisionLanguageConfig):
        vision = config.vision
        widest = vision.hidden_size * (vision.merge_size**2 if vision.deep_layers else 1)
        why = attention.tower_refusal(vision.head_dim) or elementwise.tower_refusal(
            vision.hidden_size, widest
        )
    if why:
        raise ConfigError(f"{folder}: {why}")


def make_device_steps(
    model: PipelineModel, backend: Backend, length: int, kv: KVManager
) -> DeviceSteps:
    """Return the object that computes the steps of a model on a GPU.

    ``length``: longest context served. Raises ConfigError for a model that runs on the host alone.
    """
    if not isinstance(backend, CudaBackend) or not isinstance(model, Decoder):
        raise ConfigError(f"{type(model).__name__} models are not supported on {backend.name}")
    layout = kv.layout
    backend.reserve_widened(layout, length)
    sizes = GraphSizes(layout.blocks_for(length), length, kv.num_blocks, layout.block_size)
    return DeviceSteps(model, backend, sizes, kv.pool, BUCKETS)


class DeviceSteps:
    """A model on a GPU and its sampler.

    ``sizes``: limits of the captured steps. ``pool``: the KV pool. ``buckets``: row counts for
    which steps are captured, ascending; empty = none.
    """

    can_stop = False  # launched kernels cannot be stopped and would still write
    can_queue = True

    def __init__(
        self,
        model: GraphModel,
        backend: CudaBackend,
        sizes: GraphSizes,
        pool: Any,
        buckets: Sequence[int],
    ) -> None:
        device = backend.device
        self._model = model
        self._backend = backend
        self._sizes = sizes
        self._pool = pool
        self._sampler = DeviceSampler(device, model.vocab_size)
        self._rows = DeviceRows(device, sizes, model.vocab_size, buckets)
        self._buckets = buckets
        self._graphs: dict[tuple[int, Needs], DecodeGraph | None] = {}  # None: no capture
        self._moves = 0  # DeviceRows.moves when the graphs were captured
        pinned, rows = device.host_buffer, self._rows
        self._seen = [pinned(rows.drawn.shape, np.int32) for _ in range(TURNS)]
        self._reports = [pinned(rows.reported.shape, np.int32) for _ in range(TURNS)]
        self._turns: list[QueuedStep | None] = [None] * TURNS  # the last step of each turn
        self._turn = 0
        self.replays = 0
        self.fed = 0
        """Steps queued before the tokens of the step before were read."""

    def queue(
        self, chunks: Sequence[Chunk], *, fed: bool, applied: Applied | None = None
    ) -> QueuedStep | None:
        """Queue a captured step; None if these chunks need :meth:`run`.

        ``applied``: called after the forward pass is queued, if there are masks.
        """
        turn = self._turn = (self._turn + 1) % TURNS
        before = self._turns[turn]
        try:
            if before is not None:
                before.wait()  # its pinned memory is used again
            return self._queue(chunks, turn, fed=fed, applied=applied)
        except Exception:
            # Kernels queued before the error still write to blocks that the caller frees now.
            self._rows.forget()
            self._backend.device.synchronize()
            raise

    def _queue(
        self, chunks: Sequence[Chunk], turn: int, *, fed: bool, applied: Applied | None
    ) -> QueuedStep | None:
        rows = self._rows
        if not rows.place(chunks, turn, fed=fed):
            return None
        graph = self._graph()
        if graph is None or not graph.fits():
            rows.forget()
            return None
        self.replays += self._replayed(lambda: graph.launch(self._pool, turn))
        failed: dict[bytes, BatonError] = {}
        if rows.needs.masks:
            if applied is not None:
                applied()
            failed = rows.write_masks()
            self._replayed(graph.sample)
        self.fed += fed
        device, seen = self._backend.device, self._seen[turn]
        report = self._reports[turn] if rows.needs.report else None
        device.read(rows.drawn, seen)
        if report is not None:
            device.read(rows.reported, report)
        step = self._turns[turn] = QueuedStep(
            chunks, rows.rows, failed, seen, report, device.record()
        )
        return step

    def _replayed(self, part: Callable[[], bool]) -> bool:
        """Queue a part of the placed rows' graph; True if it is a replay."""
        try:
            return part()
        except CaptureFailed as error:
            key = self._rows.bucket, self._rows.needs
            if self._graphs[key] is not None:
                self._graphs[key] = None
                _log.warning("graph.not_captured", rows=key[0], error=str(error))
            return False

    def run(
        self,
        chunks: Sequence[Chunk],
        inputs: ModelInputs,
        failed: dict[bytes, BatonError],
        applied: Applied | None = None,
    ) -> list[Sampled]:
        """Launch the rows kernel by kernel and sample."""
        try:
            if applied is not None and masked(chunks):
                applied()
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
        inputs.layer_done = self._marking(inputs.layer_done)
        logits = self._model.execute(inputs).next_token_logits
        if logits is None:
            raise InternalError("the model returns no logits")
        if not drawn:
            self._backend.device.synchronize()
            return []
        return self._sampler.draw(logits, drawn, asked, failed)

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

    def _graph(self) -> DecodeGraph | None:
        """Return the graph of the placed rows, created on first use; None if it has none."""
        rows, graphs = self._rows, self._graphs
        if rows.moves != self._moves:  # the arrays of masks or histories are others
            self._moves = rows.moves
            for bucket, needs in [key for key in graphs if key[1].masks or key[1].histories]:
                del graphs[bucket, needs]
        key = rows.bucket, rows.needs
        if key not in graphs:
            space = self._sampler.workspace(self._buckets[-1])
            graphs[key] = DecodeGraph(
                self._model, self._backend, space, rows, self._sizes, rows.bucket
            )
        return graphs[key]
