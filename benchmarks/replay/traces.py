"""Request traces: when requests came and how long they were, without their text.

Sources and licences are in ``benchmarks/traces/README.md``.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...proto.errors import InputError

FOLDER = Path(__file__).parents[1] / "traces"
BLOCK_TOKENS = 512
"""Tokens a hash id of the Mooncake traces stands for."""
MAX_TOKENS = 1 << 20
"""Longest prompt or answer a trace may hold; its readers compute with squares."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: ``at`` seconds from the trace's start, lengths in tokens.

    ``blocks``: one name per whole 512 tokens of the prompt, equal for equal tokens with an equal
    prefix; empty if the trace has none.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[bytes, ...] = ()


def load(name: str, folder: Path = FOLDER) -> list[Arrival]:
    """All requests of the trace ``name``, by arrival; raises InputError for a damaged file."""
    with gzip.open(folder / f"{name}.csv.gz", "rt", newline="") as lines:
        rows = [_arrival(row, number) for number, row in enumerate(csv.DictReader(lines), 2)]
    if any(later.at < earlier.at for earlier, later in pairwise(rows)):
        raise InputError(f"trace {name}: its requests are not in the order of their arrival")
    return _spread(rows)


def _arrival(row: dict[str, str], line: int) -> Arrival:
    try:
        prompt, output = int(row["input_length"]), int(row["output_length"])
        at = float(row["timestamp_ms"]) / 1000
        blocks = tuple(_names(row.get("hash_ids") or ""))
    except (KeyError, ValueError, TypeError) as problem:
        raise InputError(f"trace line {line} is not a request: {problem!r}") from problem
    if not (0 <= at < 1e9 and 0 < prompt <= MAX_TOKENS and 0 < output <= MAX_TOKENS):
        raise InputError(f"trace line {line} has an impossible time or length")
    return Arrival(at, prompt, output, blocks[: prompt // BLOCK_TOKENS])


def _names(text: str) -> list[bytes]:
    """Block names of ``0 14-16``: ids 0, 14, 15 and 16."""
    names: list[bytes] = []
    for part in text.split():
        first, _, last = part.partition("-")
        ids = range(int(first), int(last or first) + 1)
        if len(names) + len(ids) > MAX_TOKENS // BLOCK_TOKENS + 1:
            raise ValueError("more blocks than the longest prompt has")
        names += [number.to_bytes(8, "little") for number in ids]
    return names


def _spread(rows: list[Arrival]) -> list[Arrival]:
    """Put requests of one time stamp evenly between it and the next one.

    One trace's clock ticks every 3 s; a burst of ten requests each tick is not what came.
    """
    spread: list[Arrival] = []
    start = 0
    while start < len(rows):
        end = start
        while end < len(rows) and rows[end].at == rows[start].at:
            end += 1
        at = rows[start].at
        gap = (rows[end].at - at) if end < len(rows) else 0.0
        step = min(gap, _LONGEST_TICK_S) / (end - start)
        for place, row in enumerate(rows[start:end]):
            spread.append(Arrival(at + place * step, row.prompt, row.output, row.blocks))
        start = end
    return spread


_LONGEST_TICK_S = 3.0
