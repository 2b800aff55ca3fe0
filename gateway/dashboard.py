"""The dashboard: one self-contained page and its events.

The page loads nothing but its events, so it works without a network. All its viewers share one
query to each router per second, sent only while it is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.proto.errors import BatonError

from .errors import GatewayBusy
from .metrics import GatewayMetrics
from .served import Served
from .streams import EventStream

STATUS_TIMEOUT_S = 5.0
"""Seconds to wait for a router's report."""
INTERVAL_S = 1.0
"""Seconds between events."""
MAX_VIEWERS = 32
SHOWN_REQUESTS = 50
SHOWN_SAMPLES = 180
"""Samples of the routers' history that the charts show: 15 minutes."""
_PAGE = (Path(__file__).parent / "dashboard.html").read_bytes()
_PAGE_HEADERS = {
    # The page has no other resources, and no other site may frame it.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_HIGHEST = frozenset(
    ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "handoff_s", "waiting",
     "prefill_kv", "decode_kv")
)  # fmt: skip
"""Columns of the history that are no sums over the routers: all of them see the same workers."""
Json = dict[str, Any]


class Feed:
    """The routers' latest reports as one event, for any number of viewers."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._viewers = 0
        self._event = b""
        self._first_event = b""  # the same with the history
        self._history: Json = {}
        self._history_due = 0.0
        self._number = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def events(self, served: Served) -> AsyncGenerator[bytes, None]:
        """Yield an event per second; the first one has the routers' history.

        Later ones have it when it has changed. Raises GatewayBusy if there are too many viewers.
        """
        if self._viewers >= MAX_VIEWERS:
            raise GatewayBusy(f"{MAX_VIEWERS} viewers of the dashboard, no more", retry_after=10)
        self._viewers += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._ask(served))
            seen = 0
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    event = self._event if seen else self._first_event
                    seen = self._number
                yield event
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _ask(self, served: Served) -> None:
        self._history_due = 0.0
        while True:
            started = time.monotonic()
            is_due = started >= self._history_due
            try:
                reports = await self._reports(served, SHOWN_SAMPLES if is_due else 0)
                shown = {"at": time.monotonic(), **joint_report(reports)}
                if is_due:
                    self._history = joint_history([report["history"] for report in reports])
                    self._history_due = started + self._history["interval_s"]
            except BatonError as error:
                shown, is_due = {"error": str(error)}, False
            except Exception as error:  # of one report: the feed goes on
                shown = {"error": self._metrics.own_error(error, "/dashboard/events")}
                is_due = False
            first = shown if "error" in shown else {**shown, "history": self._history}
            async with self._changed:
                self._event = _event(first if is_due else shown)
                self._first_event = _event(first)
                self._number += 1
                self._changed.notify_all()
            await asyncio.sleep(INTERVAL_S)

    async def _reports(self, served: Served, samples: int) -> list[Json]:
        """Ask all routers. Raises BatonError if none answers."""
        clients = served.router_clients or (served.client,)
        asked = [
            client.status(
                handoffs=0,
                requests=SHOWN_REQUESTS,
                failed=SHOWN_REQUESTS,
                history=samples,
                timeout=STATUS_TIMEOUT_S,
            )
            for client in clients
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        reports = [one for one in found if not isinstance(one, BaseException)]
        for problem in found:
            if isinstance(problem, BaseException) and not isinstance(problem, BatonError):
                raise problem
            if isinstance(problem, BatonError) and not reports:
                raise problem
        return reports


def _event(shown: Json) -> bytes:
    return b"data: " + msgspec.json.encode(shown) + b"\n\n"


def joint_report(reports: Sequence[Json]) -> Json:
    """Return the reports of all routers as one: the dashboard shows the cluster.

    Counts and rates are sums, as are the bytes of a worker's handoffs; percentiles are the highest.
    The rest of a worker comes from the router with its latest heartbeat.
    """
    if len(reports) == 1:
        return reports[0]
    routers = [report["router"] for report in reports]
    workers: dict[str, Json] = {}
    handed_over: dict[str, int] = {}
    for worker in (worker for report in reports for worker in report["workers"]):
        name = worker["id"]
        handed_over[name] = handed_over.get(name, 0) + worker["handoff_bytes"]
        if name not in workers or worker["heard_s_ago"] < workers[name]["heard_s_ago"]:
            workers[name] = worker
    joint = {
        **routers[0],
        "name": ", ".join(router["name"] for router in routers),
        "uptime_s": max(router["uptime_s"] for router in routers),
        "restarts": max(router["restarts"] for router in routers),
        **{name: _joint([r[name] for r in routers], sum) for name in ("requests", "rates")},
        "latency": _joint([router["latency"] for router in routers], _highest),
    }
    return {
        **reports[0],
        "router": joint,
        "workers": [{**one, "handoff_bytes": handed_over[name]} for name, one in workers.items()],
        **{
            name: [request for report in reports for request in report[name]]
            for name in ("requests", "failed")
        },
    }


def joint_history(histories: Sequence[Json]) -> Json:
    """Return the histories of all routers as one, latest last, with None where samples are missing.

    ``age_s`` is the age of the latest sample, and each earlier one is ``interval_s`` older. The
    latest samples of the routers count as one, unless a router has not sampled for a while.
    """
    interval: float = histories[0]["interval_s"]
    slots: list[list[tuple[int, int]]] = []  # of each router: how many intervals ago, and its row
    newest: list[float] = []
    for history in histories:
        ages = history["columns"]["age_s"]
        offset = 0.0
        if ages:
            offset = ages[-1] if ages[-1] < 2 * interval else ages[-1] % interval
            newest.append(offset)
        slots.append([(round((age - offset) / interval), row) for row, age in enumerate(ages)])
    count = min(SHOWN_SAMPLES, max((ago for one in slots for ago, _ in one), default=-1) + 1)
    columns: Json = {}
    for name in histories[0]["columns"].keys() - {"age_s"}:
        found: list[list[Any]] = [[] for _ in range(count)]
        for history, rows in zip(histories, slots, strict=True):
            for ago, row in rows:
                value = history["columns"][name][row]
                if ago < count and value is not None:
                    found[count - 1 - ago].append(value)
        join = max if name in _HIGHEST else sum
        columns[name] = [join(values) if values else None for values in found]
    return {"interval_s": interval, "age_s": min(newest, default=0.0), "columns": columns}


def _joint(values: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Join numbers, or maps of the same shape number by number."""
    if isinstance(values[0], dict):
        return {name: _joint([value.get(name) for value in values], join) for name in values[0]}
    return join(list(values))


def _highest(values: list[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


async def page(_: Request) -> Response:
    """``GET /dashboard``: the page."""
    return Response(_PAGE, headers=_PAGE_HEADERS, media_type="text/html")


async def events(request: Request) -> EventStream:
    """``GET /dashboard/events``: what the page shows, as server-sent events."""
    feed: Feed = request.app.state.feed
    return await EventStream.begin(request.receive, feed.events(Served.of(request)))
