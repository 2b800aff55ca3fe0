"""States of requests and of workers, and the legal changes.

Invariants: a request ends once. :data:`TRANSITIONS` lists all legal steps; any other step raises.
An attempt holds what :data:`.integrity.HOLDINGS` lists for the request's state.
:data:`WORKER_TRANSITIONS` lists the legal changes of a worker's state.

::

          submit                   resume, unknown here
            v                              v
          QUEUED <------ requeue ----- RECOVERING
           |                               |
    assign |                               | adopt
           v                               v       follow
         ASSIGNED ---- accept -------> PREFILLING ---------> FOLLOWED
           |                               | ^                  |
           |                     hand over | | reassign         | hand over
           |                               v |                  |
           +-- hand over (local) ------> DECODING <-------------+

    ASSIGNED, PREFILLING, FOLLOWED, DECODING -- requeue --> QUEUED, as a new attempt
    any of these -- end --> ENDED -- acknowledged, expired --> FORGOTTEN

A worker is *ready* (or draining), *suspect* or *dead*. A suspect worker has a closed connection, or
shows no heartbeat or no progress. It gets no new requests, and may return with the same
incarnation. A worker is dead after the worker timeout, or when a successor takes its name.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """State of a request and of its current attempt; :data:`HOLDINGS` lists its resources."""

    RECOVERING = "recovering"  # resumed without a record here: a worker may hold it
    QUEUED = "queued"  # waits for workers
    ASSIGNED = "assigned"  # Assign sent to a worker, not answered yet
    PREFILLING = "prefilling"  # a prefill worker has accepted it
    FOLLOWED = "followed"  # as PREFILLING, but the handoff names another router: Adopt is repeated
    DECODING = "decoding"  # a decode worker has it: handed over, or local, also with its prompt
    ENDED = "ended"  # its terminal is known and kept until acknowledged
    FORGOTTEN = "forgotten"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow


class Step(Enum):
    """Step from one state to the next."""

    ASSIGN = "assign"
    ACCEPT = "accept"
    ADOPT = "adopt"
    FOLLOW = "follow"
    HAND_OVER = "hand over"
    REASSIGN = "reassign"
    REQUEUE = "requeue"
    END = "end"
    FORGET = "forget"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.RECOVERING, Step.ADOPT): State.PREFILLING,
    (State.RECOVERING, Step.REQUEUE): State.QUEUED,
    (State.RECOVERING, Step.END): State.ENDED,
    (State.QUEUED, Step.ASSIGN): State.ASSIGNED,
    (State.QUEUED, Step.END): State.ENDED,
    (State.ASSIGNED, Step.ACCEPT): State.PREFILLING,
    (State.ASSIGNED, Step.HAND_OVER): State.DECODING,  # local: a decode worker has accepted it
    (State.ASSIGNED, Step.REQUEUE): State.QUEUED,
    (State.ASSIGNED, Step.END): State.ENDED,
    (State.PREFILLING, Step.FOLLOW): State.FOLLOWED,
    (State.PREFILLING, Step.HAND_OVER): State.DECODING,
    (State.PREFILLING, Step.REQUEUE): State.QUEUED,
    (State.PREFILLING, Step.END): State.ENDED,
    (State.FOLLOWED, Step.HAND_OVER): State.DECODING,
    (State.FOLLOWED, Step.REQUEUE): State.QUEUED,
    (State.FOLLOWED, Step.END): State.ENDED,
    (State.DECODING, Step.HAND_OVER): State.DECODING,  # another worker proves to have it
    (State.DECODING, Step.REASSIGN): State.PREFILLING,  # by another router, as a higher attempt
    (State.DECODING, Step.REQUEUE): State.QUEUED,
    (State.DECODING, Step.END): State.ENDED,
    (State.ENDED, Step.FORGET): State.FORGOTTEN,
}
"""Every legal step."""
NEXT: dict[State, dict[Step, State]] = {state: {} for state in State}
"""The same by state, then by step: in a third of the time of a look-up by a new pair."""
for (_state, _step), _target in TRANSITIONS.items():
    NEXT[_state][_step] = _target

RUNNING = frozenset({State.PREFILLING, State.FOLLOWED, State.DECODING})
"""A worker has accepted the attempt."""
PLACED = RUNNING | {State.ASSIGNED}
"""The attempt has workers."""
BEFORE_DECODE = PLACED - {State.DECODING}
"""Its prefill worker may hold a grant of its decode worker."""


class WorkerState(Enum):
    """State of a worker; :data:`WORKER_TRANSITIONS` has the legal changes."""

    JOINING = "joining"  # sent Hello, not checked yet
    READY = "ready"
    DRAINING = "draining"  # finishes its requests, gets no new ones
    SUSPECT = "suspect"  # silent, stuck or disconnected; returns, or is declared dead
    REFUSED = "refused"  # rejected, since it serves another model
    DEAD = "dead"

    __hash__ = object.__hash__


WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.JOINING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.REFUSED}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.SUSPECT}),
    WorkerState.DRAINING: frozenset({WorkerState.SUSPECT}),
    WorkerState.SUSPECT: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.REFUSED: frozenset(),
    WorkerState.DEAD: frozenset(),
}
NO_HEARTBEAT = "no heartbeat"
CONNECTION_CLOSED = "its connection closed"
SILENCES = (NO_HEARTBEAT, CONNECTION_CLOSED)
"""Reasons for a worker's death that this router's own network could explain."""
LIVE = frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.SUSPECT})
