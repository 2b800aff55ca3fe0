"""Request traces: when requests came and how long they were, without their text.

:func:`read_trace` reads CSV and JSON lines, also compressed by gzip: the files in
``benchmarks/traces``, and the public files of Mooncake, Azure (2023 to 2025) and BurstGPT.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.proto.errors import ConfigError, InputError
from baton.runtime.small_files import check_file

BLOCK_TOKENS = 512
"""Tokens a hash id of the Mooncake traces stands for."""
MAX_TOKENS = 1 << 20
"""Longest prompt or answer a trace may hold; its readers compute with squares."""
MAX_REQUESTS = 1_000_000
_MAX_LINE = 1 << 20
_LONGEST_TICK_S = 3.0
_PROMPT = ("input_length", "ContextTokens", "Request tokens")
_OUTPUT = ("output_length", "GeneratedTokens", "Response tokens")
_MILLISECONDS = ("timestamp_ms", "timestamp")
_SECONDS = ("Timestamp",)
_DATES = ("TIMESTAMP",)


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


def read_trace(path: Path, most: int = 0) -> list[Arrival]:
    """Return the requests of a file by arrival, at most ``most`` (0: all).

    Raises ConfigError for an unreadable file, InputError for a file that is not a trace.
    Requests without prompt or answer, which public traces have, are left out.
    """
    rows: list[Arrival] = []
    try:
        with _opened(path) as stream:
            for number, row in enumerate(_rows(path, stream), 2):
                arrival = _arrival(row, number)
                if arrival is not None:
                    rows.append(arrival)
                if most and len(rows) >= most:
                    break
                if len(rows) > MAX_REQUESTS:
                    raise InputError(f"{path} has more than {MAX_REQUESTS} requests")
    except OSError as problem:
        raise ConfigError(f"cannot read the trace {path}: {problem.strerror or problem}") from None
    except (UnicodeDecodeError, EOFError, zlib.error, csv.Error) as problem:
        raise InputError(f"{path} is not a trace: {problem}") from None
    if not rows:
        raise InputError(f"{path} has no requests")
    if any(later.at < earlier.at for earlier, later in pairwise(rows)):
        raise InputError(f"trace {path.name}: its requests are not in the order of their arrival")
    start = rows[0].at
    return _spread([Arrival(one.at - start, one.prompt, one.output, one.blocks) for one in rows])


def _opened(path: Path) -> io.TextIOBase:
    check_file(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _lines(stream: io.TextIOBase) -> Iterator[str]:
    """Yield the lines of a file; a line without an end must not fill the memory."""
    while line := stream.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            raise InputError(f"a line of the trace has more than {_MAX_LINE} characters")
        yield line


def _rows(path: Path, stream: io.TextIOBase) -> Iterator[Mapping[str, Any]]:
    lines = _lines(stream)
    if ".jsonl" in path.suffixes:
        yield from (_record(line, number) for number, line in enumerate(lines, 1) if line.strip())
    else:
        yield from csv.DictReader(lines)


def _record(line: str, number: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"trace line {number} is not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise InputError(f"trace line {number} is not an object")
    return found


def _arrival(row: Mapping[str, Any], line: int) -> Arrival | None:
    try:
        prompt, output = int(_first(row, _PROMPT)), int(_first(row, _OUTPUT))
        at = _time(row)
        blocks = tuple(_names(row.get("hash_ids") or ""))
    except (KeyError, ValueError, TypeError, OverflowError) as problem:
        raise InputError(f"trace line {line} is not a request: {problem!r}") from problem
    if prompt == 0 or output == 0:
        return None
    if not (0 <= at < 1e11 and 0 < prompt <= MAX_TOKENS and 0 < output <= MAX_TOKENS):
        raise InputError(f"trace line {line} has an impossible time or length")
    return Arrival(at, prompt, output, blocks[: prompt // BLOCK_TOKENS])


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(f"no column {' or '.join(names)}")


def _time(row: Mapping[str, Any]) -> float:
    """Return seconds; only differences count."""
    if any(row.get(name) is not None for name in _DATES):
        text = str(_first(row, _DATES)).strip()
        whole, _, fraction = text.partition(".")  # Azure writes seven digits
        digits = fraction.rstrip("Z").partition("+")[0]
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{digits or 0}")
    if any(row.get(name) is not None for name in _SECONDS):
        return float(_first(row, _SECONDS))
    return float(_first(row, _MILLISECONDS)) / 1000


def _names(ids: str | list[int]) -> list[bytes]:
    """Block names of ``[0, 14, 15]``, or of ``0 14-16``: ids 0, 14, 15 and 16."""
    names: list[bytes] = []
    for part in ids.split() if isinstance(ids, str) else map(str, ids):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if len(names) + len(found) > MAX_TOKENS // BLOCK_TOKENS + 1:
            raise ValueError("more blocks than the longest prompt has")
        names += [number.to_bytes(8, "little") for number in found]
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
