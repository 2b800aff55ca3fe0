"""Queries to the router. Pure.

A query is repeated until its answer arrives. An answer belongs to the oldest query of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.errors import BatonError, CapacityError, ConnectionLost, error_from_code
from ..proto.wire.messages import Describe, Described, Drain, Drained, Message, Status, StatusReport
from .events import Action, Answered, Ask

REPEAT_S = 1.0
NO_MODEL_REPEAT_S = 0.1
"""Seconds until the query for the model is repeated, if the router has no worker yet."""
_ABOUT: dict[type, tuple[str, str]] = {
    Describe: ("the model", "connect_timeout"),
    Status: ("the status", "timeout"),
    Drain: ("a drain", "timeout"),
}
"""Subject of each query, and the setting that limits the wait, for error messages."""


@dataclass(slots=True)
class _Open:
    """A query without an answer."""

    ask: Ask
    expires: float
    repeat_at: float
    modelless: bool = False  # answered, but no worker had registered yet


class Questions:
    """All open queries of a client."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open: list[_Open] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, ask: Ask, now: float) -> None:
        """Add a query. The next :meth:`due` returns it."""
        self._open.append(_Open(ask, now + ask.timeout, now))

    def due(self, now: float) -> list[Message]:
        """Return the queries to send or repeat now."""
        due = [question for question in self._open if now >= question.repeat_at]
        for question in due:
            question.repeat_at = now + REPEAT_S
        return [question.ask.message for question in due]

    def reconnected(self) -> None:
        """Make all open queries due, because the new connection has received none of them."""
        for question in self._open:
            question.repeat_at = 0.0

    def take(self, answer: Message, now: float) -> Answered | None:
        """Match ``answer`` to the oldest query of its kind. None if no query is settled."""
        for question in self._open:
            if not _answers(question.ask.message, answer):
                continue
            if isinstance(answer, Described) and answer.model is None:
                question.modelless = True
                question.repeat_at = now + NO_MODEL_REPEAT_S
                return None
            self._open.remove(question)
            return Answered(question.ask.ticket, _checked(answer))
        return None

    def fail_oldest(self, error: BatonError) -> list[Action]:
        """Fail the oldest query, which a rejection without a request id must concern."""
        return [Answered(self._open.pop(0).ask.ticket, error)] if self._open else []

    def fail_all(self, error: BatonError) -> list[Action]:
        """Fail all queries, because no router can answer them."""
        failed: list[Action] = [Answered(question.ask.ticket, error) for question in self._open]
        self._open.clear()
        return failed

    def expired(self, now: float, hint: str) -> list[Action]:
        """Remove and fail the queries whose timeout has passed. ``hint``: ends their error."""
        over = [question for question in self._open if now >= question.expires]
        self._open = [question for question in self._open if now < question.expires]
        return [Answered(question.ask.ticket, self._why(question, hint)) for question in over]

    def _why(self, question: _Open, hint: str) -> BatonError:
        if question.modelless:
            return CapacityError(
                f"the router at {self._address} has no worker yet", retry_after=1.0
            )
        about, setting = _ABOUT[type(question.ask.message)]
        return ConnectionLost(
            f"no answer from {self._address} to the query for {about} within "
            f"{question.ask.timeout:g} s ({setting}); is a cluster running there? "
            f"start one with: baton serve{hint}"
        )


def _answers(question: Message, answer: Message) -> bool:
    match question, answer:
        case Describe(), Described():
            return set(answer.files) == set(question.files) & set(answer.available)
        case Status(), StatusReport():
            return True
        case Drain(), Drained():
            return question.worker == answer.worker
    return False


def _checked(answer: Message) -> Message | BatonError:
    if isinstance(answer, Drained) and answer.code is not None:
        return error_from_code(answer.code, answer.message)
    return answer
