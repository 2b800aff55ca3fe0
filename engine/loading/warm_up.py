"""The first step of a worker, run before it accepts requests."""

from __future__ import annotations

import numpy as np

from ...proto.sampling import SamplingParams
from ..pipeline.text_generation import TextGenerationPipeline
from ..scheduling.plan import Chunk, SampleSpec, StepPlan
from ..scheduling.step_time import StepTime


def warm_up(pipeline: TextGenerationPipeline, times: StepTime) -> None:
    """Run one token through the model before the first request, to learn step times.

    This also loads the weights, proves that the engine works, and uses block 0 of an unused pool,
    which is cleared afterwards.
    """
    empty = np.empty(0, np.int32)
    spec = SampleSpec(SamplingParams(temperature=0), 1, empty, 1)
    chunk = Chunk(b"warm-up", 0, np.zeros(1, np.int32), np.zeros(1, np.int32), spec)
    for _ in range(2):  # the first run touches the memory, the second has a typical duration
        result = pipeline.execute(StepPlan(0, (chunk,)))
        times.learn(1, result.seconds)
    pipeline.clear(0)
