"""Failed pairs: a prefill and a decode worker that both live and cannot reach each other.

Invariant: the router avoids a failed pair for a pause while another pair can serve the request.
Each failed trial doubles the pause, up to :data:`LONGEST_S`. After the pause one request tries the
pair, and other requests avoid it until that trial ends. A finished handoff clears the pair.

Pure; the table is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

FIRST_S = 2.0
"""Pause in seconds after the first failure."""
LONGEST_S = 16.0
"""Longest pause in seconds."""
TRIAL_S = 8.0
"""Longest trial in seconds; after that another request may try the pair."""
FORGET_S = 60.0
"""Seconds after the last failure until a pair is forgotten, used or not."""
MAX_PAIRS = 1024
"""Maximum number of failed pairs; the pair with the oldest last failure is dropped."""


class Named(Protocol):
    """What is read of a worker."""

    id: str
    incarnation: int


Key = tuple[int, int]
"""Incarnations of the prefill and the decode worker."""


@dataclass(slots=True)
class FailedPair:
    """A failed pair; ``prefill`` and ``decode`` are worker ids.

    Times in monotonic seconds: ``since``: first failure; ``failed_at``: last failure;
    ``next_try``: end of the pause; ``trial_until``: end of the running trial, if any.
    ``pause``: seconds to avoid the pair after a failure.
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
    """The failed pairs that this router has observed."""

    def __init__(self) -> None:
        self.known: OrderedDict[Key, FailedPair] = OrderedDict()  # ordered by last failure

    def failed(self, prefill: Named, decode: Named, reason: str, now: float) -> None:
        """Note that a handoff of this pair failed because the decode worker was unreachable.

        Requests placed before the first failure all fail too. They do not double the pause: only
        the failure of a request placed after the pause shows that the pair still does not work.
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

    def works(self, prefill: Named, decode: Named, now: float, *, trial: bool) -> bool:
        """True if a request may use the pair. ``trial``: allow a failed pair after its pause."""
        pair = self.known.get((prefill.incarnation, decode.incarnation))
        if pair is None or now >= pair.failed_at + FORGET_S:
            return True
        return trial and now >= pair.next_try and now >= pair.trial_until

    def placed(self, prefill: Named, decode: Named, now: float) -> None:
        """Begin a trial if the pair has failed before: other requests avoid it until the result."""
        pair = self.known.get((prefill.incarnation, decode.incarnation))
        if pair is not None and now >= pair.next_try:
            pair.trial_until = now + TRIAL_S

    def handed_over(self, prefill: Named, decode: Named) -> None:
        """Clear the pair after a finished handoff."""
        self.known.pop((prefill.incarnation, decode.incarnation), None)

    def forget(self, worker: Named) -> None:
        """Drop all pairs of a dead worker."""
        gone = worker.incarnation
        for key in [key for key in self.known if gone in key]:
            del self.known[key]

    def listed(self, now: float) -> Iterator[FailedPair]:
        """Return the failed pairs, oldest last failure first."""
        return (pair for pair in self.known.values() if now < pair.failed_at + FORGET_S)
