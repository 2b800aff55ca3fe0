"""The stage of a GPU with tiny shapes, for a machine whose CuPy is the one beside this."""

from pathlib import Path

from baton.benchmarks.gpu.stage import Stage, on_gpu


def small(scratch: Path) -> Stage:
    stage = on_gpu(scratch)
    stage.tiny, stage.factory = True, "gpu_stage:small"
    return stage
