"""What a gateway counts: HTTP requests by route and status, and the latencies that clients see.

A :class:`Clock` measures one HTTP request. Its time begins when the request's head has arrived.
"""

from __future__ import annotations

import time
from collections import Counter
from contextvars import ContextVar

from baton.client.output import Output
from baton.runtime.metrics.families import (
    GAP_S,
    LATENCY_S,
    TOKENS,
    Family,
    Histogram,
    Labels,
    counter,
    gauge,
    histogram,
)
from baton.runtime.process.log import get_logger

from .connections import Connections
from .shedding import Shedding

CLIENT_GONE = 499
"""Status in the metrics of a request whose client closed the connection before the answer's end."""
_log = get_logger()
_now = time.perf_counter


class Clock:
    """Measures one HTTP request, whose outputs may belong to several native requests.

    ``streams``: the answer is sent as events, so the client sees each output's time.
    """

    __slots__ = ("_began", "_first", "_metrics", "_outputs", "streams")

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._began = _now()
        self._first = 0.0
        self._outputs: dict[int, OutputTimes] = {}  # by native request
        self.streams = False

    def outputs(self, index: int) -> OutputTimes:
        """Return what measures the outputs of the native request with this index."""
        found = self._outputs.get(index)
        if found is None:
            found = self._outputs[index] = OutputTimes(self, self._metrics)
        return found

    def began(self, now: float) -> None:
        """Note the first output of a native request."""
        self._first = self._first or now

    def ended(self, route: str, status: int) -> None:
        """Note the end of the HTTP request."""
        metrics = self._metrics
        metrics.running -= 1
        metrics.requests[route, str(status)] += 1
        self._outputs.clear()  # they hold this clock
        if self._first:
            metrics.durations.observe(_now() - self._began)
            if self.streams:
                metrics.first_tokens.observe(self._first - self._began)


class OutputTimes:
    """Measures the outputs of one native request."""

    __slots__ = ("_clock", "_first", "_last", "_metrics", "_tokens")

    def __init__(self, clock: Clock, metrics: GatewayMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._first = self._last = 0.0  # 0 before the first output
        self._tokens = 0

    def took(self, output: Output) -> None:
        """Note an output, which has just arrived."""
        metrics, count, last = self._metrics, len(output.tokens), self._last
        self._last = now = metrics.time or _now()
        metrics.generated_tokens += count
        self._tokens += count
        if not last:
            metrics.prompt_tokens += output.position
            metrics.prompts.observe(output.position)
            self._first = now
            self._clock.began(now)
        elif count and self._clock.streams:
            if last == metrics.gap_began and now == metrics.gap_ended:
                metrics.same_gaps += 1
            else:
                metrics.next_gap(last, now)
        if output.final_status is not None:
            metrics.generated.observe(self._tokens)
            if self._tokens > 1:
                seconds = output.tokens_s or now - self._first
                if seconds:  # known: not all tokens came at once from a router that resumed them
                    metrics.per_token.observe(seconds / (self._tokens - 1))


current_clock: ContextVar[Clock | None] = ContextVar("current_clock", default=None)
"""The clock of the HTTP request that the running task serves."""


class GatewayMetrics:
    """Numbers since the gateway's start.

    ``time``: when the router's message that is handled now arrived, or 0. The outputs of one
    message usually have equal gaps: ``same_gaps`` of them, from ``gap_began`` to ``gap_ended``, are
    not in ``gaps`` yet.
    """

    def __init__(self) -> None:
        self.running = 0
        self.connections: Connections | None = None
        self.shedding = Shedding()
        self.requests: Counter[tuple[str, str]] = Counter()  # by route and status
        self.prompt_tokens = self.generated_tokens = 0
        self.first_tokens = Histogram(LATENCY_S)
        self.gaps = Histogram(GAP_S)
        self.time = self.gap_began = self.gap_ended = 0.0
        self.same_gaps = self.own_errors = 0
        self.per_token = Histogram(GAP_S)
        self.durations = Histogram(LATENCY_S)
        self.prompts = Histogram(TOKENS)
        self.generated = Histogram(TOKENS)

    def begin(self) -> Clock:
        """Start the clock of an HTTP request."""
        self.running += 1
        return Clock(self)

    def own_error(self, error: Exception, where: str, request_id: str = "") -> str:
        """Log and count an exception of our own code; return all that a client learns about it."""
        self.own_errors += 1
        _log.error(
            "http.failed", exc_info=error, error=repr(error), where=where, request_id=request_id
        )
        of = f" (request {request_id})" if request_id else ""
        return f"an internal error{of}; the gateway's log has its cause"

    def next_gap(self, began: float, ended: float) -> None:
        """Note a gap that differs from the last one, and count those."""
        if self.same_gaps:
            self.gaps.observe(self.gap_ended - self.gap_began, self.same_gaps)
        self.gap_began, self.gap_ended, self.same_gaps = began, ended, 1

    def families(self) -> list[Family]:
        """Return the metrics for Prometheus."""
        self.next_gap(0.0, 0.0)
        self.same_gaps = 0
        requests: dict[Labels, float] = dict(self.requests.items())
        return [
            gauge("baton_gateway_requests_running", "HTTP requests that run.", self.running),
            counter(
                "baton_gateway_requests_total",
                "HTTP requests that ended, by route and status; 499: the client went away.",
                requests,
                ("route", "code"),
            ),
            counter(
                "baton_gateway_prompt_tokens_total",
                "Prompt tokens of requests with a first token.",
                self.prompt_tokens,
            ),
            counter(
                "baton_gateway_generated_tokens_total", "Tokens of answers.", self.generated_tokens
            ),
            histogram(
                "baton_gateway_time_to_first_token_seconds",
                "Time from the arrival of a request to its first token, of streamed answers.",
                self.first_tokens,
            ),
            histogram(
                "baton_gateway_inter_token_latency_seconds",
                "Time between two outputs of a streamed answer.",
                self.gaps,
            ),
            histogram(
                "baton_gateway_time_per_output_token_seconds",
                "Mean time per token after the first one, of finished answers.",
                self.per_token,
            ),
            histogram(
                "baton_gateway_request_duration_seconds",
                "Time from arrival to end of requests that generated tokens.",
                self.durations,
            ),
            histogram("baton_gateway_request_prompt_tokens", "Length of prompts.", self.prompts),
            histogram(
                "baton_gateway_request_generated_tokens", "Length of answers.", self.generated
            ),
            counter(
                "baton_gateway_internal_errors_total",
                "Exceptions of the gateway's own code; its log has each with its traceback.",
                self.own_errors,
            ),
            counter(
                "baton_gateway_requests_shed_total",
                "Requests refused without asking the router, which refused most others.",
                self.shedding.shed,
            ),
            *self._of_connections(),
        ]

    def _of_connections(self) -> list[Family]:
        found = self.connections
        if found is None:
            return []
        ends: dict[Labels, float] = {
            ("crowded_out",): found.crowded_out,
            ("refused",): found.refused,
        }
        return [
            gauge("baton_gateway_connections", "Open HTTP connections.", len(found)),
            counter(
                "baton_gateway_connections_ended_total",
                "Connections that were closed to make room for others, or refused.",
                ends,
                ("reason",),
            ),
        ]
