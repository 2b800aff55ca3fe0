"""Questions to the router: asked until answered, matched by kind, oldest first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.errors import BatonError, CapacityError, ConnectionLost, error_from_code
from ..proto.messages import Describe, Described, Drain, Drained, Message, Status, StatusReport
from .events import Answered, Ask

REPEAT_S = 1.0
NO_MODEL_REPEAT_S = 0.1
"""How soon a router that knows no worker yet is asked for the model again."""
_ABOUT: dict[type, tuple[str, str]] = {
    Describe: ("the model", "connect_timeout"),
    Status: ("the status", "timeout"),
    Drain: ("a drain", "timeout"),
}
"""What was asked for, and the setting that bounds the wait."""


@dataclass(slots=True)
class _Open:
    """A question without an answer."""

    ask: Ask
    expires: float
    repeat_at: float
    modelless: bool = False  # answered, but no worker had registered yet


class Questions:
    """All open questions of a client."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.hint = ""  # appended to what is said when nobody answered
        self._open: list[_Open] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, ask: Ask, now: float) -> None:
        """Ask at the next :meth:`due`."""
        self._open.append(_Open(ask, now + ask.timeout, now))

    def due(self, now: float) -> list[Message]:
        """Questions to send (again) now."""
        due = [question for question in self._open if now >= question.repeat_at]
        for question in due:
            question.repeat_at = now + REPEAT_S
        return [question.ask.message for question in due]

    def reconnected(self) -> None:
        """Ask everything again."""
        for question in self._open:
            question.repeat_at = 0.0

    def take(self, answer: Message, now: float) -> Answered | None:
        """The oldest question ``answer`` answers is settled by it."""
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

    def fail_oldest(self, error: BatonError) -> Answered | None:
        """A refusal that names no request belongs to the question asked longest ago."""
        return Answered(self._open.pop(0).ask.ticket, error) if self._open else None

    def fail_all(self, error: BatonError) -> list[Answered]:
        """The connection is of no use any more."""
        failed = [Answered(question.ask.ticket, error) for question in self._open]
        self._open.clear()
        return failed

    def expired(self, now: float) -> list[Answered]:
        """Questions whose time is up."""
        over = [question for question in self._open if now >= question.expires]
        self._open = [question for question in self._open if now < question.expires]
        return [Answered(question.ask.ticket, self._why(question)) for question in over]

    def _why(self, question: _Open) -> BatonError:
        if question.modelless:
            return CapacityError(
                f"the router at {self._address} has no worker yet", retry_after=1.0
            )
        about, setting = _ABOUT[type(question.ask.message)]
        return ConnectionLost(
            f"no answer from {self._address} to the question for {about} within "
            f"{question.ask.timeout:g} s ({setting}); is a cluster running there? "
            f"start one with: baton serve{self.hint}"
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
