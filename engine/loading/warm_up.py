"""The first step of a worker, run before it accepts requests."""

from __future__ import annotations

import numpy as np

from ...proto.errors import InternalError
from ...proto.sampling import SamplingParams
from ..pipeline.text_generation import TextGenerationPipeline
from ..scheduling.plan import Chunk, SampleSpec, StepPlan
from ..scheduling.step_time import StepTime


def warm_up(pipeline: TextGenerationPipeline, times: StepTime) -> None:
    """Run a prompt and a token through the model before the first request, to learn step times.

    This also loads the weights and compiles a GPU's kernels, proves that the engine works, and uses
    block 0 of an unused pool, which is cleared afterwards. Only the last step is learned: the ones
    before it touch memory, compile and capture, which no later step of their size does. Raises
    InternalError if a step fails, so that a worker which cannot compute ends instead of reporting
    that it is ready.
    """
    empty = np.empty(0, np.int32)
    spec = SampleSpec(SamplingParams(temperature=0), 1, empty, 1)
    prompt = min(2, pipeline.model.max_length, pipeline.kv.layout.block_size)
    for count in (prompt, 1, 1):
        chunk = Chunk(b"warm-up", 0, np.zeros(count, np.int32), np.zeros(1, np.int32), spec)
        result = pipeline.execute(StepPlan(0, (chunk,)))
        if result.failed:
            raise InternalError(f"the first step failed: {result.failed[chunk.request]}")
    times.learn(1, result.seconds)
    pipeline.clear(0)
