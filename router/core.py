"""The router's core: all decisions, without I/O or clock.

``handle`` takes an event and returns the actions to perform.

Invariants: every admitted request ends with exactly one terminal. Its tokens reach the client in
order and once, on any sequence of workers. All records together stay below the limits of
:mod:`.admission`.

The core does not track KV blocks: only the decode worker's grant decides about its memory.
Modules: :mod:`.client_messages`, :mod:`.queries` and :mod:`.worker_messages` handle messages,
:mod:`.lifecycle` places and ends requests, :mod:`.recovery` replays them, :mod:`.takeover` adopts
requests that began elsewhere, :mod:`.timers` handles timeouts. They share one :mod:`.state`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from baton.runtime.metrics.families import Family

from .client_messages import ClientMessages
from .config import RouterConfig
from .custom import Extensions
from .events import (
    Action,
    ClientFull,
    ClientGone,
    ClientInputRejected,
    ClientWritable,
    Event,
    FromClient,
    FromWorker,
    NotSent,
    StopRequested,
    Tick,
    WorkerInputRejected,
    WorkersGone,
)
from .history import History
from .lifecycle import Lifecycle
from .queries import Queries
from .records import NO_KEYS, Authentication
from .recovery import WorkerLosses
from .repair import Repair, check_state
from .state import RouterState
from .status import Reporter
from .takeover import Takeover
from .timers import Timers
from .worker_messages import WorkerMessages
from .worker_registration import WorkerRegistration

MAX_MENDS = 3
"""Repairs after one event; a repair may fail too, and the next one starts from its result."""


class RouterCore:
    """State machine of one router.

    ``incarnation``: random number of this process. ``files``: text files of the model folder by
    name. ``now``: monotonic seconds, as in all calls. ``authentication``: what
    connections prove. ``fresh_stories``: the shell takes the stories of ended requests.
    ``extensions``: those of ``config``, if the shell has loaded them.

    ``broken``: why the process must be replaced, after an error that could not be repaired.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        incarnation: int,
        files: dict[str, bytes] | None = None,
        now: float = 0.0,
        authentication: Authentication = NO_KEYS,
        fresh_stories: bool = False,
        extensions: Extensions | None = None,
    ) -> None:
        self.broken = ""
        self.extensions = extensions or Extensions(config)
        state = self._state = RouterState(
            config,
            incarnation,
            now,
            self.extensions.placing,
            authentication,
            fresh_stories=fresh_stories,
        )
        self._out, self.errors = state.out, state.errors
        self.table, self.registry, self.admission = state.table, state.registry, state.admission
        self.clients, self.metrics, self.stories = state.clients, state.metrics, state.stories
        self.placement, self.handoffs = state.placement, state.handoffs
        self._repair = Repair(state)
        lifecycle = self._lifecycle = Lifecycle(state)
        takeover = Takeover(state, lifecycle)
        history = History(state)
        self._reporter = Reporter(state, history, self.extensions.counts)
        queries = Queries(state, self._reporter.report, files or {})
        client_messages = ClientMessages(state, lifecycle, takeover, queries)
        losses = WorkerLosses(state, lifecycle, queries.drained)
        registration = WorkerRegistration(state, takeover, losses, queries.drained)
        worker_messages = WorkerMessages(state, lifecycle, takeover, registration)
        self._timers = Timers(state, lifecycle, takeover, losses, history)
        self._handlers: dict[type[Event], Callable[..., None]] = {
            FromClient: client_messages.handle,
            FromWorker: worker_messages.handle,
            ClientInputRejected: queries.reject,
            WorkerInputRejected: registration.reject,
            NotSent: lifecycle.not_sent,
            StopRequested: client_messages.stop,
            ClientGone: client_messages.gone,
            WorkersGone: registration.gone,
            ClientFull: client_messages.full,
            ClientWritable: client_messages.writable,
            Tick: self._timers.tick,
        }

    # ------------------------------------------------------------------ entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the actions, to be performed in order.

        Never raises. An exception ends only the request that caused it; see :mod:`.own_errors`.
        """
        out = self._out
        try:
            self._handlers[type(event)](event, now)
        except Exception as error:
            self.errors.of_nobody(error, type(event).__name__)
        if self.errors.fresh:
            self._mend(now)
        actions = out.copy()  # the list itself is shared, and acting may cause further events
        out.clear()
        return actions

    def families(self, now: float) -> list[Family]:
        """Return all metrics of this router and its workers."""
        return self._reporter.families(now)

    def next_timer(self) -> float:
        """Return the time at which the next :class:`.Tick` is due."""
        return self._timers.next_time()

    @property
    def dropped(self) -> Counter[str]:
        """Counts of dropped messages by reason, including messages that the shell drops."""
        return self.metrics.dropped

    # ------------------------------------------------------------------ end of the process

    @property
    def unfinished(self) -> int:
        """Number of requests without a terminal."""
        return self.admission.requests

    @property
    def kept(self) -> int:
        """Number of records, including ended requests with an unacknowledged terminal."""
        return len(self.table.requests)

    # ------------------------------------------------------------------ inner

    def _mend(self, now: float) -> None:
        """Repair the state after errors; if that fails, :attr:`broken` says why."""
        try:
            for _ in range(MAX_MENDS):
                if self.errors.fresh:
                    self._repair.mend(
                        self._lifecycle.fail,
                        lambda one, why: self._lifecycle.lost(one, why, now),
                        now,
                    )
            self.check_integrity()
        except Exception as error:
            self.errors.of_nobody(error, "repair")
            self.broken = "its state could not be repaired after an error; see its log"

    def check_integrity(self) -> None:
        """Raise InternalError if records, counters and the workers' loads do not agree."""
        check_state(self._state)
