"""The state of one router: everything that its parts share.

Each part of the core takes a :class:`RouterState` and the parts that it calls. So a new record of
the router is one line here, and no constructor passes it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.extend.guard import Report

from .admission import Admission
from .clients import Clients
from .config import RouterConfig
from .events import Action, Fault
from .handoffs import Handoffs
from .health import WorkerHealth
from .metrics import Metrics
from .own_errors import OwnErrors
from .placement import Decider, Placement, Policy
from .records import Authentication, Request, Worker
from .registry import Registry
from .request_table import RequestTable
from .stories import Stories


class RouterState:
    """Records, counters and the actions to return.

    ``placing``: makes the policy and the decider, which report their failures to its argument.
    ``out``: the actions of the event that is handled. ``incarnation``: random number of this
    process. ``started_at``: monotonic seconds. ``authentication``: what connections prove.
    """

    def __init__(
        self,
        config: RouterConfig,
        incarnation: int,
        now: float,
        placing: Callable[[Report], tuple[Policy, Decider]],
        authentication: Authentication,
        *,
        fresh_stories: bool = False,
    ) -> None:
        self.config = config
        self.incarnation = incarnation
        self.started_at = now
        self.authentication = authentication
        self.out: list[Action] = []
        self.table = RequestTable()
        self.health = WorkerHealth(config, now)
        registry = self.registry = Registry(config, self.health)
        self.admission = Admission(config.admission, now)
        self.clients = Clients()
        self.metrics = Metrics(config.slo_ttft_s, config.slo_itl_s)
        self.stories = Stories(config.trace_requests, fresh=fresh_stories)
        policy, decider = placing(self._failed)
        self.placement = Placement(registry, config, policy, decider)
        learn = decider.learn if decider.compares else None
        self.handoffs = Handoffs(lambda name: registry.find(name) is not None, learn)
        self.errors = OwnErrors(self.out, self.table.requests, self.metrics.dropped)

    def _failed(self, event: str, error: Exception, fields: dict[str, object]) -> None:
        """Log that an extension failed."""
        self.out.append(Fault(event, error, fields))


class Life(Protocol):
    """What others do to a request's life, beside its workers; :class:`.lifecycle.Lifecycle`.

    :mod:`.recovery` and :mod:`.takeover` decide which request meets which of these.
    """

    def requeue(self, request: Request, now: float, cause: str, delay: float = 0.0) -> None:
        """Abort the current attempt and place the next one, now or after ``delay`` seconds."""

    def lost(self, request: Request, reason: str, now: float) -> None:
        """Replay a request whose attempt was lost; fail it if it is poisoned or lost too often."""

    def end_poisoned(self, request: Request, now: float) -> bool:
        """Fail the request with RequestPoisoned and return True if it is poisoned."""
        ...

    def retry_waiting(self, now: float) -> None:
        """Place the requests that wait for a ready worker."""

    def served_by(self, request: Request, worker: Worker) -> None:
        """Record that ``worker`` holds the current attempt."""

    def ask_again(self, request: Request, now: float) -> None:
        """Send Adopt for the tokens from ``next`` on, and repeat it until the worker answers."""

    def abort_on(self, worker: Worker, key: bytes, attempt: int, until: float, reason: str) -> None:
        """Send an Abort, which the timers repeat until it is confirmed or ``until`` has passed."""

    def drop_moved(self, request: Request, router: str, now: float) -> None:
        """Drop the record of a request that ``router`` serves, without aborting it."""
