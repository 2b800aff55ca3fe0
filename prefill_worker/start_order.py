"""Which of the prompts that wait is begun next.

With a time that first tokens should keep, the first of those that can still keep it: a prompt
that is late already gains nothing by going ahead, and makes those behind it late as well.
In a burst that is more than a pool can do, first come, first served so loses nearly every
request of it; this order loses those that were too many. Late prompts take their turn when no
other waits, and one start in :data:`LATE_TURN` while others do: they wait longer, not for ever.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from ..runtime.agenda import Agenda

LATE_TURN = 16
"""One of so many starts is a late prompt's while both kinds wait."""
SPARE = 0.1
"""Part of the limit left for what is not foreseen: in a burst all begin at the last moment."""
K = TypeVar("K")


def latest_start(asked: float, limit: float, own: float) -> float:
    """When a prompt of ``own`` seconds must begin to be in time, ``limit`` after it came."""
    return asked + (1 - SPARE) * limit - own


class StartOrder(Generic[K]):
    """Keys that wait, by place (their order of coming), in two ranks.

    ``start_by``: the last moment at which a key can begin and be in time. It is asked when the
    key's turn comes, as it may depend on what is cached by then. None: order of coming alone.

    Invariant: a key is there once; one found late stays behind those in time until it is taken.
    """

    def __init__(self, start_by: Callable[[K], float] | None = None) -> None:
        self._start_by = start_by
        self._in_time: Agenda[K] = Agenda()
        self._late: Agenda[K] = Agenda()
        self._passed = 0  # starts since a late one that waits was last taken

    def put(self, key: K, place: float) -> None:
        """File ``key``, which is not here."""
        self._in_time.put(key, place)

    def drop(self, key: K) -> None:
        """Take ``key`` out, if it is here."""
        self._in_time.drop(key)
        self._late.drop(key)

    def pop(self, now: float) -> K | None:
        """Take out who begins now; None when nobody waits."""
        if self._late and self._passed + 1 >= LATE_TURN:
            return self._pop_late()
        while (place := self._in_time.first()) is not None:
            key = self._in_time.pop(place)
            if key is None:
                break
            if self._start_by is None or now <= self._start_by(key):
                self._passed += 1 if self._late else 0
                return key
            self._late.put(key, place)
        return self._pop_late()

    def _pop_late(self) -> K | None:
        self._passed = 0
        return self._late.pop(math.inf)

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)
