"""A request's story as nested slices of time per process, and as OpenTelemetry spans.

Input is the JSON record of :mod:`.story_report`, so that the command line, which gets it from a
router, and the router itself make the same slices.

Invariants: the first slice is the whole request; each other slice names its parent by index, lies
inside its parent in time, and comes after it in the list. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from baton.proto.trace_context import parse_traceparent
from baton.runtime.process.otlp import AttributeValue, Span

Record = Mapping[str, Any]
ROUTER = "router"
_FINISH_REASONS = {"maximum_length": "length", "end_of_sequence": "stop"}
_NS = 1e9


@dataclass(slots=True)
class Slice:
    """A part of a request's time.

    ``process``: id of the process that spent it. ``start``, ``end``: seconds after the request's
    arrival. ``parent``: index of the enclosing slice, -1 for the whole request. ``details``: facts
    for display. ``error``: why it failed, or empty.
    """

    name: str
    process: str
    start: float
    end: float
    parent: int
    details: dict[str, str | int | float] = field(default_factory=dict)
    error: str = ""


def slices_of(record: Record, router: str = ROUTER) -> list[Slice]:
    """Return the slices of a request's record; ``router``: name of the router that made it."""
    return _Slices(router, record).found


class _Slices:
    """Collects slices, each cut to its parent."""

    def __init__(self, router: str, record: Record) -> None:
        self._router = router
        self.found: list[Slice] = []
        state = str(record["state"])
        failed = state in ("failed", "refused")
        whole = self._add("request", router, 0.0, _seconds(record["seconds"]), -1)
        self.found[whole].error = str(record["code"] or state) if failed else ""
        free = 0.0  # end of the previous attempt: the request waits at the router from here on
        for attempt in cast("list[Record]", record["attempts"]):
            start = attempt["assigned_s"]
            begun = free if start is None else max(free, float(start))
            if start is not None and begun > free:
                self._add("queue", router, free, begun, whole)
            free = self._attempt(attempt, begun, whole)

    def _add(self, name: str, process: str, start: float, end: float, parent: int) -> int:
        if parent >= 0:
            around = self.found[parent]
            start = min(max(start, around.start), around.end)
            end = min(max(end, start), around.end)
        self.found.append(Slice(name, process, start, max(start, end), parent))
        return len(self.found) - 1

    def _attempt(self, attempt: Record, start: float, whole: int) -> float:
        """Add an attempt and its workers' parts; return its end."""
        end = self.found[whole].end if attempt["ended_s"] is None else float(attempt["ended_s"])
        place = self._add(f"attempt {attempt['number']}", self._router, start, end, whole)
        self.found[place].details = _route(attempt)
        self.found[place].error = str(attempt["cause"])
        prefill, decode = attempt["prefill_times"], attempt["decode_times"]
        if prefill is not None:
            self._prefill(attempt, prefill, place)
        if decode is not None:
            self._decode(attempt, decode, place)
        elif attempt["handoff"] is not None:  # lost there, or still running: no times from it
            since = float(attempt["handoff"]["reported_s"])
            lost = self._add("decode", str(attempt["decode"]), since, end, place)
            self.found[lost].error = str(attempt["cause"])
        return self.found[place].end

    def _prefill(self, attempt: Record, times: Record, parent: int) -> None:
        worker, end = str(attempt["prefill"]), _seconds(times["ended_s"])
        place = self._add("prefill", worker, _seconds(times["received_s"]), end, parent)
        self.found[place].details = {"refusals": int(times["refusals"])}
        steps = ("received_s", "started_s", "granted_s", "computing_s", "computed_s")
        names = ("queue", "wait for grant", "wait for batch", "compute")
        self._chain(worker, names, [times[step] for step in steps], place)
        handoff = attempt["handoff"]
        if handoff is None:
            return
        sent = times["sending_s"] if times["sending_s"] is not None else times["computed_s"]
        begun = end if sent is None else float(sent)
        transfer = self._add("transfer", worker, begun, end, place)
        facts = ("transport", "bytes_sent", "bytes_received", "blocks", "frames", "resent_frames")
        self.found[transfer].details = {name: handoff[name] for name in facts}

    def _decode(self, attempt: Record, times: Record, parent: int) -> None:
        worker, route = str(attempt["decode"]), attempt["route"]
        end = _seconds(times["ended_s"])
        place = self._add("decode", worker, _seconds(times["taken_over_s"]), end, parent)
        self.found[place].details = {"preemptions": int(times["preemptions"])}
        steps, names = [times["taken_over_s"], times["computing_s"]], ["wait for batch"]
        if route is not None and route["way"] == "local":
            steps.append(times["computed_s"])
            names.append("compute")
        self._chain(worker, (*names, "generate"), [*steps, end], place)

    def _chain(
        self, worker: str, names: tuple[str, ...], steps: list[float | None], parent: int
    ) -> None:
        """Add a slice between each two neighbouring steps that were reached."""
        for name, start, end in zip(names, steps, steps[1:], strict=False):
            if start is None or end is None:
                return
            self._add(name, worker, float(start), float(end), parent)


