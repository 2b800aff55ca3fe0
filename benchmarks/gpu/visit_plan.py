"""Which part of a visit to a GPU runs next, and for how long. No clock, no file, no process.

Invariants: a part with a result does not run again; a part begins only if its budget fits into what
is left of the call and of the visit; parts run in the order of their value, so a part that does not
fit is passed over only for one that does. A part that the end of a call interrupted is tried once
more, after all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .parts import Part

CALL_S, VISIT_S = 540.0, 780.0
"""Most seconds of one call, and of all calls of a visit."""
TRIES = 2
"""How often a part is begun that the end of a call interrupts."""


@dataclass(frozen=True)
class Planned:
    """A part of a visit. ``usual_s``: what it took on an H200, 0 if it has never run there.

    ``why``: what a reader learns by it.
    """

    part: Part
    usual_s: float
    why: str


@dataclass
class Progress:
    """What earlier calls of a visit have used: part of the report, in JSON.

    ``begun``: time of day at which parts without a result began. ``tries``: how often a part was
    begun and interrupted.
    """

    calls: int = 0
    spent_s: float = 0.0
    begun: dict[str, float] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Inverse of :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> Progress:
        """Raises TypeError or ValueError for anything but :meth:`to_json`'s result."""
        if not isinstance(found, dict):
            raise TypeError("progress is no object")
        begun, tries = dict(found["begun"]), dict(found["tries"])
        return cls(
            int(found["calls"]), float(found["spent_s"]),
            {str(name): float(at) for name, at in begun.items()},
            {str(name): int(count) for name, count in tries.items()},
        )  # fmt: skip

    def resumed(self, limits: Mapping[str, float], now: float) -> Progress:
        """Return the progress at the start of a call, at the time of day ``now``.

        If the last call was killed, the longest of the budgets that may have passed since its parts
        began is charged: nobody saw when it ended.
        """
        lost = [min(limits.get(name, 0.0), max(now - at, 0.0)) for name, at in self.begun.items()]
        after = self.interrupted(self.spent_s + max(lost, default=0.0))
        after.calls += 1
        return after

    def interrupted(self, spent_s: float) -> Progress:
        """Return the progress after the end of a call that did not wait for its parts."""
        tries = {name: self.tries.get(name, 0) + 1 for name in self.begun}
        return Progress(self.calls, spent_s, {}, {**self.tries, **tries})


def waiting(parts: Sequence[Part], done: Collection[str], tries: Mapping[str, int]) -> list[Part]:
    """Return the parts to run, in order; those that were interrupted come last, or not again."""
    left = [part for part in parts if part.name not in done and tries.get(part.name, 0) < TRIES]
    return sorted(left, key=lambda part: part.name in tries)


def call_seconds(spent_s: float, asked_s: float = CALL_S) -> float:
    """Most seconds of the next call."""
    return max(0.0, min(asked_s, CALL_S, VISIT_S - spent_s))


def next_fitting(parts: Sequence[Part], left_s: float) -> Part | None:
    """Return the first part whose budget fits into ``left_s``."""
    return next((part for part in parts if part.limit_s <= left_s), None)


def outline(
    plan: Sequence[Planned], call_s: float = CALL_S
) -> Iterator[tuple[int, float, Planned]]:
    """Yield call, second of its beginning, and part, if each part takes its usual time or budget.

    Parts that would run together are counted one after the other. Call 0: does not fit into the
    visit.
    """
    left, call, spent = list(plan), 0, 0.0
    while left:
        budget, at, call = call_seconds(spent, call_s), 0.0, call + 1
        while (part := next_fitting([each.part for each in left], budget - at)) is not None:
            planned = next(each for each in left if each.part is part)
            left.remove(planned)
            yield call, at, planned
            at += planned.usual_s or part.limit_s
        if not at:
            break
        spent += at
    yield from ((0, 0.0, each) for each in left)
