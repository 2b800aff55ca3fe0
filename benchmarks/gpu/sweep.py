"""Which variants of the kernels are fastest on this card; the winners go into their table.

The parts that follow use them. A variant replaces a default only if it is 2 % faster over all its
shapes, because differences below that are noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.engine.kernels.cuda import elementwise, linear
from baton.engine.kernels.cuda.reference import from_bf16
from baton.engine.kernels.cuda.tuning import (
    Card,
    RingTiles,
    Tuning,
    default_tuning,
    table_path,
    write_card,
)

from .bench_attention import DecodeBench, PrefillBench
from .lines import Line, checked, skipped, wrong
from .machine import ROOT, commit_of
from .races import Runner, own, race
from .stage import Stage, Timing, readable

GAIN = 0.98
"""A variant must take at most this share of the default's time."""
ATTENTION = ((2, 3), (2, 2), (3, 2), (1, 4), (1, 6))
"""Blocks and stages that fit the shared memory of a multiprocessor of sm_90. More blocks would not
fit: a stage takes 32 KiB, and with one stage nothing is loaded while a tile is computed."""
SPLITS = tuple((chunk, warps) for chunk in (256, 512, 1024) for warps in (4, 2, 1))
WIDTHS = (1024, 2048, 4096, 6144, 8192, 14336, 28672, 128256)
DEPTH, DEEP = 4096, 14336
RINGS: tuple[RingTiles, ...] = (0, 1, 2, 4)
"""Tiles of a block whose weights in flight are in shared memory; 0: they are in registers."""
PREFILLS = ("wgmma", "mma", "bulk")
GATED = ((3072, 1024), (9728, 2560), (14336, 4096))
"""Channels of the MLP and of the model, as in models of 0.6, 4 and 8 billion parameters."""
_CACHE = 256 << 20
"""Bytes of weights that no cache holds."""


def sweep(stage: Stage) -> Iterator[Line]:
    """Attention of decode and of prefill, products with few rows, RMSNorm."""
    start = Tuning()
    if stage.cupy is not None:
        start = default_tuning(stage.cupy.cuda.Device().compute_capability)
    several = ((8, 8192), (64, 2048), (256, 1024))
    found = yield from _attention(
        stage, start, ATTENTION, ("decode_bounds", "decode_stages"), ((2, 40),), several
    )
    few = ((1, 8192), (1, 65536), (4, 16384))
    found = yield from _attention(
        stage, found, SPLITS, ("decode_chunk", "combine_warps"), ((1, 600),), few
    )
    if start.prefill != "mma":
        found = yield from sweep_prefills(stage, found)
    found = yield from _products(stage, found)
    found = yield from sweep_rings(stage, found)
    found = yield from _gates(stage, found)
    found = yield from _norms(stage, found)
    yield _written(stage, found)


def _attention(
    stage: Stage,
    usual: Tuning,
    choices: Sequence[tuple[int, int]],
    names: tuple[str, str],
    tiny: Sequence[tuple[int, int]],
    full: Sequence[tuple[int, int]],
) -> Any:
    """Yield a line per shape; return the best tuning."""
    tunings = {
        " x ".join(map(str, choice)): msgspec.structs.replace(
            usual, **dict(zip(names, choice, strict=True))
        )
        for choice in (choices[:2] if stage.tiny else choices)
    }
    times: dict[str, list[float]] = {name: [] for name in tunings}
    for batch, length in tiny if stage.tiny else full:
        bench = DecodeBench(stage, batch, length, math.inf)
        what = f"{' x '.join(names)}, {batch} x {length}"
        runners, outputs = [], {}
        for name, tuning in tunings.items():
            device = stage.device.tuned(tuning)
            runners.append(replace(bench.own(device), name=name))
            outputs[name] = from_bf16(device.download(bench.output))
        yield _agree(what, outputs)
        found = race(stage, runners, 10)
        for name, timing in found.items():
            times[name].append(timing.median)
        yield _told(what, found)
        del bench, runners
    return tunings[_best(times)]


