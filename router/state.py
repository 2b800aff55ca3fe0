"""The state of one router: everything that its parts share.

Each part of the core takes a :class:`RouterState` and the parts that it calls. So a new record of
the router is one line here, and no constructor passes it on.
"""

from __future__ import annotations

from collections.abc import Callable

from .admission import Admission
from .clients import Clients
from .config import RouterConfig
from .custom import Extensions
from .decider import HandoffTails
from .events import Action, Fault
from .handoffs import Handoffs
from .history import History
from .metrics import Metrics
from .own_errors import OwnErrors
from .placement import Placement
from .records import ANYBODY, NO_KEY, Caller, WorkerCaller
from .registry import Registry
from .request_table import RequestTable
from .stories import Stories


class RouterState:
    """Records, counters and the actions to return.

    ``out``: the actions of the event that is handled. ``incarnation``: random number of this
    process. ``started_at``: monotonic seconds. ``caller_of``: maps a client's routing id to its
    key and rights; ``worker_of``: maps a worker's routing id and name to what its connection
    proves.
    """

    def __init__(
        self,
        config: RouterConfig,
        incarnation: int,
        now: float,
        *,
        caller_of: Callable[[bytes], Caller] = lambda _identity: ANYBODY,
        worker_of: Callable[[bytes, str], WorkerCaller] = lambda _identity, _name: NO_KEY,
        fresh_stories: bool = False,
        extensions: Extensions | None = None,
    ) -> None:
        self.config = config
        self.incarnation = incarnation
        self.started_at = now
        self.caller_of = caller_of
        self.worker_of = worker_of
        self.out: list[Action] = []
        self.table = RequestTable()
        registry = self.registry = Registry(config, now)
        self.admission = Admission(config.admission, now)
        self.clients = Clients()
        self.metrics = Metrics()
        self.stories = Stories(config.trace_requests, fresh=fresh_stories)
        tails = HandoffTails() if config.mode == "adaptive" else None
        self.handoffs = Handoffs(lambda name: registry.find(name) is not None, tails)
        own = self.extensions = extensions or Extensions(config)
        self.placement = Placement(
            registry, config, tails, own.policy(self._failed), own.decider(self._failed)
        )
        self.history = History(
            self.table, registry, self.admission, self.metrics, self.handoffs.metrics, now
        )
        self.errors = OwnErrors(
            self.out, self.table, registry, self.admission, self.clients, self.metrics
        )

    def _failed(self, event: str, error: Exception, fields: dict[str, object]) -> None:
        """Log that an extension failed."""
        self.out.append(Fault(event, error, fields))
