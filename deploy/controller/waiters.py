"""The operators who wait for the end of an order, by ticket, and their final answers.

Invariant: each ticket receives one final answer, DONE or FAILED, and is then dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Answer, Outcome
from .members import Member


@dataclass(slots=True)
class Waiters:
    """All pending tickets, except the rollout's ticket, which the rollout holds."""

    scales: list[object] = field(default_factory=list)
    downs: list[object] = field(default_factory=list)
    drains: dict[object, str] = field(default_factory=dict)
    """Worker name by ticket."""

    def end_scales(self, text: str, outcome: Outcome = Outcome.FAILED) -> list[Answer]:
        """Return final answers for all scale orders."""
        ended, self.scales = self.scales, []
        return [Answer(ticket, outcome, text) for ticket in ended]

    def progress(self, text: str) -> list[Answer]:
        """Return progress answers for all scale orders."""
        return [Answer(ticket, Outcome.PROGRESS, text) for ticket in self.scales]

    def end_drains(self, member: Member, code: int) -> list[Answer]:
        """Return final answers for the drains of a worker that ended with ``code``."""
        ended = [ticket for ticket, name in self.drains.items() if name == member.name]
        for ticket in ended:
            del self.drains[ticket]
        if member.left or (code == 0 and not member.died):
            return [Answer(ticket, Outcome.DONE, "left") for ticket in ended]
        text = f"{member.name} ended before its drain finished; its requests move to other workers"
        return [Answer(ticket, Outcome.FAILED, text) for ticket in ended]

    def end_all(self, text: str) -> list[Answer]:
        """Fail all scale orders and drains, because the cluster shuts down."""
        ended = [*self.scales, *self.drains]
        self.scales, self.drains = [], {}
        return [Answer(ticket, Outcome.FAILED, text) for ticket in ended]

    def end_downs(self) -> list[Answer]:
        """Return final answers for all shutdown orders, after the last process has ended."""
        ended, self.downs = self.downs, []
        return [Answer(ticket, Outcome.DONE, "everything has ended") for ticket in ended]