def sweep_prefills(stage: Stage, usual: Tuning) -> Any:
    """Yield a line per length of a prompt; return the best tuning."""
    kinds = {kind: msgspec.structs.replace(usual, prefill=kind) for kind in PREFILLS}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for length in (stage.size(8192, 24), stage.size(1000, 16)):
        bench, what = PrefillBench(stage, 1, length, 0), f"prefill of {length}"
        runners, outputs = [], {}
        for kind, tuning in kinds.items():
            device = stage.device.tuned(tuning)
            runners.append(replace(bench.own(device), name=kind))
            outputs[kind] = from_bf16(device.download(bench.output))
        yield _agree(what, outputs)
        found = race(stage, runners, 10)
        for kind, timing in found.items():
            times[kind].append(timing.median)
        yield _told(what, found)
    return kinds[_best(times)]


def _agree(what: str, outputs: Mapping[str, Any]) -> Line:
    """Variants compute the same; other splits only round differently."""
    first, *others = outputs.values()
    size = float(np.linalg.norm(first))
    worst = max(float(np.linalg.norm(other - first)) / size for other in others)
    return checked(f"{what}: same results", worst < 1e-3, f"{worst:.1e} apart", "1e-3")


def _told(what: str, found: Mapping[str, Timing]) -> Line:
    words = ", ".join(f"{name}: {readable(timing.median)}" for name, timing in found.items())
    return Line(what, words, figures={name: timing.median for name, timing in found.items()})


def _best(times: Mapping[str, Sequence[float]]) -> str:
    """The name with the lowest times; the first one unless another is clearly faster."""
    first, *others = times
    logs = {name: _logs(found) for name, found in times.items()}
    best = min(others, key=lambda name: logs[name])
    return best if logs[best] < logs[first] + math.log(GAIN) else first


def _logs(times: Sequence[float]) -> float:
    return sum(map(math.log, times)) / len(times)


