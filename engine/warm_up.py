"""The first step of a worker's life, run before any request waits for it."""

from __future__ import annotations

import numpy as np

from ..proto.sampling import SamplingParams
from .pipeline import TextGenerationPipeline
from .plan import Chunk, SampleSpec, StepPlan
from .step_time import StepTime


def warm_up(pipeline: TextGenerationPipeline, times: StepTime) -> None:
    """Run one token through the model before any request does, and learn from it.

    It touches the weights, proves the engine works, and uses block 0 of an unused pool,
    which is cleared again.
    """
    empty = np.empty(0, np.int32)
    spec = SampleSpec(SamplingParams(temperature=0), 1, empty, 1)
    chunk = Chunk(b"warm-up", 0, np.zeros(1, np.int32), np.zeros(1, np.int32), spec)
    for _ in range(2):  # the first touches memory, the second is typical
        result = pipeline.execute(StepPlan(0, (chunk,)))
        times.learn(1, result.seconds)
    pipeline.clear(0)
