"""What an attempt holds in each state of its request, and the check of that."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from baton.proto.errors import InternalError

from .records import Request
from .states import State

YES, NO, MAYBE = True, False, None


class Holding(NamedTuple):
    """What an attempt holds in one state: always, never, or perhaps (MAYBE, not checked).

    ``server``: role of the worker that runs it, empty without one. ``load``: its tokens count as
    load of its workers. ``search``: workers are asked for it.
    """

    prefill: bool | None
    decode: bool | None
    server: str
    load: bool | None
    search: bool | None

    @lru_cache  # noqa: B019, few holdings exist
    def wrong(self, held: Holding) -> list[str]:
        """Return the names of the parts of ``held`` that this holding forbids."""
        return [
            name
            for name, expected, found in zip(self._fields, self, held, strict=True)
            if expected is not None and expected != found
        ]


HOLDINGS: dict[State, Holding] = {
    State.RECOVERING: Holding(NO, NO, "", NO, MAYBE),
    State.QUEUED: Holding(NO, NO, "", NO, NO),
    State.ASSIGNED: Holding(MAYBE, MAYBE, "", YES, NO),  # embeddings: no decode, local: no prefill
    State.PREFILLING: Holding(YES, MAYBE, "prefill", MAYBE, NO),
    State.FOLLOWED: Holding(YES, NO, "prefill", NO, NO),
    State.DECODING: Holding(MAYBE, YES, "decode", MAYBE, NO),
    State.ENDED: Holding(MAYBE, MAYBE, "", NO, MAYBE),  # for its terminal and report
    State.FORGOTTEN: Holding(MAYBE, MAYBE, "", NO, MAYBE),
}
"""What an attempt holds in each state of its request. An adopted attempt has no load here."""


def check_request(request: Request) -> None:
    """Raise InternalError if the attempt does not match :data:`HOLDINGS`."""
    attempt, holding = request.attempt, HOLDINGS[request.state]
    server = attempt.server.role if attempt.server is not None else ""
    held = Holding(
        attempt.prefill is not None,
        attempt.decode is not None,
        server,
        load=bool(attempt.prefill_cost or attempt.decode_cost),
        search=attempt.search is not None,
    )
    wrong = [*holding.wrong(held)]  # a copy: the list is cached
    if request.state is State.ASSIGNED and attempt.assignee is None:
        wrong.append("assignee")
    if wrong or (attempt.server is not None and not attempt.runs_on(attempt.server)):
        text = f"{request.request_id} is {request.state.value}, but its attempt holds {held}"
        raise InternalError(f"{text}: wrong {', '.join(wrong) or 'server'}")
    if request.next != request.base + len(request.emitted):
        raise InternalError(f"{request.request_id} has miscounted its tokens")
    if request.slot < 0:
        raise InternalError(f"{request.request_id} has no timer")
