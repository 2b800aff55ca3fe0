"""Extensions of a router: policy, mode decider and metrics of the user's own.

The router's parts call the adapters of this module as if they were Baton's own. An adapter makes
the facts, calls the extension under a :class:`.Guard`, and checks the result. If the extension
fails or rests, the request gets the default's choice. See docs/extend.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import get_args
from urllib.parse import urlsplit

import msgspec

from baton.extend import (
    DECIDER,
    METRIC,
    POLICY,
    Decider,
    Ended,
    ExtensionError,
    Family,
    Metric,
    Placing,
    Point,
    Policy,
    Ways,
    WorkerFacts,
    counter,
    is_extension,
    resolve,
)
from baton.extend.guard import Guard, Report
from baton.proto.limits import MAX_LABELS
from baton.proto.wire.messages import ExtensionCounts
from baton.proto.work import prefix_hashes
from baton.runtime.metrics.families import Bounds, Kind, Row, Values, labels_problem

from .config import PolicyConfig, RouterConfig
from .decider import Costs, HandoffTails, streams_of
from .decider import Decider as OwnDecider
from .placement import Decider as AnyDecider
from .placement import Policy as AnyPolicy
from .policy import PrefixAware, make_policy
from .records import Chosen, Preference, Request, Worker
from .story_report import RequestLine

MAX_FAMILIES = 64
"""Metrics of one extension."""
MAX_ROWS = 1024
"""Series of one such metric."""
MAX_BOUNDS = 256
"""Bounds of a histogram of an extension."""
MAX_CHARS = 1024
"""Characters of a name, a text or a label of such a metric."""
PREFIX_TOKENS = 32
"""Tokens of a prompt whose digest a policy gets."""
_OWN = "baton_"
_DEFAULT = "prefix_aware"


class Extensions:
    """The extensions that a router's settings name, as new objects. Raises ExtensionError.

    ``clock``: see :class:`.Guard`.
    """

    def __init__(self, config: RouterConfig, clock: Callable[[], float] | None = None) -> None:
        folder, policy = config.extensions, config.policy.name
        self._config = config
        self._clock = clock
        self._policy: Policy | None = None
        if is_extension(policy):
            self._policy = resolve(POLICY, policy, folder)
        self._decider: Decider | None = None
        if config.decider:
            self._decider = resolve(DECIDER, config.decider, folder)
        self._metrics: list[tuple[str, Metric]] = [
            (name, resolve(METRIC, name, folder)) for name in config.metrics
        ]
        self._guards: list[Guard] = []

    def placing(self, report: Report) -> tuple[AnyPolicy, AnyDecider]:
        """Return the policy and the mode decider, each of Baton's own or a user's."""
        config = self._config
        policy: AnyPolicy
        if self._policy is None:
            policy = make_policy(config.policy, config.name)
        else:
            guard = self._guard(POLICY, config.policy.name, report)
            policy = CustomPolicy(self._policy, guard, config.policy, config.name)
        own = None
        if self._decider is not None:
            own = CustomDecider(self._decider, self._guard(DECIDER, config.decider, report))
        return policy, OwnDecider(config, HandoffTails(), own)

    def metrics(self, report: Report) -> list[CustomMetric]:
        """Return the metrics."""
        return [
            CustomMetric(made, self._guard(METRIC, name, report)) for name, made in self._metrics
        ]

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards of all extensions in use."""
        return tuple(self._guards)

    def counts(self) -> list[ExtensionCounts]:
        """Return the numbers of calls of each extension."""
        return [guard.counts() for guard in self._guards]

    def families(self) -> list[Family]:
        """Return the counts of failed and skipped calls; empty without extensions."""
        if not self._guards:
            return []
        labels = ("extension", "name")
        failed: Values = {(one.point.name, one.name): one.failures for one in self._guards}
        skipped: Values = {(one.point.name, one.name): one.skipped for one in self._guards}
        return [
            counter(
                "baton_extension_failures_total",
                "Calls of an extension that raised or returned nonsense.",
                failed,
                labels,
            ),
            counter(
                "baton_extension_skipped_calls_total",
                "Calls of an extension that were not made, because it had taken too long.",
                skipped,
                labels,
            ),
        ]

    def _guard(self, point: Point, name: str, report: Report) -> Guard:
        guard = Guard(point, name, report, self._clock)
        self._guards.append(guard)
        return guard


