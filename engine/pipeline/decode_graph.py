"""One captured decode step: a row per sequence, from token ids to sampled token ids.

A step with masks is captured as two graphs, so that the forward pass can be queued before the masks
are known. Other steps are one graph, which saves a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from baton.proto.errors import BatonError

from ..kernels.cuda import sampling
from ..kernels.cuda.backend import CudaBackend
from ..kernels.cuda.device import Array, Device, Event, Graph
from ..kernels.cuda.row_plan import GraphPlan
from ..scheduling.plan import Chunk, Sampled
from .device_rows import TURNS, DeviceRows, GraphSizes, report_parts
from .device_sampler import collect
from .model import ModelInputs, ModelOutputs

_ALIGNED = 256


class GraphModel(Protocol):
    """A model whose forward pass over uploaded rows reads no host memory."""

    vocab_size: int

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Run rows that are in host memory."""
        ...

    def forward(self, inputs: ModelInputs, wanted: ModelInputs) -> ModelOutputs:
        """Run rows that were uploaded."""
        ...


class _Buffers:
    """Arrays that are contiguous on the device and are written with one copy.

    ``host[turn]`` is pinned: it must not change until the copy of its turn is over.
    """

    def __init__(self, device: Device, shapes: dict[str, tuple[tuple[int, ...], Any]]) -> None:
        ends, total = {}, 0
        for name, (shape, dtype) in shapes.items():
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            ends[name] = slice(total, total + nbytes)
            total += -(-nbytes // _ALIGNED) * _ALIGNED
        self._device = device
        self._pinned: list[Any] = [device.host_buffer((total,), np.uint8) for _ in range(TURNS)]
        self._all = cast("Any", device.zeros((total,), np.uint8))
        self.host: list[dict[str, Any]] = [{} for _ in range(TURNS)]
        self.device: dict[str, Any] = {}
        for name, (shape, dtype) in shapes.items():
            for pinned, named in zip(self._pinned, self.host, strict=True):
                pinned[:] = 0
                named[name] = pinned[ends[name]].view(dtype).reshape(shape)
            self.device[name] = self._all[ends[name]].view(dtype).reshape(shape)

    def send(self, turn: int) -> None:
        """Copy all arrays of a turn to the device."""
        self._device.write(self._all, self._pinned[turn])


class _Part:
    """Launches that are captured when they first run. ``work`` makes them."""

    def __init__(self, device: Device, work: Callable[[], None]) -> None:
        self._device, self._work = device, work
        self._graph: Graph | None = None

    @property
    def is_captured(self) -> bool:
        """True if :meth:`run` is a replay."""
        return self._graph is not None

    def run(self) -> bool:
        """Queue the launches; True if it is a replay. See :meth:`DecodeGraph.launch`."""
        if self._graph is not None:
            self._graph.replay()
            return True
        # The first run of the launches counts: a replay would draw from its own tokens.
        self._graph = self._device.capture(self._work)
        return False


class DecodeGraph:
    """A decode step of the first ``count`` rows of ``rows``, captured when it is first run.

    Its sampling is as the step needs that is placed at that time (:class:`.device_rows.Needs`).
    ``space`` is shared by all graphs, which run one after the other.
    """

    def __init__(
        self,
        model: GraphModel,
        backend: CudaBackend,
        space: sampling.Workspace,
        rows: DeviceRows,
        sizes: GraphSizes,
        count: int,
    ) -> None:
        device = backend.device
        self._device, self._count = device, count
        self._model, self._rows = model, rows
        self._buffers = _Buffers(
            device,
            {
                "slots": ((count,), np.int64),
                "sampling": ((count, sampling.ROW.itemsize), np.uint8),
                "positions": ((count,), np.int32),
                "rope_positions": ((count,), np.int32),
            },
        )
        self._plan = GraphPlan(device, count, sizes.max_length, sizes.pool_tokens, TURNS)
        self._space = space
        self._parts: list[_Part] = []
        self._logits: list[Any] = []  # of runs of the forward pass that were not sampled yet

    def fits(self) -> bool:
        """True if the work of the placed rows fits into the buffers."""
        return self._plan.fits(self._rows.lengths[: self._count])

    def launch(self, pool: Any, turn: int) -> bool:
        """Queue the step of the placed rows, without its sampling if it has masks.

        Returns True if it is a replay. If CaptureFailed is raised, the step is queued all the same.
        """
        self._fill(turn)
        self._parts = self._parts or self._make_parts(pool)
        # A step may have failed before its sampling. A replay writes the captured run's logits.
        self._logits = self._logits[-1:] if self._parts[0].is_captured else []
        return self._parts[0].run()

    def sample(self) -> bool:
        """Queue the sampling of a step with masks, after the masks; returns as :meth:`launch`."""
        return self._parts[1].run()

    def replay(self) -> None:
        """Queue the step with the inputs of its last launch; for measurements."""
        for part in self._parts:
            part.run()

    def _fill(self, turn: int) -> None:
        host, rows, count = self._buffers.host[turn], self._rows, self._count
        host["positions"][:] = rows.positions[:count]
        np.add(rows.positions[:count], rows.deltas[:count], out=host["rope_positions"])
        host["slots"][:] = rows.slots[:count]
        host["sampling"][:] = rows.sampling[:count].view(np.uint8).reshape(count, -1)
        self._buffers.send(turn)
        self._plan.write(rows.lengths[:count], turn)

    def _make_parts(self, pool: Any) -> list[_Part]:
        arrays, rows, count = self._buffers.device, self._rows, self._count
        offsets: Any = self._device.upload(np.arange(count + 1, dtype=np.int32))
        tokens, errors = rows.drawn[0, :count], rows.drawn[1, :count]
        restrictions, report = rows.restrictions(), rows.report(count)
        filters = rows.needs.filters
        inputs = ModelInputs(
            tokens=tokens,
            positions=arrays["positions"],
            rope_positions=arrays["rope_positions"],
            slots=arrays["slots"],
            block_tables=rows.tables[:count],
            row_offsets=offsets,
            logit_rows=offsets[:-1],
            pool=pool,
            plan=self._plan,
        )

        def forward() -> Any:
            logits: Any = self._model.forward(inputs, inputs).next_token_logits
            if logits is None:
                raise ValueError("the model returns no logits")
            return logits

        def sample(logits: Any) -> None:
            sampling.sample(
                self._device, logits, arrays["sampling"], self._space, tokens, errors,
                restrictions, report, record=True, filters=filters,
            )  # fmt: skip

        if restrictions.masks is None:
            return [_Part(self._device, lambda: sample(forward()))]
        # A part runs twice when it is captured. Each run of the sampling needs the logits of the
        # same run of the forward pass, which may be other memory.
        return [
            _Part(self._device, lambda: self._logits.append(forward())),
            _Part(self._device, lambda: sample(self._next_logits())),
        ]

    def _next_logits(self) -> Any:
        return self._logits.pop(0) if len(self._logits) > 1 else self._logits[0]


class QueuedStep:
    """A captured step that is queued on the device.

    ``chunks``, ``rows``: what it computes. ``failed``: requests whose masks failed. ``seen``:
    pinned int32 ``[2, R]``, tokens and errors of all rows once ``event`` is done; ``report``:
    pinned too, their log-probabilities, or None.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        rows: list[int],
        failed: dict[bytes, BatonError],
        seen: Array,
        report: Array | None,
        event: Event,
    ) -> None:
        self.chunks, self._failed = chunks, failed
        self._rows, self._event = np.array(rows, np.int64), event
        self._seen, self._report = seen, report
        self._found: tuple[Array, list[Array] | None] | None = None

    def wait(self) -> tuple[Array, list[Array] | None]:
        """Return tokens and errors of the chunks, int32 ``[2, n]``, and their log-probabilities."""
        if self._found is None:
            self._event.wait()
            listed = None
            if self._report is not None:
                parts = report_parts(self._report, self._seen.shape[1])
                listed = [part[self._rows] for part in parts]
            self._found = self._seen[:, self._rows], listed
        return self._found

    def collect(self, failed: dict[bytes, BatonError]) -> list[Sampled]:
        """Wait for the tokens and return them; rows that failed go to ``failed``."""
        (tokens, errors), listed = self.wait()
        failed.update(self._failed)
        return collect(self.chunks, tokens, errors, listed, set(), failed)