def _seconds(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _route(attempt: Record) -> dict[str, str | int | float]:
    """Return why the attempt's workers were chosen, as flat names and values."""
    found: dict[str, str | int | float] = {
        "prefill": str(attempt["prefill"]),
        "decode": str(attempt["decode"]),
    }
    route = attempt["route"]
    if route is None:
        return found
    found["policy"], found["way"] = route["policy"], route["way"]
    if route["why"]:
        found["why"] = route["why"]
    if route["pinned"]:
        found["pinned"] = route["pinned"]
    for role in ("prefill", "decode"):
        for name, value in (route[role] or {}).items():
            found[f"{role}_{name}"] = value
    return found


# --------------------------------------------------------------------------- spans


def spans_of(record: Record, router: str, model: str, arrived_ns: int) -> list[Span]:
    """Return a request's spans, or none if its traceparent asks for none.

    Without a ``traceparent`` the trace's id is the request's key, so that the spans of several
    routers that served one request belong together. The first span has the attributes of
    OpenTelemetry's GenAI conventions, all others have ``baton.`` names.

    ``router``: name of the router that made the record. ``arrived_ns``: when the request arrived
    there, in Unix nanoseconds.
    """
    key = bytes.fromhex(str(record["request"]))
    context = parse_traceparent(str(record["traceparent"]))
    if context is not None and not context.sampled:
        return []
    trace_id = int.from_bytes(key) or 1 if context is None else context.trace_id
    slices = slices_of(record, router)
    ids = [_span_id(key, router, index) for index in range(len(slices))]
    spans = [
        Span(
            name=one.name,
            service=f"baton-{one.process.partition('-')[0]}",
            instance=one.process,
            trace_id=trace_id,
            span_id=own,
            parent_id=ids[one.parent] if one.parent >= 0 else context.span_id if context else 0,
            start_ns=arrived_ns + int(one.start * _NS),
            end_ns=arrived_ns + int(one.end * _NS),
            attributes={f"baton.{name}": value for name, value in one.details.items()},
            error=one.error,
        )
        for one, own in zip(slices, ids, strict=True)
    ]
    spans[0].is_server = True
    spans[0].attributes |= _facts(record, model)
    return spans


def _span_id(key: bytes, router: str, index: int) -> int:
    name = key + f"{router} {index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) or 1


_OPERATIONS = {
    "generate": "text_completion",
    "embed": "embeddings",
    "draw": "generate_content",
}
"""The names that OpenTelemetry has for a request's task."""


def _facts(record: Record, model: str) -> dict[str, AttributeValue]:
    """Return the attributes of the whole request."""
    reason = record["finish_reason"]
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _OPERATIONS[record["task"]],
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": str(record["request_id"]),
        "gen_ai.usage.input_tokens": cast("int", record["prompt_tokens"]),
        "gen_ai.usage.output_tokens": cast("int", record["new_tokens"]),
        "baton.request": str(record["request"]),
        "baton.state": str(record["state"]),
    }
    if reason is not None:
        name = str(reason)
        found["gen_ai.response.finish_reasons"] = [_FINISH_REASONS.get(name, name)]
    if record["code"]:
        found["error.type"] = str(record["code"])
    found |= _named(record, ("cached_tokens", "queue_s", "ttft_s", "itl_s", "client", "gateway"))
    return found


def _named(record: Record, names: Iterable[str]) -> dict[str, AttributeValue]:
    values = {f"baton.{name}": cast("Any", record[name]) for name in names}
    return {name: value for name, value in values.items() if value not in (None, "")}