class CustomPolicy:
    """A :class:`.placement.Policy` that asks an extension; ``prefix_aware`` is its default.

    Call :meth:`begin` with each request before its workers are chosen.
    """

    wants_hashes = True

    def __init__(self, policy: Policy, guard: Guard, config: PolicyConfig, router: str) -> None:
        self.margin: Preference = None
        self._policy = policy
        self._guard = guard
        self._default = PrefixAware(msgspec.structs.replace(config, name=_DEFAULT))
        self._block_tokens = config.block_tokens
        self._router = router
        self._request: Request | None = None
        self._decode: Worker | None = None
        self._prefix = ""  # of the request; empty until it is needed

    def begin(self, request: Request) -> None:
        """Set the request for which :meth:`choose` is called next."""
        self._request, self._decode, self._prefix = request, None, ""

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """Return the extension's choice, or the default's."""
        found, request, count = None, self._request, len(workers)
        if count > 1 and request is not None:
            found = self._guard.call(lambda: self._asked(request, workers, hashes))
        if found is not None:
            self.margin = Chosen(self._guard.name, count)
        else:
            found = self._default.choose(workers, hashes)
            self.margin = why = self._default.margin
            if isinstance(why, tuple):
                missed = self._guard.missed
                self.margin = Chosen(_DEFAULT, count, self._guard.name, missed, why)
        if found.role == "decode":
            self._decode = found
        return found

    def _asked(
        self, request: Request, workers: Sequence[Worker], hashes: Sequence[bytes]
    ) -> Worker:
        """Ask the extension. Raises ExtensionError for a result that is none of ``workers``."""
        facts = [self._facts(worker, hashes) for worker in workers]
        decode, context = self._decode, request.context
        if not self._prefix:
            first = max(1, min(PREFIX_TOKENS, request.base))
            self._prefix = "".join(one.hex() for one in prefix_hashes(context, first, 1))
        placing = Placing(
            request_id=request.request_id,
            role=workers[0].role,
            prompt_tokens=request.next,
            max_new_tokens=request.remaining,
            prefix=self._prefix,
            cache_salt=context.cache_salt,
            decode=None if decode is None else self._facts(decode, hashes),
            pool=request.pool,
            router=self._router,
        )
        chosen = self._policy.choose(placing, tuple(facts))
        for one, worker in zip(facts, workers, strict=True):
            if chosen is one:
                return worker
        if isinstance(chosen, WorkerFacts):  # of an earlier call
            for worker in workers:
                if worker.id == chosen.name:
                    return worker
        names = ", ".join(worker.id for worker in workers[:8])
        shown = chosen.name if isinstance(chosen, WorkerFacts) else repr(chosen)[:80]
        raise ExtensionError(f"choose() returned {shown}, which is none of the workers {names}")

    def _facts(self, worker: Worker, hashes: Sequence[bytes]) -> WorkerFacts:
        load = worker.load
        return WorkerFacts(
            name=worker.id,
            role=worker.role,
            host=host_of(worker.endpoint),
            pool=worker.pool,
            labels=dict(worker.labels),
            outstanding_tokens=worker.burden,
            requests=len(worker.requests) + worker.others_requests,
            max_requests=worker.max_batch,
            cached_tokens=self._default.cached(worker, hashes) * self._block_tokens,
            kv_blocks=load.kv_blocks_total,
            kv_blocks_used=load.kv_blocks_used,
            step_s=worker.step_s,
        )

    def cached(self, worker: Worker, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks the worker has probably cached."""
        return self._default.cached(worker, hashes)

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> int:
        """Note a placement for the default, whose index gives the facts."""
        return self._default.placed(worker, hashes, tokens)

    def forget(self, worker: Worker) -> None:
        """Drop the state of a dead worker."""
        self._default.forget(worker)


class CustomDecider:
    """Asks an extension which way a request takes."""

    def __init__(self, decider: Decider, guard: Guard) -> None:
        self._decider = decider
        self._guard = guard

    def decided(
        self, request: Request, costs: Costs, uncached: Callable[[Worker], int]
    ) -> tuple[bool, str]:
        """Return the extension's decision, or the default's, and why as text."""
        decode = costs.decode
        if decode is None:
            return False, costs.explain()
        decision = self._guard.call(lambda: self._asked(request, costs, decode, uncached))
        why = costs.explain_own(self._guard.name, self._guard.missed)
        return costs.prefers_local if decision is None else decision, why

    def _asked(
        self, request: Request, costs: Costs, decode: Worker, uncached: Callable[[Worker], int]
    ) -> bool:
        decision = self._decider.local(
            Ways(
                request_id=request.request_id,
                prompt_tokens=request.next,
                uncached_tokens=uncached(costs.prefill),
                waiting_tokens=costs.prefill.uncached + costs.prefill.others,
                local_uncached_tokens=uncached(decode),
                local_waiting_tokens=decode.uncached,
                seconds_per_token=costs.per_token,
                handoff_s=costs.handoff,
                streams=streams_of(decode),
                step_s=decode.stream_step_s,
                target_s=costs.target,
                slo_ttft_s=costs.limit if math.isfinite(costs.limit) else 0.0,
                slo_itl_s=request.slo_itl,
                over_prefill_s=costs.over_prefill + costs.handoff,
                local_s=costs.alone,
                delays_streams=costs.per_token > 0 and math.isinf(costs.alone),
                local=costs.prefers_local,
            )
        )
        if not isinstance(decision, bool):
            raise ExtensionError(f"local() returned {decision!r:.80}, which is no bool")
        return decision


class CustomMetric:
    """A metric of an extension."""

    def __init__(self, metric: Metric, guard: Guard) -> None:
        self._metric = metric
        self._guard = guard

    def ended(self, line: RequestLine) -> None:
        """Pass a request that ended to the extension."""
        ended = msgspec.convert(line, Ended, from_attributes=True)  # without the other fields
        self._guard.call(lambda: self._metric.ended(ended))

    def families(self, taken: dict[str, str]) -> list[Family]:
        """Return the extension's metrics; none if one of them is wrong.

        ``taken``: names of other metrics, and whose they are; the new names are added.
        """
        return self._guard.call(lambda: self._checked(taken)) or []

    def _checked(self, taken: dict[str, str]) -> list[Family]:
        given = list(islice(self._metric.families(), MAX_FAMILIES + 1))
        if len(given) > MAX_FAMILIES:
            raise ExtensionError(f"families() returned more than {MAX_FAMILIES} metrics")
        found = [checked(family) for family in given]
        names: dict[str, str] = {}
        for family in found:
            name = exposed_name(family)
            owner = taken.get(name) or names.get(name)
            if owner is not None:
                raise ExtensionError(f"{name} is the name of two metrics; the other is of {owner}")
            names[name] = self._guard.name
        taken |= names
        return found


def exposed_name(family: Family) -> str:
    """Return the name under which a scrape has the metric: a counter's gets ``_total``."""
    name = family.name
    return name.removesuffix("_total") + "_total" if family.kind == "counter" else name


def checked(family: object) -> Family:
    """Return a copy of a metric, of plain texts and numbers.

    Raises ExtensionError, or any other Exception, if a scrape could not contain the metric.
    """
    if not isinstance(family, Family):
        raise ExtensionError(f"families() returned {family!r:.80}, which is no Family")
    name, kind = _text(family.name, "a name"), family.kind
    if not (name.isascii() and name.replace(":", "_").isidentifier()):
        text = f"{name!r:.80} is no name of a metric: use letters, digits, _ and :"
        raise ExtensionError(text)
    if name.startswith(_OWN):
        raise ExtensionError(f"{name:.80} begins with {_OWN}, as only metrics of Baton do")
    if kind not in get_args(Kind):
        raise ExtensionError(f"{name}: {kind!r:.80} is none of {', '.join(get_args(Kind))}")
    if len(family.labels) > MAX_LABELS:
        raise ExtensionError(f"{name} has {len(family.labels)} labels, limit {MAX_LABELS}")
    labels = tuple(_text(one, f"{name}: the label") for one in family.labels)
    named = all(one.isascii() and one.isidentifier() for one in labels)
    if not named or len({*labels}) < len(labels) or "le" in labels:
        raise ExtensionError(f"{name}: {labels!r:.80} are no different names of labels without le")
    if len(family.rows) > MAX_ROWS:
        raise ExtensionError(f"{name} has {len(family.rows)} series, limit {MAX_ROWS}")
    bounds = _bounds(name, family.bounds) if kind == "histogram" else ()
    rows = [_row(family, row, len(bounds) + 1) for row in family.rows]
    if len({row.labels for row in rows}) < len(rows):
        raise ExtensionError(f"{name} has two series with the same labels")
    return Family(name, kind, _text(family.text, f"{name}: the text"), labels, rows, bounds)


def _row(family: Family, row: Row, buckets: int) -> Row:
    if problem := labels_problem(family.name, family.labels, row.labels):
        raise ExtensionError(problem)
    labels = tuple(_text(one, f"{family.name}: the label") for one in row.labels)
    value = _number(family.name, row.value)
    if family.kind != "histogram":
        return Row(labels, value)
    if len(row.counts) != buckets:
        raise ExtensionError(f"{family.name}: {len(row.counts)} counts do not fit its bounds")
    if not all(isinstance(one, int) for one in row.counts):
        raise ExtensionError(f"{family.name}: {row.counts!r:.80} are no counts")
    for count in row.counts:
        _number(family.name, count)
    return Row(labels, value, list(row.counts))


def _bounds(name: str, bounds: Sequence[float]) -> Bounds:
    if len(bounds) > MAX_BOUNDS:
        raise ExtensionError(f"{name} has {len(bounds)} bounds, limit {MAX_BOUNDS}")
    found = tuple(_number(name, one) for one in bounds)
    if any(one >= other for one, other in pairwise((*found, math.inf))):
        raise ExtensionError(f"{name}: {found!r:.80} are no bounds that rise")
    return found


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or math.isnan(value):
        raise ExtensionError(f"{name}: {value!r:.80} is no number")
    return float(value)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_CHARS:
        shown = repr(value[:80] if isinstance(value, str) else value)[:80]
        raise ExtensionError(f"{what} {shown} is no text of at most {MAX_CHARS} characters")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ExtensionError(f"{what} {value!r:.80} is no UTF-8")
    return value


def host_of(endpoint: str) -> str:
    """Return the host of a worker's address; empty for a socket file."""
    return urlsplit(endpoint).hostname or "" if endpoint.startswith("tcp://") else ""
