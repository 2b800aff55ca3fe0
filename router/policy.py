"""The policies that choose a worker for a request.

A policy chooses the decode and the prefill worker separately, from lists of candidates. The load
term of ``prefix_aware`` is not optional: if all prompts share a first block, a policy that only
counts cached blocks sends every request to one worker, whose cache then evicts blocks before they
are used again.

Pure and without randomness: the same calls in the same order give the same choices.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from baton.proto.errors import ConfigError

from .config import PolicyConfig
from .records import Preference, Worker

NO_HASHES: Sequence[bytes] = ()


class RoundRobin:
    """Chooses the workers of a role in turn."""

    wants_hashes = False
    begin = None
    margin: Preference = None

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._turns: dict[str, int] = {}

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """Return the next worker of this role."""
        role = workers[0].role
        turn = self._turns.get(role, self._first)
        self._turns[role] = turn + 1
        return workers[turn % len(workers)]

    def cached(self, worker: Worker, hashes: Sequence[bytes]) -> int:
        """Return 0: not known."""
        return 0

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> int:
        """Keep no state."""
        return 0

    def forget(self, worker: Worker) -> None:
        """Keep no state."""


class LeastLoaded:
    """Chooses the worker with the fewest outstanding tokens of all routers; ties take turns."""

    wants_hashes = False
    begin = None

    def __init__(self, first: int = 0) -> None:
        self.margin: Preference = None
        self._turn = first

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """Return the least loaded worker."""
        count = len(workers)
        if count == 1:
            self.margin = None
            return workers[0]
        self._turn = turn = self._turn + 1
        first = turn % count
        best = rival = workers[first]
        least = best.outstanding + best.others  # not burden: a property is slow
        second = math.inf
        for index in range(first + 1 - count, first):  # a negative index counts from the end
            worker = workers[index]
            burden = worker.outstanding + worker.others
            if burden < least:
                rival, second = best, least
                best, least = worker, burden
            elif burden < second:
                rival, second = worker, burden
        self.margin = (least, rival.id, second, count)
        return best

    def cached(self, worker: Worker, hashes: Sequence[bytes]) -> int:
        """Return 0: not known."""
        return 0

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> int:
        """Keep no state: the placement counts outstanding tokens."""
        return 0

    def forget(self, worker: Worker) -> None:
        """Keep no state."""


class PrefixIndex:
    """Estimate of one worker's prefix cache: an LRU set of block hashes.

    Invariant: the set holds all blocks before each of its blocks. A chain that uses a block again
    also uses the blocks before it again, so they are evicted later.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks in the set, by bisection."""
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return 0
        known, unknown = 1, len(hashes)
        while known < unknown:
            middle = (known + unknown) // 2
            if hashes[middle] in blocks:
                known = middle + 1
            else:
                unknown = middle
        return known

    def add(self, hashes: Sequence[bytes]) -> None:
        """Add these blocks as most recently used; a chain's tail is evicted before its head."""
        blocks = self._blocks
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def __len__(self) -> int:
        return len(self._blocks)


class PrefixAware:
    """Chooses the worker with the least cost: uncached tokens plus weighted load.

    Prompts shorter than a block go to the least loaded worker. Load is a worker's outstanding
    tokens plus the tokens recently assigned to it. Its weight depends on the role: a cached prefix
    saves a prefill worker all of the prefix's work, but a decode worker only a transfer. Recently
    assigned tokens decay with the number of placements, not with time, since they balance the
    contents of the caches, which matter at every request rate.
    """

    wants_hashes = True
    begin = None

    def __init__(self, config: PolicyConfig, first: int = 0) -> None:
        self.margin: Preference = None
        self._config = config
        self._weights = {"prefill": config.prefill_load, "decode": config.decode_load}
        self._indexes: dict[int, PrefixIndex] = {}
        self._by_load = LeastLoaded(first)
        self._turn = first
        self._placements = {"prefill": 0, "decode": 0}

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """Return the worker with the least cost; ties take turns."""
        count = len(workers)
        if count == 1:
            self.margin = None
            return workers[0]
        if not hashes:
            best = self._by_load.choose(workers, hashes)
            self.margin = self._by_load.margin
            return best
        self._turn += 1
        weight = self._weights[workers[0].role]
        best = rival = workers[0]
        best_cost = second = math.inf
        for offset in range(count):
            worker = workers[(self._turn + offset) % count]
            cost = weight * (worker.burden + self._recent(worker))
            cost -= self.cached(worker, hashes) * self._config.block_tokens
            if cost < best_cost:
                rival, second = best, best_cost
                best, best_cost = worker, cost
            elif cost < second:
                rival, second = worker, cost
        self.margin = (best_cost, rival.id, second, count)
        return best

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> int:
        """Add the uncached tokens to the worker's load, and the blocks to its index."""
        if not hashes:
            return 0
        cached = self.cached(worker, hashes) * self._config.block_tokens
        worker.recent = self._recent(worker) + max(0, tokens - cached)
        self._placements[worker.role] += 1
        worker.recent_at = self._placements[worker.role]
        index = self._indexes.get(worker.incarnation)
        if index is None:
            index = self._indexes[worker.incarnation] = PrefixIndex(self._capacity(worker))
        index.add(hashes)
        return cached

    def forget(self, worker: Worker) -> None:
        """Drop the index of a dead worker."""
        self._indexes.pop(worker.incarnation, None)

    def cached(self, worker: Worker, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the worker probably has cached."""
        index = self._indexes.get(worker.incarnation)
        return index.match(hashes) if index else 0

    def _recent(self, worker: Worker) -> float:
        """Return the recently assigned tokens, decayed by the placements since."""
        if not worker.recent:
            return 0.0
        age = self._placements[worker.role] - worker.recent_at
        return worker.recent * math.exp2(-age / self._config.half_life)

    def _capacity(self, worker: Worker) -> int:
        """Return the index size: the worker's KV memory in blocks, at most ``index_blocks``."""
        tokens = worker.load.kv_blocks_total * worker.card.layout.block_size
        fits = tokens // self._config.block_tokens if tokens else self._config.index_blocks
        return max(1, min(fits, self._config.index_blocks))


Own = RoundRobin | LeastLoaded | PrefixAware
"""A policy of Baton's own."""


def make_policy(config: PolicyConfig, router: str = "") -> Own:
    """Return the policy with this name; raises ConfigError for an unknown name.

    Routers with different numbers in their names begin with different workers.
    """
    number = router.rpartition("-")[2]
    first = int(number) if number.isdecimal() and number.isascii() else 0
    if config.name == "round_robin":
        return RoundRobin(first)
    if config.name == "least_loaded":
        return LeastLoaded(first)
    if config.name == "prefix_aware":
        return PrefixAware(config, first)
    raise ConfigError(f"unknown policy {config.name!r}")
