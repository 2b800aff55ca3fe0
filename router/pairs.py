"""Pairs of workers that live and cannot reach each other, as far as this router was told.

Invariant: a pair that failed is not chosen for a while where another pair can serve the request;
each failed trial doubles that time, up to :data:`LONGEST_S`. When it is over one request tries the
pair, and the others wait for how that ends. A finished handoff clears a pair at once.

Pure; the table has a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .registry import Worker

FIRST_S = 2.0
"""How long a pair is avoided after its first failure."""
LONGEST_S = 16.0
TRIAL_S = 8.0
"""How long a request may take to show whether a pair works again, before another one tries it."""
FORGET_S = 60.0
"""A pair that has not failed for so long is forgotten, whether or not a request has used it."""
MAX_PAIRS = 1024
"""Failed pairs remembered; of more the one whose last failure is oldest is forgotten."""

Key = tuple[int, int]
"""Incarnations of the prefill and of the decode worker."""


@dataclass(slots=True)
class FailedPair:
    """What is known of a pair that failed; ``prefill`` and ``decode`` are worker ids.

    Moments in monotonic seconds: ``since`` of its first failure, ``failed_at`` of its last one,
    ``next_try`` until which it is avoided. ``trial_until``: until when a request tries it, if one
    does. ``pause``: seconds it is avoided after a failure.
    """

    prefill: str
    decode: str
    since: float
    failed_at: float
    next_try: float
    reason: str
    pause: float = FIRST_S
    failures: int = 1
    trial_until: float = 0.0


class FailedPairs:
    """The failed pairs of this router."""

    def __init__(self) -> None:
        self.known: OrderedDict[Key, FailedPair] = OrderedDict()  # by their last failure

    def failed(self, prefill: Worker, decode: Worker, reason: str, now: float) -> None:
        """A handoff found the other side unreachable.

        Requests that were on their way when the pair failed first fail one after the other; only
        one that was placed since then tells that the pair still does not work.
        """
        key = (prefill.incarnation, decode.incarnation)
        pair = self.known.pop(key, None)
        if pair is None or now >= pair.failed_at + FORGET_S:
            pair = FailedPair(prefill.id, decode.id, now, now, now + FIRST_S, reason)
        else:
            pair.failures += 1
            pair.failed_at, pair.reason = now, reason
            if now >= pair.next_try:
                pair.pause = min(2 * pair.pause, LONGEST_S)
                pair.next_try = now + pair.pause
            pair.trial_until = 0.0
        self.known[key] = pair
        if len(self.known) > MAX_PAIRS:
            self.known.popitem(last=False)

    def works(self, prefill: Worker, decode: Worker, now: float, *, trial: bool) -> bool:
        """Whether a request may use the pair; ``trial``: also one that has to be tried again."""
        pair = self.known.get((prefill.incarnation, decode.incarnation))
        if pair is None or now >= pair.failed_at + FORGET_S:
            return True
        return trial and now >= pair.next_try and now >= pair.trial_until

    def placed(self, prefill: Worker, decode: Worker, now: float) -> None:
        """A request was given to the pair; if that failed before, others wait for the result."""
        pair = self.known.get((prefill.incarnation, decode.incarnation))
        if pair is not None and now >= pair.next_try:
            pair.trial_until = now + TRIAL_S

    def handed_over(self, prefill: Worker, decode: Worker) -> None:
        """The pair passed a request on, so it works."""
        self.known.pop((prefill.incarnation, decode.incarnation), None)

    def forget(self, worker: Worker) -> None:
        """The worker is gone."""
        gone = worker.incarnation
        for key in [key for key in self.known if gone in key]:
            del self.known[key]

    def listed(self, now: float) -> Iterator[FailedPair]:
        """Failed pairs, that of the oldest failure first."""
        return (pair for pair in self.known.values() if now < pair.failed_at + FORGET_S)
