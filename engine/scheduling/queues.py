"""The queues of a scheduler: which of its sequences wait, are ready or run.

Invariant: a sequence is in exactly one queue. *Waiting* sequences hold no blocks and have no KV.
*Ready* sequences have their KV (from a handoff) and wait for a batch slot. *Running* ones are in
the batch. Waiting and ready are ordered by rank (priority, then arrival), running by admission.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from baton.proto.errors import InternalError

from .sequence import Sequence

by_rank = attrgetter("rank")


class Queues:
    """The sequences of one scheduler, by request and by queue."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_request: dict[bytes, Sequence] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def enter(self, sequence: Sequence) -> None:
        """Add a new sequence: to ready if it has blocks, else to waiting."""
        if sequence.request in self._by_request:
            raise InternalError("the request is in the scheduler already")
        self._serial += 1
        sequence.rank = (sequence.priority, sequence.arrival, self._serial)
        self._by_request[sequence.request] = sequence
        insort(self.waiting if sequence.allocation is None else self.ready, sequence, key=by_rank)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue."""
        del self._by_request[sequence.request]
        for place in (self.running, self.ready, self.waiting):
            if sequence in place:
                place.remove(sequence)
                return

    def find(self, request: bytes) -> Sequence | None:
        """Return the sequence of ``request``, or None."""
        return self._by_request.get(request)

    @property
    def requests(self) -> frozenset[bytes]:
        """All requests of the scheduler."""
        return frozenset(self._by_request)

    def holders(self) -> list[Sequence]:
        """Return the sequences that hold blocks."""
        return self.running + self.ready

    def send_back(self, sequence: Sequence) -> None:
        """Move a sequence whose blocks were freed back to waiting, by rank."""
        (self.running if sequence in self.running else self.ready).remove(sequence)
        insort(self.waiting, sequence, key=by_rank)

    @property
    def tokens_waiting(self) -> int:
        """Number of tokens not computed yet, without decode rows."""
        left = (s.num_tokens - s.num_computed_tokens for s in self._by_request.values())
        return sum(count for count in left if count > 1)

    def check_integrity(self) -> None:
        """Raise InternalError unless every sequence is in one queue and matches its state."""
        places = [*self.waiting, *self.ready, *self.running]
        if len(places) != len(self) or set(places) != set(self._by_request.values()):
            raise InternalError("a sequence is in no queue or in two queues")
        for place in (self.waiting, self.ready):
            if place != sorted(place, key=by_rank):
                raise InternalError("a queue is out of order")
        for sequence in self.waiting:
            if sequence.allocation is not None or sequence.num_computed_tokens:
                raise InternalError("a waiting sequence holds blocks or has KV")
        for sequence in self.holders():
            computed = sequence.num_computed_tokens
            if sequence.allocation is None or computed >= sequence.num_tokens:
                raise InternalError("a sequence with KV has no blocks or nothing to compute")
            if sequence.allocation.capacity < computed:
                raise InternalError("a sequence has more KV than its blocks can hold")
