"""The three modes on one GPU under the load generator, each row by a command that users have.

One colocated worker; a prefill and a decode worker; the same two in mode adaptive. The model has
the shapes of Llama-3.1-8B. Every row names the command ``baton bench`` that measured it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..served import Served
from .lines import Line, checked, wrong
from .models import checkpoint
from .serving import first_error
from .stage import Stage, readable

MODES = {
    "colocated": (1, ("--mode=colocated", "--workers=1")),
    "disaggregated": (2, ("--mode=disaggregated",)),
    "adaptive": (2, ("--mode=adaptive",)),
}
"""Workers, and settings of ``baton serve``."""
SHAPES = ((64, 128, 1024), (16, 8192, 512), (256, 128, 1024), (16, 128, 1024), (1, 128, 1024))
"""Streams, tokens of a prompt and of an answer, in the order of their value."""
_TINY = ((2, 6, 4),)
_READY_S, _RUN_S = 75.0, 60.0
_SHORT = 16


def colocated(stage: Stage) -> Iterator[Line]:
    """One worker that computes prompts and tokens."""
    return _mode(stage, "colocated", SHAPES)


def disaggregated(stage: Stage) -> Iterator[Line]:
    """A prefill and a decode worker, two processes on the GPU."""
    return _mode(stage, "disaggregated", SHAPES)


def adaptive(stage: Stage) -> Iterator[Line]:
    """The same two processes; the router decides per request."""
    return _mode(stage, "adaptive", SHAPES)


def modes(stage: Stage) -> Iterator[Line]:
    """All three with the first shape, for a short visit."""
    for name in MODES:
        yield from _mode(stage, name, SHAPES[:1])


def _mode(stage: Stage, name: str, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Line]:
    workers, settings = MODES[name]
    most = max(streams for streams, _, _ in shapes)
    flags = (*stage.flags, *settings, f"--max-num-seqs={most}", f"--prefill-max-num-seqs={most}")
    if stage.tiny:
        flags += ("--kv-blocks=64",)
    with Served(
        stage.scratch, checkpoint(stage), flags=flags, ready_s=_READY_S, workers=workers
    ) as served:
        for shape in _TINY if stage.tiny else shapes:
            yield _row(stage, name, served.address, *shape)
        log = served.log
    error = first_error(log)
    yield checked(f"no error in the log of mode {name}", not error, error or "none")


def _row(stage: Stage, mode: str, address: str, streams: int, prompt: int, answer: int) -> Line:
    """One request per stream, after as many short ones, which capture the graphs."""
    what = f"{mode}, {streams} x {prompt} + {answer}"
    out = stage.scratch / "modes.json"
    for count in (min(answer, _SHORT), answer):
        load = [
            f"--concurrency={streams}", f"--requests={streams}", "--warmup=0",
            f"--input={prompt}", f"--output={count}", "--temperature=0.8",
        ]  # fmt: skip
        out.unlink(missing_ok=True)
        if problem := _sent(address, [*load, f"--json={out}"]):
            return wrong(what, problem)
    return _line(what, json.loads(out.read_text()), f"baton bench {' '.join(load)}", streams)


def _sent(address: str, load: Sequence[str]) -> str:
    """Run ``baton bench``; return what went wrong, or ""."""
    command = [sys.executable, "-P", "-m", "baton.cli", "bench", address, *load]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
    except subprocess.TimeoutExpired:
        return f"baton bench did not end within {_RUN_S:g} s"
    return (ended.stderr or ended.stdout).strip()[-300:] if ended.returncode else ""


def _line(what: str, found: Any, command: str, streams: int) -> Line:
    (run,) = found["runs"]
    if run["outcomes"].get("ok") != streams:
        return wrong(what, f"{run['outcomes']}, {run['errors']}")
    first, each = run["ttft"], run["tpot"]
    words = (
        f"{run['output_rate']:.0f} tok/s; first token {readable(first['p50'])} "
        f"(p99 {readable(first['p99'])}), TPOT {readable(each['p50'])} "
        f"(p99 {readable(each['p99'])}); {command}"
    )
    figures = {
        "tokens_per_s": run["output_rate"], "first_seconds": first["p50"],
        "p99_first_seconds": first["p99"], "per_token_s": each["p50"],
        "p99_per_token_s": each["p99"],
    }  # fmt: skip
    return Line(what, words, figures=figures)
