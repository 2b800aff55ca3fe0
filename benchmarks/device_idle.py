"""How long a GPU would idle between two decode steps, and the host's work that makes it idle.

The device is a model: a captured step takes a given time on it, a twentieth of it for sampling, and
computes nothing; a step that is queued while another runs follows without a gap. Its clock is the
CPU time of this thread, which stands still while the thread waits, plus the waits by the model. So
other processes of this machine do not count. With grammars, each row writes JSON that follows a
schema. The device draws its tokens from a text, so the states vary. CuPy's and the driver's calls,
some microseconds each, do not count either: their number per step is printed. The host's work is
the whole loop of an engine: plan, begin, wait, apply.

    python -m baton.benchmarks.device_idle [--rows 1 64 256] [--step-ms 2 10] [--steps 100]
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from baton.deploy.config import demo_model_folder
from baton.engine.grammar.constraint import GrammarCompiler, GrammarMatcher, GrammarTask
from baton.engine.kernels.backend import Gpu
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import TENSOR_MAP, Kernel
from baton.engine.kernels.cuda.tuning import Tuning
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.events import TokenEvent
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.proto.sampling import SamplingParams

from .checkpoints import Shape, write_checkpoint
from .scratch import scratch_folder

BARS_US = {1: 40, 256: 150}
SHAPE = Shape("one", vocab=1024, hidden=128, intermediate=192, layers=1, heads=2, kv_heads=1)
PROMPT, WARM, END = 24, 8, 2
SAMPLING_SHARE = 0.05
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.1},
    "log-probs": {},
    "grammar": {},
}
SCHEMA = json.dumps(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "likes": {"type": "array", "items": {"enum": ["tea", "rain", "books"]}},
                "quiet": {"type": "boolean"},
            },
            "required": ["name", "age", "likes", "quiet"],
            "additionalProperties": False,
        },
    }
)
ITEM = {"name": "Bruno the fox", "age": 12, "likes": ["tea", "books"], "quiet": True}


class Timeline:
    """When the modelled device is busy, in seconds of its clock."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.idle = self.skipped = self._free = 0.0
        self.steps = self.calls = 0

    def now(self) -> float:
        """Return the time of the clock."""
        return time.thread_time() + self.skipped

    def replay(self, share: float, *, ends: bool) -> None:
        """Queue a share of a step; ``ends``: its last part."""
        now = self.now()
        if self.steps:
            self.idle += max(0.0, now - self._free)
        self._free = max(now, self._free) + share * self.step_seconds
        self.steps += ends

    @property
    def end(self) -> float:
        """The end of the queued steps."""
        return self._free

    def wait(self, end: float) -> None:
        """Let the clock go on to ``end``."""
        self.skipped += max(0.0, end - self.now())


