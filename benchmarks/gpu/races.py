"""Time work that is queued many times, beside peers, all in one process and taking turns.

Work is captured into a graph of several calls, so that launches cost nothing; its inputs are
larger than the L2 cache, or several sets of them take turns.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .lines import TOLD, Line, measured
from .stage import Stage, Timing, Work, readable


@dataclass(frozen=True)
class Runner:
    """Something timed: ``seconds()`` of one replay of ``calls`` calls.

    ``kept``: what a captured graph reads, which must live as long.
    """

    name: str
    seconds: Callable[[], float]
    calls: int
    kept: object = None


def own(stage: Stage, works: Sequence[Work], rounds: int = 1, name: str = "ours") -> Runner:
    """Our launches, captured: every work ``rounds`` times in turn."""
    rounds = stage.size(rounds, 1)

    def all_of_them() -> None:
        for _ in range(rounds):
            for work in works:
                work()

    graph = stage.device.capture(all_of_them)
    return Runner(name, lambda: stage.clock.seconds(graph.replay), rounds * len(works))


def uncaptured(stage: Stage, works: Sequence[Work], name: str = "ours") -> Runner:
    """Copies and the like, which take much longer than their launch."""

    def all_of_them() -> None:
        for work in works:
            work()

    return Runner(name, lambda: stage.clock.seconds(all_of_them), len(works))


def of_torch(stage: Stage, name: str, works: Sequence[Work], rounds: int = 1) -> Runner:
    """Work of torch, captured into a separate graph on a GPU."""
    import torch

    if stage.cupy is None:
        return uncaptured(stage, works, name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for work in works:
                work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for work in works:
                work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return Runner(name, seconds, rounds * len(works), kept=works)


def race(stage: Stage, runners: Sequence[Runner], repeats: int = 20) -> dict[str, Timing]:
    """Seconds of one call of each, measured in turn."""
    repeats = stage.size(repeats, 2)
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for runner in runners:
        runner.seconds()
    for _ in range(repeats):
        for runner in runners:
            times[runner.name].append(runner.seconds() / runner.calls)
    return {name: Timing.of(found) for name, found in times.items()}


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


Peers = Mapping[str, Callable[[], Runner]]


def entered(peers: Peers) -> tuple[list[Runner], dict[str, str]]:
    """Peers that could be set up, and why the others could not."""
    runners, refused = [], {}
    for name, make in peers.items():
        try:
            runner = make()
            runner.seconds()
        except Exception as error:
            lines = str(error).strip().splitlines()
            refused[name] = f"{type(error).__name__}: {lines[0][:80] if lines else ''}"
        else:
            runners.append(runner)
    return runners, refused


def as_torch(array: Any) -> Any:
    """The same memory as a torch tensor; uint16 becomes bfloat16."""
    import numpy as np
    import torch

    plain = np.asarray(array) if isinstance(array, np.ndarray) else array
    tensor = torch.from_dlpack(plain)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


@dataclass(frozen=True)
class Bars:
    """The bars of a figure: a share of ``floor_s``, an absolute time, the peers' times."""

    floor_s: float = 0.0
    share: float = 0.0
    limit_s: float = 0.0
    ahead: bool = False


def verdict(
    what: str, times: Mapping[str, Timing], bars: Bars, refused: Mapping[str, str] | None = None
) -> Line:
    """The line of a race: the time of "ours", its share of the floor, peers as multiples of it."""
    ours = times["ours"]
    words, wanted, held = [ours.text], [], True
    figures = {"seconds": ours.median, "low": ours.low, "high": ours.high}
    if bars.floor_s:
        share = bars.floor_s / ours.median
        figures |= {"floor": bars.floor_s, "share": share}
        words.append(f"{share:.2f} of the floor")
        held &= share >= bars.share
    if bars.share:
        wanted.append(f"{bars.share:.2f}")
    if bars.limit_s:
        wanted.append(readable(bars.limit_s))
        held &= ours.median <= bars.limit_s
    for name, theirs in times.items():
        if name == "ours":
            continue
        ratio = theirs.median / ours.median
        figures[f"{name} seconds"] = theirs.median
        words.append(f"{name} {readable(theirs.median)} ({ratio:.2f}x)")
        held &= ratio >= 1 or not bars.ahead
    if bars.ahead and len(times) > 1:
        wanted.append("not behind")
    words += [f"{name}: {why}" for name, why in (refused or {}).items()]
    if not wanted:
        return Line(what, ", ".join(words), state=TOLD, figures=figures)
    return measured(what, ", ".join(words), ", ".join(wanted), held, **figures)


def matrix_rate(stage: Stage) -> float:
    """Operations per second of a large bf16 product by cuBLAS, of random values: zeros flatter."""
    size = stage.size(8192, 32)
    x, weight = (stage.random_bf16((size, size), seed=seed) for seed in range(2))
    out = stage.device.empty((size, size), "uint16")
    work = partial(stage.device.matmul, x, weight, out)
    return 2 * size**3 / race(stage, [own(stage, [work], 2)], 10)["ours"].median


def node_seconds(stage: Stage) -> float:
    """Seconds of a node of a graph that does next to nothing: the floor of small kernels."""
    from baton.engine.kernels.cuda.elementwise import silu_mul

    device = stage.device
    gate_up, out = device.zeros((1, 16), "uint16"), device.zeros((1, 8), "uint16")
    work = partial(silu_mul, device, gate_up, out)
    return race(stage, [own(stage, [work], 500)])["ours"].median


def copy_bandwidth(stage: Stage) -> float:
    """Bytes per second of a large copy, read and written: the ceiling of what moves bytes."""
    import numpy as np

    nbytes = stage.size(2 << 30, 1 << 16)
    source, target = (stage.device.zeros((nbytes,), np.uint8) for _ in range(2))
    times = race(stage, [uncaptured(stage, [lambda: stage.copy(target, source)])], 15)
    return 2 * nbytes / times["ours"].median
