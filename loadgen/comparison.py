"""Several configurations under the same requests: one table, raw rows, equal tokens. Pure.

Each configuration runs once in every round. A percentile of the table is over the requests of all
rounds together; the two numbers behind it are the least and the largest of the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from .statistics import OK, Distribution, Record, Summary, has_limits, summarize, warning


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster counted in one run, apart from latencies.

    ``handoff_seconds``: sum over the handoffs. ``local``: requests that a decode worker served
    alone. ``kv_bytes``: memory for KV blocks of all workers; ``kv_used``: of requests, the largest
    sample. ``machine_load``: processes that were ready to run before the run, of everybody.
    """

    handoffs: int = 0
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    local: int = 0
    kv_bytes: int = 0
    kv_used: int = 0
    machine_load: float = 0.0


@dataclass(slots=True, frozen=True)
class Run:
    """One configuration in one round, which counts from 1; records in the order of the jobs."""

    name: str
    round: int
    records: list[Record]
    counters: Counters


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request of one run, times in seconds; ``at``: its arrival, from the first arrival on.

    ``itl``: one gap per token after the first. ``answer``: its token ids.
    """

    configuration: str
    round: int
    request: int
    at: float
    outcome: str
    error: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: float | None
    tpot: float | None
    end_to_end: float | None
    itl: list[float]
    prefill: str
    decode: str
    answer: list[int]


def rows(run: Run) -> Iterator[Row]:
    """Yield the rows of a run."""
    start = min((one.arrived for one in run.records), default=0.0)
    for number, one in enumerate(run.records, 1):
        yield Row(
            configuration=run.name,
            round=run.round,
            request=number,
            at=one.arrived - start,
            outcome=one.outcome,
            error=one.error,
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
            output_tokens=one.tokens,
            ttft=one.ttft,
            tpot=one.tpot,
            end_to_end=one.end_to_end,
            itl=one.gaps(),
            prefill=one.prefill,
            decode=one.decode,
            answer=one.answer,
        )


# --------------------------------------------------------------------------- equal tokens


def difference(runs: Iterable[Run]) -> str:
    """Return where two configurations answered one request with other tokens, or an empty text.

    An answer that did not end well must be the beginning of the other one.
    """
    first: dict[tuple[int, int], tuple[str, Record]] = {}
    for run in runs:
        for number, record in enumerate(run.records, 1):
            name, other = first.setdefault((run.round, number), (run.name, record))
            at = _differ_at(other, record)
            if at is not None:
                return (
                    f"the tokens of request {number} in round {run.round} differ between {name} "
                    f"and {run.name}, from token {at + 1} on"
                )
            if len(record.answer) > len(other.answer):
                first[run.round, number] = (run.name, record)
    return ""


def _differ_at(one: Record, other: Record) -> int | None:
    mine, theirs = one.answer, other.answer
    common = min(len(mine), len(theirs))
    if mine[:common] != theirs[:common]:
        return next(at for at in range(common) if mine[at] != theirs[at])
    longer, shorter = (one, other) if len(mine) > common else (other, one)
    cut_short = len(shorter.answer) < len(longer.answer) and shorter.outcome == OK
    return common if cut_short else None


# --------------------------------------------------------------------------- the table


@dataclass(slots=True, frozen=True)
class _Measure:
    """A line of the table. ``better``: 1 if more is better, -1 if less is, 0: neither."""

    title: str
    value: Callable[[Summary, Counters], float | None]
    better: int = -1
    digits: int = 1


def _latencies() -> Iterator[_Measure]:
    for title, field in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot")):
        for level in ("p50", "p95", "p99"):
            yield _Measure(f"{title} {level}, ms", _latency(field, level))


def _latency(field: str, level: str) -> Callable[[Summary, Counters], float | None]:
    def value(summary: Summary, _: Counters) -> float | None:
        found: Distribution = getattr(summary, field)
        seconds: float | None = getattr(found, level)
        return None if seconds is None else 1000 * seconds

    return value


def _measures(slo_ttft: float, slo_itl: float) -> list[_Measure]:
    found = list(_latencies())
    if has_limits(slo_ttft, slo_itl):
        found += [
            _Measure("in limits, %", lambda one, _: 100 * one.attained, 1),
            _Measure("goodput, requests/s", lambda one, _: one.goodput, 1, 2),
        ]
    return [
        *found,
        _Measure("output tokens/s", lambda one, _: one.output_rate, 1),
        _Measure("local requests, %", lambda one, its: _part(its.local, one.requests, 100.0), 0),
        _Measure("handoff, GB/s", lambda _, its: _speed(its), 0, 2),
        _Measure("KV memory used, MiB", lambda _, its: its.kv_used / (1 << 20)),
        _Measure("KV memory, MiB", lambda _, its: its.kv_bytes / (1 << 20), 0, 0),
    ]


def _part(number: int, all_of_them: int, scale: float) -> float | None:
    return scale * number / all_of_them if all_of_them else None


def _speed(counters: Counters) -> float | None:
    seconds = counters.handoff_seconds
    return counters.handoff_bytes / seconds / 1e9 if counters.handoffs and seconds > 0 else None


def table(runs: Sequence[Run], slo_ttft: float = math.inf, slo_itl: float = math.inf) -> list[str]:
    """Return the lines: a column per configuration, in the order of the first round."""
    names = list(dict.fromkeys(run.name for run in sorted(runs, key=lambda run: run.round)))
    limits = slo_ttft, slo_itl
    columns = [_Column.of([run for run in runs if run.name == name], limits) for name in names]
    measures = _measures(*limits)
    lines = [["", *names]]
    for measure in measures:
        best = _best(columns, measure)
        cells = [column.cell(measure) for column in columns]
        marked = [f"{cell}{' *' if at == best else '  '}" for at, cell in enumerate(cells)]
        lines.append([measure.title, *marked])
    lines.append(["requests", *(f"{column.outcomes}  " for column in columns)])
    late = any(column.late for column in columns)
    if late:
        lines.append(["rounds sent late", *(column.late or "-  " for column in columns)])
    widths = [max(len(line[at]) for line in lines) for at in range(len(names) + 1)]
    shown = []
    for line in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        shown.append(f"{line[0]:{widths[0]}}  " + "  ".join(cells).rstrip())
    if any(len(column.rounds) > 1 for column in columns):
        shown.append("[least-largest of the rounds]; * better than all others in every round")
    if late:
        shown.append("! this machine was too busy to generate the load; latencies contain that")
    if any(column.grouped for column in columns):
        shown.append("ITL p50 is 0: messages had several tokens, which are 0 apart; compare TPOT")
    return shown


@dataclass(slots=True, frozen=True)
class _Column:
    """A configuration: all its rounds together, and each."""

    together: tuple[Summary, Counters]
    rounds: list[tuple[Summary, Counters]]
    outcomes: str

    @classmethod
    def of(cls, runs: Sequence[Run], limits: tuple[float, float]) -> _Column:
        rounds = [(summarize(run.records, run.round, *limits), run.counters) for run in runs]
        together = pooled([one for one, _ in rounds], runs, limits)
        counts = ", ".join(
            f"{number} {name}" for name, number in together.outcomes.items() if number
        )
        return cls((together, _total(runs)), rounds, counts)

    @property
    def late(self) -> str:
        """How many rounds the generator was too slow for, or an empty text."""
        found = sum(bool(warning(summary)) for summary, _ in self.rounds)
        return f"{found} of {len(self.rounds)} !" if found else ""

    @property
    def grouped(self) -> bool:
        """True if most tokens arrived in one message with the one before."""
        itl, tpot = self.together[0].itl.p50, self.together[0].tpot.p50
        return itl == 0 and tpot is not None and tpot > 0

    def cell(self, measure: _Measure) -> str:
        value = measure.value(*self.together)
        if value is None:
            return "-"
        shown = f"{value:.{measure.digits}f}"
        found = self.values(measure)
        if len(found) < 2:
            return shown
        return f"{shown} [{min(found):.{measure.digits}f}-{max(found):.{measure.digits}f}]"

    def values(self, measure: _Measure) -> list[float]:
        values = (measure.value(*one) for one in self.rounds)
        return [value for value in values if value is not None]


def pooled(
    summaries: Sequence[Summary], runs: Sequence[Run], limits: tuple[float, float]
) -> Summary:
    """Return the summary of all requests of these runs; rates are over the sum of their times."""
    records = [record for run in runs for record in run.records]
    found, seconds = summarize(records, 0.0, *limits), sum(one.seconds for one in summaries)
    return msgspec.structs.replace(
        found,
        seconds=seconds,
        output_rate=found.output_tokens / seconds if seconds > 0 else 0.0,
        goodput=found.attained * found.requests / seconds if seconds > 0 else 0.0,
    )


def _total(runs: Sequence[Run]) -> Counters:
    counters = [run.counters for run in runs]
    return Counters(
        handoffs=sum(one.handoffs for one in counters),
        handoff_bytes=sum(one.handoff_bytes for one in counters),
        handoff_seconds=math.fsum(one.handoff_seconds for one in counters),
        local=sum(one.local for one in counters),
        kv_bytes=max(one.kv_bytes for one in counters),
        kv_used=max(one.kv_used for one in counters),
    )


def _best(columns: Sequence[_Column], measure: _Measure) -> int | None:
    """Return the column whose worst round is better than every round of all others, or None."""
    found = [[measure.better * value for value in one.values(measure)] for one in columns]
    if not measure.better or len(columns) < 2 or any(len(values) < 2 for values in found):
        return None
    for at, mine in enumerate(found):
        others = [value for place, values in enumerate(found) if place != at for value in values]
        if min(mine) > max(others):
            return at
    return None
