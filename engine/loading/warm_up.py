"""The first step of a worker, run before it accepts requests."""

from __future__ import annotations

from baton.proto.errors import InternalError

from ..pipeline.runner import StepPipeline
from ..scheduling.plan import Chunk, StepPlan
from ..scheduling.step_time import StepTime


def warm_up(pipeline: StepPipeline, times: StepTime) -> None:
    """Run the pipeline's trials before the first request, to learn step times.

    This also loads the weights and compiles a GPU's kernels, proves that the engine works, and uses
    the first blocks of an unused pool, which are cleared afterwards. Only the last step is learned:
    the ones before it touch memory, compile and capture, which no later step of their size does.
    Raises InternalError if a step fails, so that a worker which cannot compute ends instead of
    reporting that it is ready.
    """
    *first, last = pipeline.trials()
    for chunk in first:
        _run(pipeline, chunk)
    times.learn(last.rows, _run(pipeline, last))
    for block in last.block_table:
        pipeline.clear(int(block))


def _run(pipeline: StepPipeline, chunk: Chunk) -> float:
    """Run a step of one chunk; returns its seconds."""
    result = pipeline.execute(StepPlan(0, (chunk,)))
    if result.failed:
        raise InternalError(f"the first step failed: {result.failed[chunk.request]}")
    return result.seconds
