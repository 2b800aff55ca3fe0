"""Who waits for what: the tickets of operators, and the answers they get.

Invariant: a ticket gets one final answer, DONE or FAILED, and is forgotten with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .members import Member
from .orders import Answer, Outcome


@dataclass(slots=True)
class Tickets:
    """Everybody who waits but the one of the rollout, who belongs to it."""

    scales: list[object] = field(default_factory=list)
    downs: list[object] = field(default_factory=list)
    drains: dict[object, str] = field(default_factory=dict)
    """Ticket to worker."""

    def end_scales(self, text: str, outcome: Outcome = Outcome.FAILED) -> list[Answer]:
        """Final answers to all who wait for a size."""
        ended, self.scales = self.scales, []
        return [Answer(ticket, outcome, text) for ticket in ended]

    def progress(self, text: str) -> list[Answer]:
        """A word to all who wait for a size."""
        return [Answer(ticket, Outcome.PROGRESS, text) for ticket in self.scales]

    def end_drains(self, member: Member, code: int) -> list[Answer]:
        """Final answers to all who wait for this worker, which ended with ``code``, to leave."""
        ended = [ticket for ticket, name in self.drains.items() if name == member.name]
        for ticket in ended:
            del self.drains[ticket]
        if member.left or (code == 0 and not member.died):
            return [Answer(ticket, Outcome.DONE, "left") for ticket in ended]
        text = f"{member.name} ended before it had finished; others go on for it"
        return [Answer(ticket, Outcome.FAILED, text) for ticket in ended]

    def end_all(self, text: str) -> list[Answer]:
        """The cluster ends: only those who want that go on waiting."""
        ended = [*self.scales, *self.drains]
        self.scales, self.drains = [], {}
        return [Answer(ticket, Outcome.FAILED, text) for ticket in ended]

    def end_downs(self) -> list[Answer]:
        """Nothing is left."""
        ended, self.downs = self.downs, []
        return [Answer(ticket, Outcome.DONE, "everything has ended") for ticket in ended]
