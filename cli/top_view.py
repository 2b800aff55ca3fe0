"""What ``baton top`` shows: pure functions from reports and keys to lines and commands.

Rates are differences of two snapshots. The caller reads the reports, the keys and the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.deploy.messages import duration
from baton.deploy.report import ClusterReport, Percentiles, RequestCounts, WorkerReport
from baton.runtime.process.log import printable

HELP = "q quit   s sort   r reverse   up, down select   d drain"
"""The arrows arrive as the keys k and j."""
RED, BOLD, REVERSE, PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[7m", "\x1b[0m"
_HEALTHY = ("ready", "draining")


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one time. ``reports``: one of each router that answered."""

    at: float
    reports: Sequence[ClusterReport]
    restarts: dict[str, int] = field(default_factory=dict)  # by worker, from the controller

    def workers(self) -> dict[str, WorkerReport]:
        """Return the workers by id, as the first router with a fresh heartbeat reports them."""
        found: dict[str, WorkerReport] = {}
        for report in self.reports:
            for worker in report.workers:
                known = found.get(worker.id)
                if known is None or worker.heard_s_ago < known.heard_s_ago:
                    found[worker.id] = worker
        return found

    def handed_over(self, worker: str) -> int:
        """Return the bytes of a worker's handoffs; each router counts those of its requests."""
        return sum(one.handoff_bytes for r in self.reports for one in r.workers if one.id == worker)

    def requests(self) -> RequestCounts:
        """Return the sums of all routers."""
        counts = [report.router.requests for report in self.reports]
        return RequestCounts(
            in_flight=sum(one.in_flight for one in counts),
            queued=sum(one.queued for one in counts),
            finished=sum(one.finished for one in counts),
            failed=sum(one.failed for one in counts),
            cancelled=sum(one.cancelled for one in counts),
            disconnected=sum(one.disconnected for one in counts),
            refused=sum(one.refused for one in counts),
            replayed=sum(one.replayed for one in counts),
        )


@dataclass(frozen=True)
class Line:
    """One worker: its report, and its rates since the snapshot before."""

    worker: WorkerReport
    tokens_per_s: float
    bytes_per_s: float
    restarts: int

    @property
    def latency(self) -> Percentiles:
        """TTFT of a prefill worker, ITL of a decode worker."""
        worker = self.worker
        return worker.first_token_s or worker.between_tokens_s or Percentiles()

    @property
    def kv_share(self) -> float:
        """Share of the KV blocks that requests own."""
        return self.worker.kv_blocks_used / max(1, self.worker.kv_blocks_total)


@dataclass(frozen=True)
class Column:
    """One column: its heading, width, text of a cell, and sort key."""

    title: str
    width: int
    text: Callable[[Line], str]
    key: Callable[[Line], float | str]


def _device(line: Line) -> str:
    return line.worker.device_title


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


COLUMNS = (
    Column("WORKER", -12, lambda line: line.worker.id, lambda line: line.worker.id),
    Column("ROLE", -8, lambda line: line.worker.role, lambda line: line.worker.role),
    Column("STATE", -9, lambda line: line.worker.state, lambda line: line.worker.state),
    Column(
        "QUEUE", 6,
        lambda line: str(line.worker.requests_waiting),
        lambda line: line.worker.requests_waiting,
    ),
    Column(
        "BATCH", 6,
        lambda line: str(line.worker.requests_running),
        lambda line: line.worker.requests_running,
    ),
    Column("KV %", 6, lambda line: f"{100 * line.kv_share:.1f}", lambda line: line.kv_share),
    Column("TOK/S", 8, lambda line: f"{line.tokens_per_s:.1f}", lambda line: line.tokens_per_s),
    Column("P50 MS", 8, lambda line: _ms(line.latency.p50), lambda line: line.latency.p50 or 0.0),
    Column("P99 MS", 8, lambda line: _ms(line.latency.p99), lambda line: line.latency.p99 or 0.0),
    Column(
        "GB/S", 8, lambda line: f"{line.bytes_per_s / 1e9:.3f}", lambda line: line.bytes_per_s
    ),
    Column("RESTARTS", 8, lambda line: str(line.restarts), lambda line: line.restarts),
    Column("DEVICE", -19, _device, _device),
)  # fmt: skip
"""P50 and P99 are of the TTFT for prefill workers, and of the ITL for decode workers."""
_HIDDEN_FIRST = (
    "DEVICE", "ROLE", "RESTARTS", "GB/S", "P50 MS", "BATCH", "TOK/S", "P99 MS", "KV %", "QUEUE",
)  # fmt: skip
"""Columns that a narrow screen lacks, in this order. The column of the sort order stays."""
_INDENT = " " * 12


