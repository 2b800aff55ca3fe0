"""Learns the times of a model's steps on this machine, in some seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.gguf_folder import local_folder
from baton.engine.loading.loader import Runner, load_runner, threads_of
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.errors import InputError, RequestFailed
from baton.proto.sampling import SamplingParams
from baton.runtime.process.cores import usable_cores

from .calibration import Adapted, Calibration, adapted
from .fit import least_squares
from .service import ServiceModel, least

BLOCK = 16
ROUNDS = 5
BATCH = 32
"""Requests that a worker runs at once, as ``baton serve`` has it by default."""
ROWS = (1, 2, 4, 8)
CHUNKS = (32, 64, 128, 256)
_COPIED = 1 << 26


@dataclass(frozen=True, slots=True)
class Step:
    """A step to measure.

    ``rows`` streams of ``context`` tokens, and ``new`` tokens of a prompt after ``before`` others.
    """

    rows: int = 0
    context: int = 0
    new: int = 0
    before: int = 0

    @property
    def pairs(self) -> float:
        """Pairs of a prompt token and a token that it attends to."""
        return self.new * (self.before + self.new / 2)


def steps(longest: int) -> list[Step]:
    """Return steps that fit a context of ``longest`` tokens: prompts, streams, then both."""
    long = max(2, longest // 2)
    chunks = [new for new in CHUNKS if new <= long] or [long]
    prompts = [Step(new=new, before=before) for new in chunks for before in (0, longest - new)]
    streams = [Step(rows, context) for rows in ROWS for context in (min(BLOCK, long), long)]
    return [*prompts, *streams, *(Step(rows, long, new) for rows in (1, 4) for new in chunks[-2:])]


def fitted(times: dict[Step, float]) -> tuple[dict[str, float], float]:
    """Return the parts of :class:`ServiceModel` that fit measured seconds, and the mean error.

    No part is below :func:`least`, so that the model can be read again. ``hidden_s`` is what
    streams and prompt tokens save in one step.
    """
    alone = [step for step in times if not step.rows]
    streams = [step for step in times if step.rows and not step.new]
    both = [step for step in times if step.rows and step.new]
    prompt = least_squares([(1.0, s.new, s.pairs) for s in alone], [times[s] for s in alone])
    stream = least_squares(
        [(1.0, s.rows, s.rows * s.context) for s in streams], [times[s] for s in streams]
    )
    saved = []
    for step in both:
        work = prompt[1] * step.new + prompt[2] * step.pairs
        base = stream[0] + stream[1] * step.rows + stream[2] * step.rows * step.context
        saved.append(min(base + work - times[step], work, base))
    hidden = max(0.0, statistics.median(saved)) if saved else 0.0
    found = zip(_PARTS, (*prompt, *stream, hidden), strict=True)
    parts: dict[str, float] = {name: max(least(name), part) for name, part in found}
    parts["prefill_s"] = 0.0  # every step launches its own kernels
    model = ServiceModel(**parts)  # type: ignore[arg-type]  # all of them are floats
    errors = [abs(_predicted(model, step) / seconds - 1) for step, seconds in times.items()]
    return parts, statistics.mean(errors)


_PARTS = (
    "chunk_s", "prefill_token_s", "prefill_pair_s",
    "decode_s", "decode_sequence_s", "decode_token_s", "hidden_s",
)  # fmt: skip


def _predicted(model: ServiceModel, step: Step) -> float:
    if not step.rows:
        return model.prefill(step.new, step.before)
    return model.mixed(step.rows, step.rows * step.context, step.new, step.pairs)


def learn_service(
    config: RunnerConfig, clock: Callable[[], float] = time.perf_counter
) -> tuple[ServiceModel, float]:
    """Measure a worker's model on this machine, with its threads and its types of numbers.

    Returns the model of its steps and the mean relative error of the fit. Raises BatonError for a
    folder that cannot be loaded, InputError for a context too short to be measured.
    """
    own = load_checkpoint(str(local_folder(config.model))).config.rope.default_length()
    longest = min(own, 1024) // BLOCK * BLOCK
    if longest < 4 * BLOCK:
        raise InputError(f"a context of {own} tokens is too short to measure")
    blocks = (max(ROWS) + 1) * longest // BLOCK
    runner = load_runner(
        msgspec.structs.replace(
            config, block_size=BLOCK, num_blocks=blocks, max_length=0, share_weights="off"
        )
    )
    parts, error = fitted(_Bench(runner, longest, clock).measured(steps(longest)))
    layout = runner.card.layout
    service = ServiceModel(
        **parts,  # type: ignore[arg-type]  # all of them are floats
        kv_tokens=BATCH * own,
        max_batch=BATCH,
        max_length=own,
        kv_token_bytes=layout.block_bytes * layout.num_layers // BLOCK,
        handoff_rate=_copy_rate(clock),
    )
    return service, error


def calibrated(
    config: RunnerConfig, seen: Calibration, step_s: float = 0.0, most: int = 0
) -> Adapted:
    """Measure a worker's model on this machine, and adapt it to what a running cluster showed.

    ``step_s``, ``most``: seconds and tokens of a step of its prefill worker. ``error`` is the
    larger one of both. Raises as :func:`learn_service`, RequestFailed if the calibration has
    nothing that can be used.
    """
    alone, error = learn_service(config)
    cores = 0
    if config.backend != "cuda":
        cores = max(1, usable_cores().count // threads_of(config).count)
    try:
        found = adapted(alone, seen, cores, alone.chunk(step_s, most))
    except ValueError as problem:
        raise RequestFailed(str(problem)) from None
    return msgspec.structs.replace(found, error=max(error, found.error))


class _Bench:
    """Runs steps of made-up tokens through a model's pipeline, without a scheduler."""

    def __init__(self, runner: Runner, longest: int, clock: Callable[[], float]) -> None:
        self._pipeline = runner.pipeline
        self._clock = clock
        self._blocks = longest // BLOCK
        rng = np.random.default_rng(1)
        size = max(ROWS) + 1, longest
        self._ids = rng.integers(0, runner.card.vocab_size, size).astype(np.int32)

    def measured(self, steps: list[Step]) -> dict[Step, float]:
        """Return the shortest seconds of each step, measured in turns.

        Other processes use the machine too, and a mean would contain them.
        """
        for row in range(len(self._ids)):
            self._run([self._chunk(row, 0, self._blocks * BLOCK)])  # fills the KV that steps read
        seconds: dict[Step, list[float]] = {step: [] for step in steps}
        for number in range(ROUNDS + 1):
            for step in steps:
                taken = self._time(step)
                if number:
                    seconds[step].append(taken)
        return {step: min(taken) for step, taken in seconds.items()}

    def _time(self, step: Step) -> float:
        chunks = [self._chunk(row, step.context - 1, 1) for row in range(step.rows)]
        if step.new:
            chunks.append(self._chunk(max(ROWS), step.before, step.new))
        began = self._clock()
        self._run(chunks)
        return self._clock() - began

    def _run(self, chunks: list[Chunk]) -> None:
        result = self._pipeline.execute(StepPlan(0, tuple(chunks)))
        for error in result.failed.values():
            raise error

    def _chunk(self, row: int, start: int, count: int) -> Chunk:
        end = start + count
        table: npt.NDArray[np.int32] = np.arange(
            row * self._blocks, (row + 1) * self._blocks, dtype=np.int32
        )
        spec = SampleSpec(SamplingParams(temperature=0), end, np.empty(0, np.int32), 0)
        return Chunk(bytes([row]), start, self._ids[row, start:end], table, spec)


def _copy_rate(clock: Callable[[], float]) -> float:
    """Return the bytes per second of a copy in memory, as a handoff on one machine makes one."""
    source = np.ones(_COPIED, np.uint8)
    target = np.empty_like(source)
    best = math.inf
    for _ in range(ROUNDS):
        began = clock()
        np.copyto(target, source)
        best = min(best, clock() - began)
    return _COPIED / best
