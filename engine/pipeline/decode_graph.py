"""One captured decode step: one row per sequence, from token ids to sampled token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from ...proto.errors import BatonError
from ..kernels.cuda import sampling
from ..kernels.cuda.backend import CudaBackend
from ..kernels.cuda.device import Device, Graph
from ..kernels.cuda.row_plan import GraphPlan
from ..scheduling.plan import Chunk, Sampled
from .device_sampler import DeviceSampler, SampleRows, collect
from .model import ModelInputs, ModelOutputs

I32 = npt.NDArray[np.int32]

_ALIGNED = 256
_NOWHERE = -1
"""Cache slot of a row that writes no keys."""


class GraphModel(Protocol):
    """A model whose forward pass over uploaded rows reads no host memory."""

    vocab_size: int

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Run rows that are in host memory."""
        ...

    def forward(self, inputs: ModelInputs, wanted: ModelInputs) -> ModelOutputs:
        """Run rows that were uploaded."""
        ...


@dataclass(slots=True, frozen=True)
class GraphSizes:
    """Sizes of the buffers of every graph.

    ``table_width``: blocks of the longest context. ``max_length``: tokens of the longest context.
    ``pool_tokens``: tokens of the KV pool; they limit the attention work of a step.
    """

    table_width: int
    max_length: int
    pool_tokens: int


class _Buffers:
    """Arrays that are contiguous on the device and are written with one copy."""

    def __init__(self, device: Device, shapes: dict[str, tuple[tuple[int, ...], Any]]) -> None:
        ends, total = {}, 0
        for name, (shape, dtype) in shapes.items():
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            ends[name] = slice(total, total + nbytes)
            total += -(-nbytes // _ALIGNED) * _ALIGNED
        self._device = device
        self._host: Any = device.host_buffer((total,), np.uint8)
        self._host[:] = 0
        self._all = cast("Any", device.zeros((total,), np.uint8))
        self.host: dict[str, Any] = {}
        self.device: dict[str, Any] = {}
        for name, (shape, dtype) in shapes.items():
            self.host[name] = self._host[ends[name]].view(dtype).reshape(shape)
            self.device[name] = self._all[ends[name]].view(dtype).reshape(shape)

    def send(self) -> None:
        """Copy all arrays to the device."""
        self._device.write(self._all, self._host)


class DecodeGraph:
    """A decode step of up to ``rows`` sequences, captured when it is first run."""

    def __init__(
        self,
        model: GraphModel,
        backend: CudaBackend,
        sampler: DeviceSampler,
        sizes: GraphSizes,
        rows: int,
    ) -> None:
        device = backend.device
        self._device, self._rows, self._sizes = device, rows, sizes
        self._model, self._sampler = model, sampler
        self._buffers = _Buffers(
            device,
            {
                "slots": ((rows,), np.int64),
                "sampling": ((rows, sampling.ROW.itemsize), np.uint8),
                "tokens": ((rows,), np.int32),
                "positions": ((rows,), np.int32),
            },
        )
        self._buffers.host["slots"][:] = _NOWHERE
        self._tables: Any = device.zeros((rows, sizes.table_width), np.int32)
        self._sent: list[I32 | None] = [None] * rows  # the block tables on the device
        self._plan = GraphPlan(device, rows, sizes.max_length, sizes.pool_tokens)
        # Tokens and errors are read with one copy.
        self._drawn = cast("Any", device.zeros((2, rows), np.int32))
        self._tokens, self._errors = self._drawn[0], self._drawn[1]
        self._seen = device.host_buffer((2, rows), np.int32)
        self._space = sampler.workspace(rows)
        self._pool: Any = None
        self._graph: Graph | None = None

    def fits(self, inputs: ModelInputs) -> bool:
        """True if these rows fit into the buffers."""
        return self._plan.fits(inputs.positions)

    def run(
        self,
        chunks: Sequence[Chunk],
        inputs: ModelInputs,
        asked: SampleRows,
        failed: dict[bytes, BatonError],
    ) -> list[Sampled]:
        """Replay the step for ``chunks``, each with one row of ``inputs``."""
        self._fill(chunks, inputs, asked)
        if self._graph is None:
            self._graph = self._capture(inputs.pool)
        self._graph.replay()
        self._device.read(self._drawn, self._seen)
        self._device.synchronize()
        tokens, errors = self._seen[:, : len(chunks)]
        return collect(chunks, tokens, errors, None, set(), failed)

    def _fill(self, chunks: Sequence[Chunk], inputs: ModelInputs, asked: SampleRows) -> None:
        host, count = self._buffers.host, len(chunks)
        host["tokens"][:count] = inputs.tokens
        host["positions"][:count] = inputs.positions
        host["slots"][:count] = inputs.slots
        host["sampling"][:count] = asked.rows.view(np.uint8).reshape(count, -1)
        for name, nothing in (("tokens", 0), ("positions", 0), ("slots", _NOWHERE)):
            host[name][count:] = nothing
        host["sampling"][count:] = 0
        self._buffers.send()
        self._plan.write(inputs.positions)
        for row, chunk in enumerate(chunks):
            # Block tables are never modified, so the same object means the same blocks.
            if self._sent[row] is not chunk.block_table:
                self._device.write(self._tables[row, : len(chunk.block_table)], chunk.block_table)
                self._sent[row] = chunk.block_table

    def _capture(self, pool: Any) -> Graph:
        arrays = self._buffers.device
        offsets: Any = self._device.upload(np.arange(self._rows + 1, dtype=np.int32))
        inputs = ModelInputs(
            tokens=arrays["tokens"],
            positions=arrays["positions"],
            slots=arrays["slots"],
            block_tables=self._tables,
            row_offsets=offsets,
            logit_rows=offsets[:-1],
            pool=pool,
            plan=self._plan,
        )

        def step() -> None:
            logits: Any = self._model.forward(inputs, inputs).next_token_logits
            if logits is None:
                raise ValueError("the model returns no logits")
            sampling.sample(
                self._device, logits, arrays["sampling"], self._space, self._tokens, self._errors
            )

        return self._device.capture(step)