def _products(stage: Stage, found: Tuning) -> Any:
    """Yield a line per number of weight rows; return the tuning with the best tiles for each."""
    steps: list[tuple[int, int]] = []
    for width in (24, 72) if stage.tiny else WIDTHS:
        times: dict[str, list[float]] = {"1": [], "2": []}
        depth = stage.size(DEPTH, 64)
        copies = stage.size(-(-_CACHE // (2 * width * depth)), 1)
        weights = [stage.random_bf16((width, depth), seed=at) for at in range(copies)]
        for rows in (1, 16):
            x = stage.random_bf16((rows, depth))
            out = stage.device.empty((rows, width), np.uint16)
            runners = []
            for tiles in ("1", "2"):
                chosen = Tuning(skinny_tiles=((0, 1),) if tiles == "1" else ((0, 2),))
                device = stage.device.tuned(chosen)
                works = [partial(linear.linear, device, x, weight, None, out) for weight in weights]
                runners.append(
                    own(replace(stage, device=device), works, max(1, 8 // copies), tiles)
                )
            raced = race(stage, runners, 10)
            for name, timing in raced.items():
                times[name].append(timing.median)
            yield _told(f"tiles of a product {rows} x {width} x {depth}", raced)
        better = 2 if sum(times["2"]) < GAIN * sum(times["1"]) else 1
        if not steps or steps[-1][1] != better:
            steps.append((width if steps else 0, better))
    return msgspec.structs.replace(found, skinny_tiles=tuple(steps))


def sweep_rings(stage: Stage, found: Tuning) -> Any:
    """Yield lines per shape with 16 rows; return the tuning with the best kernel for each."""
    steps: list[tuple[int, RingTiles]] = []
    for width in (24, 72) if stage.tiny else WIDTHS:
        times: dict[str, list[float]] = {str(tiles): [] for tiles in RINGS}
        for depth in (stage.size(DEPTH, 64), *([DEEP] if width == DEPTH else [])):
            what = f"tiles with weights in shared memory, 16 x {width} x {depth}"
            runners, same = _ring_runners(stage, found, width, depth)
            yield checked(f"{what}: same bits", same, "equal" if same else "different", "equal")
            raced = race(stage, runners, 10)
            for name, timing in raced.items():
                times[name].append(timing.median)
            yield _told(what, raced)
        better = RINGS[list(times).index(_best(times))]
        if not steps or steps[-1][1] != better:
            steps.append((width if steps else 0, better))
    return msgspec.structs.replace(found, skinny_ring=tuple(steps))


def _ring_runners(stage: Stage, found: Tuning, width: int, depth: int) -> tuple[list[Runner], bool]:
    """Return a runner per choice of tiles, and whether all give the same bits."""
    copies = stage.size(-(-_CACHE // (2 * width * depth)), 1)
    weights = [stage.random_bf16((width, depth), seed=at) for at in range(copies)]
    x, runners, outputs = stage.random_bf16((16, depth)), [], []
    for tiles in RINGS:
        device = stage.device.tuned(msgspec.structs.replace(found, skinny_ring=((0, tiles),)))
        out = device.empty((16, width), np.uint16)
        works = [partial(linear.linear, device, x, weight, None, out) for weight in weights]
        works[0]()
        outputs.append(device.download(out))
        runners.append(own(replace(stage, device=device), works, max(1, 8 // copies), str(tiles)))
    return runners, all(bool((each == outputs[0]).all()) for each in outputs)


def _gates(stage: Stage, found: Tuning) -> Any:
    """Yield a line per gated product; fuse from the width on from which one kernel is faster."""
    never = 1 << 30
    fuse_from = never
    for width, depth in ((24, 64),) if stage.tiny else GATED:
        times: dict[str, list[float]] = {"apart": [], "fused": []}
        copies = stage.size(-(-_CACHE // (4 * width * depth)), 1)
        weights = [stage.random_bf16((2 * width, depth), seed=at) for at in range(copies)]
        for rows in (1, 16):
            x = stage.random_bf16((rows, depth))
            space = stage.device.empty((rows, 2 * width), np.uint16)
            runners, outputs = [], {}
            for name in times:
                tuning = msgspec.structs.replace(found, fuse_from=0 if name == "fused" else never)
                device = stage.device.tuned(tuning)
                out = device.empty((rows, width), np.uint16)
                works = [
                    partial(linear.linear_silu_mul, device, x, weight, space, out)
                    for weight in weights
                ]
                works[0]()
                outputs[name] = device.download(out)
                runners.append(own(replace(stage, device=device), works, max(1, 8 // copies), name))
            what = f"gated product {rows} x {width} x {depth}"
            same = bool((outputs["fused"] == outputs["apart"]).all())
            yield checked(f"{what}: same bits", same, "equal" if same else "different", "equal")
            raced = race(stage, runners, 10)
            for name, timing in raced.items():
                times[name].append(timing.median)
            yield _told(what, raced)
        # The bits are the same: fused wherever that is not slower.
        start = 0 if width == GATED[0][0] else width
        fuse_from = (
            min(fuse_from, start) if _logs(times["fused"]) < _logs(times["apart"]) else never
        )
    return msgspec.structs.replace(found, fuse_from=fuse_from)


def _norms(stage: Stage, found: Tuning) -> Any:
    """Yield a line per number of rows; one word per thread up to the rows where it is slower."""
    width, norm_rows, better = stage.size(4096, 64), 0, True
    for rows in (1, 3) if stage.tiny else (1, 64, 256, 1024):
        x, residual = (stage.random_bf16((rows, width), seed=at) for at in range(2))
        weight, out = stage.random_bf16((width,)), stage.device.empty((rows, width), np.uint16)
        runners = []
        for name, most in (("one", rows), ("two", 0)):
            device = stage.device.tuned(msgspec.structs.replace(found, norm_rows=most))
            work = partial(elementwise.add_rms_norm, device, x, residual, weight, 1e-5, out)
            runners.append(own(replace(stage, device=device), [work], stage.size(200, 2), name))
        raced = race(stage, runners, 10)
        better = better and raced["one"].median <= raced["two"].median
        norm_rows = rows if better else norm_rows
        yield _told(f"words per thread of add + RMSNorm {rows} x {width}", raced)
    return msgspec.structs.replace(found, norm_rows=norm_rows)


def _written(stage: Stage, found: Tuning) -> Line:
    """Put the winners into the table, which the next process reads."""
    cupy, what = stage.cupy, "entry of the table"
    if cupy is None:
        return skipped(what, f"no GPU; {msgspec.json.encode(found).decode()}")
    current = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(current.id)["name"].decode()
    commit = commit_of(ROOT) or "unknown"
    card = Card(name=name, capability=current.compute_capability, commit=commit, tuning=found)
    path = table_path()
    if stage.tiny:
        path = Path(stage.scratch) / "tuning.json"
        path.write_text('{"cards": []}')
    try:
        write_card(path, card)
    except OSError as error:
        return wrong(what, f"{path}: {error}")
    return Line(what, msgspec.json.encode(card).decode())
