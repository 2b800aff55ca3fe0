"""A loaded model as its worker sees it: a pipeline that runs steps over KV blocks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.proto.layout import ModelCard

from ..kernels.backend import Backend
from ..scheduling.plan import Applied, Chunk, OnLayers, StepPlan, StepResult, Unwanted
from .model import KVManager

F32 = npt.NDArray[np.float32]


class StepPipeline(Protocol):
    """Computes the steps of a worker's scheduler."""

    @property
    def kv(self) -> KVManager:
        """The blocks."""
        ...

    @property
    def layers_done(self) -> int:
        """Layers computed since the start; other threads may read it."""
        ...

    def execute(
        self,
        plan: StepPlan,
        on_layers: OnLayers | None = None,
        unwanted: Unwanted | None = None,
        applied: Applied | None = None,
    ) -> StepResult:
        """Run a plan; see :meth:`.TextGenerationPipeline.execute`."""
        ...

    def trials(self) -> list[Chunk]:
        """Return chunks that compute little, for the first steps of a worker."""
        ...

    def clear(self, block: int) -> None:
        """Zero a block of the pool; no request may hold it."""
        ...


class StepRunner(Protocol):
    """A loaded model that runs steps over blocks: text, or a half of a picture model."""

    @property
    def card(self) -> ModelCard:
        """The served model."""
        ...

    @property
    def pipeline(self) -> StepPipeline:
        """Computes the steps."""
        ...

    @property
    def backend(self) -> Backend:
        """The kernels."""
        ...

    @property
    def pool(self) -> F32:
        """The blocks ``[L, NB, 2, Hk, BS, D]``, shared with the pipeline."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        ...