@dataclass(frozen=True)
class Quit:
    """End."""


@dataclass(frozen=True)
class Drain:
    """Drain this worker."""

    worker: str


class Top:
    """The state of the view: two snapshots, sort order, selected worker, and a question."""

    def __init__(self, *, color: bool = True) -> None:
        self._color = color
        self._now: Snapshot | None = None
        self._before: Snapshot | None = None
        self._column = 0
        self._reverse = False
        self._selected = ""
        self._asked = ""  # worker that a drain was asked for, until it is confirmed
        self.message = ""

    # ------------------------------------------------------------------ input

    def update(self, snapshot: Snapshot) -> None:
        """Take a new snapshot."""
        self._before, self._now = self._now, snapshot

    def key(self, key: str) -> Quit | Drain | None:
        """Handle a key; return what the caller has to do."""
        if self._asked:
            worker, self._asked = self._asked, ""
            self.message = "" if key == "y" else f"{worker} is not drained"
            return Drain(worker) if key == "y" else None
        match key:
            case "q" | "\x03":
                return Quit()
            case "s":
                self._column = (self._column + 1) % len(COLUMNS)
                self._reverse = not isinstance(self._sort_key(0), str)
            case "r":
                self._reverse = not self._reverse
            case "k":
                self._move(-1)
            case "j":
                self._move(1)
            case "d" if self._selected:
                self._asked = self._selected
                self.message = f"drain {self._selected}? y or n"
        return None

    def _move(self, step: int) -> None:
        names = [line.worker.id for line in self.sorted_lines()]
        if names:
            at = names.index(self._selected) + step if self._selected in names else 0
            self._selected = names[min(max(at, 0), len(names) - 1)]

    # ------------------------------------------------------------------ output

    def sorted_lines(self) -> list[Line]:
        """Return the workers in the chosen order."""
        if self._now is None:
            return []
        found = [self._line(worker) for worker in self._now.workers().values()]
        found.sort(key=lambda line: line.worker.id)
        found.sort(key=COLUMNS[self._column].key, reverse=self._reverse)
        return found

    def _sort_key(self, index: int) -> float | str:
        lines = self.sorted_lines()
        return COLUMNS[self._column].key(lines[index]) if lines else 0.0

    def _line(self, worker: WorkerReport) -> Line:
        now, before = self._now, self._before
        restarts = max(worker.restarts, now.restarts.get(worker.id, 0) if now else 0)
        if now is None or before is None or now.at <= before.at:
            return Line(worker, 0.0, 0.0, restarts)
        seconds = now.at - before.at
        old = before.workers().get(worker.id)
        count, count_before = _tokens(worker), 0 if old is None else _tokens(old)
        if old is not None and old.incarnation != worker.incarnation:
            count_before = 0
        tokens = max(0, count - count_before) / seconds
        moved = max(0, now.handed_over(worker.id) - before.handed_over(worker.id)) / seconds
        return Line(worker, tokens, moved, restarts)

    def lines(self, width: int, height: int) -> list[str]:
        """Return the screen: at most ``height`` lines of at most ``width`` visible characters."""
        if self._now is None or not self._now.reports:
            shown = [printable(self.message) or "no router answers", HELP]
            return [line[:width] for line in shown[:height]]
        head = [*self._summary(width), ""]
        columns = self._columns(width)
        titles = " ".join(_fit(self._title(one), one.width) for one in columns)
        head.append(self._paint(titles[:width].ljust(min(width, len(titles))), BOLD))
        foot = [(printable(self.message) or HELP)[:width]]
        rows = self.sorted_lines()
        room = max(0, height - len(head) - len(foot))
        names = [line.worker.id for line in rows]
        selected = names.index(self._selected) if self._selected in names else 0
        first = max(0, min(selected - room + 1, len(rows) - room)) if selected >= room else 0
        body = [self._row(line, columns, width) for line in rows[first : first + room]]
        return [*head[: height - 1], *body, *foot][:height]

    def _columns(self, width: int) -> list[Column]:
        """Return the columns that fit into the width."""
        columns = list(COLUMNS)
        for title in _HIDDEN_FIRST:
            if sum(abs(one.width) + 1 for one in columns) - 1 <= width:
                break
            columns = [one for one in columns if one.title != title or one is COLUMNS[self._column]]
        return columns

    def _title(self, column: Column) -> str:
        mark = ("v" if self._reverse else "^") if column is COLUMNS[self._column] else ""
        return column.title + mark

    def _row(self, line: Line, columns: Sequence[Column], width: int) -> str:
        cells = (_fit(column.text(line), column.width) for column in columns)
        text = " ".join(cells)[:width]
        if line.worker.id == self._selected:
            return self._paint(text, REVERSE)
        return text if line.worker.state in _HEALTHY else self._paint(text, RED)

    def _summary(self, width: int) -> list[str]:
        if self._now is None:
            return []
        reports, counts = self._now.reports, self._now.requests()
        main, latency = reports[0].router, reports[0].router.latency
        rates = [report.router.rates for report in reports]
        # A handoff counts at its prefill and at its decode worker.
        handed = sum(self._line(one).bytes_per_s for one in self._now.workers().values()) / 2
        routers = f"{len(reports)} router{'s' if len(reports) > 1 else ''}"
        requests = sum(rate.requests_per_s for rate in rates)
        prompt = sum(rate.prompt_tokens_per_s for rate in rates)
        generated = sum(rate.generated_tokens_per_s for rate in rates)
        ttft, itl = latency.first_token_s, latency.between_tokens_s
        gone = f"disconnected {counts.disconnected}  " if counts.disconnected else ""
        ended = (
            f"ok {counts.finished}  failed {counts.failed}  cancelled {counts.cancelled}  {gone}"
            f"refused {counts.refused}  replayed {counts.replayed}"
        )
        parts = [
            ["baton top", main.model, f"up {duration(main.uptime_s)}", routers],
            [
                "requests ",
                f"{counts.in_flight} in flight, {counts.queued} queued",
                f"{requests:.1f}/s",
                ended,
            ],
            [
                "tokens   ",
                f"prompt {prompt:.1f}/s",
                f"generated {generated:.1f}/s",
                f"handoff {handed / 1e9:.3f} GB/s",
            ],
            [
                "latency  ",
                f"TTFT p50 {_ms(ttft.p50)} p99 {_ms(ttft.p99)} ms",
                f"ITL p50 {_ms(itl.p50)} p99 {_ms(itl.p99)} ms",
            ],
        ]
        return [printable(text)[:width] for line in parts for text in _wrapped(line, width)]

    def _paint(self, text: str, style: str) -> str:
        return f"{style}{text}{PLAIN}" if self._color else text


def _tokens(worker: WorkerReport) -> int:
    """Tokens that the worker computed: of prompts, or of answers."""
    return worker.prompt_tokens if worker.role == "prefill" else worker.generated_tokens


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Join the parts of a line of the summary; what does not fit continues on the next line."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}   {part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"{_INDENT}{part}")
    return lines


def _fit(text: str, width: int) -> str:
    """Pad or cut a cell; a negative width aligns left."""
    size, text = abs(width), printable(text)
    return text[:size].ljust(size) if width < 0 else text[:size].rjust(size)
