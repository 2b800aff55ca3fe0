"""Exceptions of the router's own code: who is harmed, and what is kept.

Invariant: an exception ends at most the request whose message or timer was handled. That request
gets one terminal, an :class:`.InternalError`; every other message, request and timer of the event
is still handled. After the event, :mod:`.repair` makes all sums and indexes again from the
requests' records.

The actions that a handler returned before it raised are performed: the records already count them
as sent (an Abort is repeated until it is confirmed, tokens are in ``emitted``), and a peer ignores
a message of a request that has ended since. The error's text stays in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .events import Action, Fault
from .records import Request

TEXT = "the router failed to handle this request; the router's log has the cause"
"""Everything that a client learns about such an error."""
INTERNAL = "router.internal_error"
"""Log event of such an error."""
METRIC = "internal_error"
"""The reason under which the router counts these errors."""


class Harmed(NamedTuple):
    """A request that an error may have left half changed; ``error`` ends it."""

    key: bytes
    error: Exception


class OwnErrors:
    """Collects the errors of one event.

    ``out``: gets a :class:`.Fault` for each. ``requests``: all records, by key. ``dropped``:
    counts what had no effect, by reason. ``harmed``: for :mod:`.repair`. ``fresh``: whether an
    error was caught since the last repair. ``unowned``: errors since the start that have no
    request or client as owner.
    """

    def __init__(
        self, out: list[Action], requests: Mapping[bytes, Request], dropped: Counter[str]
    ) -> None:
        self._out = out
        self._requests = requests
        self._dropped = dropped
        self.harmed: list[Harmed] = []
        self.fresh = False
        self.unowned = 0

    # ------------------------------------------------------------------ caught

    def of_request(self, error: Exception, key: bytes) -> None:
        """Note an error in the handling of one request."""
        self.harmed.append(Harmed(key, error))
        request = self._requests.get(key)
        name = "" if request is None else request.request_id
        self.note(error, {"request": key.hex(), "request_id": name})

    def of_client(self, error: Exception, message: str) -> None:
        """Note an error in the handling of a client's message that names no request."""
        self.note(error, {"message": message})

    def of_nobody(self, error: Exception, where: str) -> None:
        """Note an error that has no request or client as owner."""
        self.unowned += 1
        self.note(error, {"where": where})

    def each(self, requests: Iterable[Request], handle: Callable[[Request], object]) -> None:
        """Call ``handle`` for every request; an error harms that request alone."""
        for request in requests:
            try:
                handle(request)
            except Exception as error:
                self.of_request(error, request.key)

    def apart(self, where: str, call: Callable[[], object]) -> None:
        """Call a part of a timer's work; the other parts run even if it raises."""
        try:
            call()
        except Exception as error:
            self.of_nobody(error, where)

    def note(self, error: Exception, fields: dict[str, object]) -> None:
        """Count an error, and log it with these fields."""
        self.fresh = True
        self._dropped[METRIC] += 1
        self._out.append(Fault(INTERNAL, error, fields))