class TimedEvent:
    """See :class:`~baton.engine.kernels.cuda.device.Event`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._end = timeline, timeline.end

    @property
    def done(self) -> bool:
        """Whether the device has come to it."""
        return self._timeline.now() >= self._end

    def wait(self) -> None:
        """Wait for it."""
        self._timeline.wait(self._end)


class TimedGraph:
    """A captured step or part of a step. ``tokens``: where its sampling draws, or None."""

    def __init__(self, device: TimedDevice, tokens: Any, share: float) -> None:
        self._device, self._tokens, self._share = device, tokens, share

    def replay(self) -> None:
        """Queue it."""
        self._device.timeline.calls += 1
        self._device.timeline.replay(self._share, ends=self._tokens is not None)
        if self._tokens is not None:
            self._device.draw(self._tokens)


class TimedDevice:
    """A device whose kernels do nothing; see :class:`~baton.engine.kernels.cuda.device.Device`.

    ``script``: int32 ``[steps, rows]``, the tokens that each step draws; None: always 0.
    """

    name = "timed"
    gpu = Gpu(0, "GPU-timed", "timed")
    lost = ""
    multiprocessors = 132
    tuning = Tuning()

    def __init__(self, timeline: Timeline, script: Any = None) -> None:
        self.timeline = timeline
        self._script, self._drawn = script, 0
        self._tokens: Any = None  # where the launches of a capture draw
        self._forward = False  # whether they have products

    def draw(self, tokens: Any) -> None:
        """Write the tokens of the next step."""
        if self._script is not None:
            row = self._script[self._drawn]
            tokens[: len(row)] = row
            self._drawn += 1

    def tuned(self, tuning: Tuning) -> TimedDevice:
        """Return the same device."""
        return self

    def another_stream(self, *, urgent: bool = False) -> TimedDevice:
        """Return the same device."""
        return self

    def record(self) -> TimedEvent:
        """Return the end of the queued steps."""
        self.timeline.calls += 1
        return TimedEvent(self.timeline)

    def wait_for(self, event: Any) -> None:
        """Do nothing."""

    def free_bytes(self) -> int:
        """Return the same size."""
        return self.memory_bytes()

    def memory_bytes(self) -> int:
        """Return a small size."""
        return 1 << 30

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """Make an array of zeros."""
        return np.zeros(tuple(shape), dtype)

    zeros = shareable = host_buffer = empty

    def trim_host(self) -> None:
        """Do nothing."""

    def export(self, array: Any) -> tuple[bytes, int]:
        """Raise OSError."""
        raise OSError("a model of a device exports nothing")

    def open(self, *_: Any) -> Any:
        """Raise OSError."""
        raise OSError("a model of a device maps nothing")

    def upload(self, array: Any) -> Any:
        """Copy an array."""
        self.timeline.calls += 1
        return array.copy()

    def download(self, array: Any) -> Any:
        """Copy an array after the queued steps."""
        self.timeline.calls += 1
        self.timeline.wait(self.timeline.end)
        return array.copy()

    def write(self, array: Any, values: Any) -> None:
        """Copy ``values``."""
        self.timeline.calls += 1
        array[...] = values

    def read(self, array: Any, out: Any) -> None:
        """Copy ``array``."""
        self.timeline.calls += 1
        out[...] = array

    def capture(self, work: Callable[[], None]) -> TimedGraph:
        """Run ``work`` once, which takes no time of the device."""
        self._tokens, self._forward = None, False
        work()
        share = (1 - SAMPLING_SHARE) * self._forward + SAMPLING_SHARE * (self._tokens is not None)
        return TimedGraph(self, self._tokens, share)

    def launch(self, kernel: Kernel, _: Any, __: Any, args: Sequence[Any], *___: Any) -> None:
        """Draw tokens if the kernel does; nothing else."""
        self.timeline.calls += 1
        if kernel.name.startswith("embed"):
            self._forward = True
        elif kernel.name.startswith("sample_choose"):
            self._tokens = args[-2]
            self.draw(self._tokens)

    def tensor_map(self, array: Any, box_rows: int) -> np.void:
        """Return zeros."""
        zeros: np.void = np.zeros(1, TENSOR_MAP)[0]
        return zeros

    def matmul(self, *_: Any, **__: Any) -> None:
        """Do nothing."""
        self.timeline.calls += 1

    def synchronize(self) -> None:
        """Wait for the queued steps."""
        self.timeline.wait(self.timeline.end)


def write_model(folder: Path) -> Path:
    """Write the model that the device has, with the tokenizer of the embedded model."""
    write_checkpoint(folder, SHAPE, "BF16")
    shutil.copy(demo_model_folder() / "tokenizer.json", folder)
    return folder


def grammars(folder: Path, rows: int, steps: int) -> tuple[list[GrammarMatcher], Any]:
    """Return a matcher per row, each at another place of a text, and the text's next tokens."""
    text = json.dumps([ITEM] * (2 + (rows + steps) // 16), separators=(",", ":"))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    if len(tokens) < rows + steps:
        raise SystemExit(f"{len(tokens)} tokens are too few")
    compiler = GrammarCompiler(folder, SHAPE.vocab, [END])
    begun = [
        compiler.compile(GrammarTask(SCHEMA, frozenset([END]), tuple(tokens[:row])))
        for row in range(rows)
    ]
    compiler.close()
    places = np.arange(steps)[:, None] + np.arange(rows)
    return begun, np.array(tokens, np.int32)[places]


def measure(
    folder: Path, rows: int, step_seconds: float, steps: int, kind: str, *, ahead: bool
) -> tuple[float, float, float]:
    """Return per step: idle seconds of the device, seconds of the host's work, device calls."""
    timeline = Timeline(step_seconds)
    total = PROMPT + WARM + steps + 8
    matchers, script = grammars(folder, rows, total) if kind == "grammar" else ([], None)
    device = TimedDevice(timeline, script)
    config = RunnerConfig(model=str(folder), num_blocks=rows * -(-total // 16) + 16)
    runner = load_runner(config, backend=CudaBackend(device))
    engine = LLMEngine(runner, SchedulerConfig(max_batch=rows), look_ahead=ahead)
    rng = np.random.default_rng(1)
    for row in range(rows):
        params = SamplingParams(
            temperature=0.8, top_p=0.9, seed=row, ignore_eos=True, max_new_tokens=total - PROMPT,
            **KINDS[kind],
        )  # fmt: skip
        # Prompts of many lengths, so that full blocks do not come in the same step.
        prompt = rng.integers(0, SHAPE.vocab, PROMPT - row % 16).tolist()
        context = engine._context(prompt, params)
        context.log_probabilities = 5 if kind == "log-probs" else 0
        if matchers:
            context.set_matcher(matchers[row])
        engine.add(context)
    tokens = 0
    for at in range(WARM):
        if at == WARM - 2:
            gc.collect()
            gc.freeze()  # as a worker that is ready
        tokens = sum(type(event) is TokenEvent for event in engine.step())
    if tokens != rows:
        raise SystemExit(f"{tokens} of {rows} requests got a token")
    timeline.idle, timeline.calls, first = 0.0, 0, timeline.steps
    began = time.thread_time()
    for _ in range(steps):
        engine.step()
    done = max(1, timeline.steps - first)
    return timeline.idle / done, (time.thread_time() - began) / steps, timeline.calls / done


def main() -> int:
    """Print the table. The exit code is 0 whether or not a bar is met."""
    parser = argparse.ArgumentParser(prog="device_idle", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3, help="the best of so many is printed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    print("idle time of a modelled GPU per decode step; host: CPU time of one step of the engine")
    print("kind        rows  step    idle, waiting   idle, ahead    bar   host, ahead  calls")
    with scratch_folder() as place:
        folder = write_model(place / "model")
        for kind in given.kinds:
            for rows in given.rows:
                for step in given.step_ms:
                    found = [
                        [
                            measure(folder, rows, step / 1e3, given.steps, kind, ahead=ahead)
                            for ahead in (False, True)
                        ]
                        for _ in range(given.turns)
                    ]
                    waiting = min(turn[0][0] for turn in found)
                    idle, host, calls = (min(turn[1][i] for turn in found) for i in range(3))
                    bar = f"{BARS_US[rows]} us" if rows in BARS_US else "-"
                    print(
                        f"{kind:11} {rows:4} {step:3g} ms {waiting * 1e6:10.0f} us "
                        f"{idle * 1e6:10.0f} us {bar:>8} {host * 1e6:9.0f} us {calls:6.1f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
