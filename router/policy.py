"""Which of the ready workers takes a request; chosen by name.

Each policy chooses the decode and the prefill worker separately, from the lists it is given.
The load term of ``prefix_aware`` is not optional: where all prompts share a first block, a
policy that only counts cached blocks sends everything to one worker, whose cache then turns
over faster than it is used.

Pure and without randomness: equal calls in equal order give equal choices.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ..proto.errors import ConfigError
from .config import PolicyConfig
from .registry import Worker

NO_HASHES: Sequence[bytes] = ()


class Policy(Protocol):
    """How workers are chosen."""

    wants_hashes: bool
    """Whether the router should hash the prompt for it."""

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """One of ``workers`` (at least one, all of one role) for a prompt of these blocks."""
        ...

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> None:
        """``worker`` was given a request of these blocks and ``tokens`` of work."""

    def forget(self, worker: Worker) -> None:
        """``worker`` is gone."""


class RoundRobin:
    """Every worker in turn."""

    wants_hashes = False

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._turns: dict[str, int] = {}

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """The next in turn of this role."""
        role = workers[0].role
        turn = self._turns.get(role, self._first)
        self._turns[role] = turn + 1
        return workers[turn % len(workers)]

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> None:
        """Nothing to remember."""

    def forget(self, worker: Worker) -> None:
        """Nothing to forget."""


class LeastLoaded:
    """The worker with the fewest outstanding tokens of all routers; equals take turns."""

    wants_hashes = False

    def __init__(self, first: int = 0) -> None:
        self._turn = first

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """The least loaded."""
        count = len(workers)
        if count == 1:
            return workers[0]
        self._turn += 1
        best = workers[self._turn % count]
        for offset in range(1, count):
            worker = workers[(self._turn + offset) % count]
            if worker.burden < best.burden:
                best = worker
        return best

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> None:
        """Nothing to remember: the lifecycle counts outstanding tokens."""

    def forget(self, worker: Worker) -> None:
        """Nothing to forget."""


class PrefixIndex:
    """What one worker probably has cached: its latest block hashes, oldest evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are present."""
        blocks = self._blocks
        for count, block in enumerate(hashes):
            if block not in blocks:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Note these blocks as used last; a chain's tail is evicted before its head."""
        blocks = self._blocks
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def __len__(self) -> int:
        return len(self._blocks)


class PrefixAware:
    """The least cost: tokens not cached there, plus load; prompts under a block go by load alone.

    Load is what the worker has outstanding plus what it was given lately, weighted per role:
    a cached prefix saves prefill its whole work, but decode only a transfer. What was given
    fades with the number of placements, not with time: it balances what the caches must hold,
    which matters at every rate.
    """

    wants_hashes = True

    def __init__(self, config: PolicyConfig, first: int = 0) -> None:
        self._config = config
        self._weights = {"prefill": config.prefill_load, "decode": config.decode_load}
        self._indexes: dict[int, PrefixIndex] = {}
        self._by_load = LeastLoaded(first)
        self._turn = first
        self._placements = {"prefill": 0, "decode": 0}

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """The cheapest; equals take turns."""
        count = len(workers)
        if count == 1:
            return workers[0]
        if not hashes:
            return self._by_load.choose(workers, hashes)
        self._turn += 1
        weight = self._weights[workers[0].role]
        best, best_cost = workers[0], float("inf")
        for offset in range(count):
            worker = workers[(self._turn + offset) % count]
            cost = weight * (worker.burden + self._recent(worker))
            cost -= self.cached(worker, hashes) * self._config.block_tokens
            if cost < best_cost:
                best, best_cost = worker, cost
        return best

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> None:
        """Count the work and remember the blocks."""
        if not hashes:
            return
        new = tokens - self.cached(worker, hashes) * self._config.block_tokens
        worker.recent = self._recent(worker) + max(0, new)
        self._placements[worker.role] += 1
        worker.recent_at = self._placements[worker.role]
        index = self._indexes.get(worker.incarnation)
        if index is None:
            index = self._indexes[worker.incarnation] = PrefixIndex(self._capacity(worker))
        index.add(hashes)

    def forget(self, worker: Worker) -> None:
        """Its cache is lost."""
        self._indexes.pop(worker.incarnation, None)

    def cached(self, worker: Worker, hashes: Sequence[bytes]) -> int:
        """Leading blocks the worker probably has."""
        index = self._indexes.get(worker.incarnation)
        return index.match(hashes) if index else 0

    def _recent(self, worker: Worker) -> float:
        """Tokens it was given to compute, faded by the placements since."""
        if not worker.recent:
            return 0.0
        age = self._placements[worker.role] - worker.recent_at
        return worker.recent * math.exp2(-age / self._config.half_life)

    def _capacity(self, worker: Worker) -> int:
        """Router blocks that fit into the worker's pool, at most what is configured."""
        tokens = worker.load.kv_blocks_total * worker.card.layout.block_size
        fits = tokens // self._config.block_tokens if tokens else self._config.index_blocks
        return max(1, min(fits, self._config.index_blocks))


def make_policy(config: PolicyConfig, router: str = "") -> Policy:
    """The policy of this name; routers with different numbers in their names begin apart."""
    number = router.rpartition("-")[2]
    first = int(number) if number.isdecimal() and number.isascii() else 0
    if config.name == "round_robin":
        return RoundRobin(first)
    if config.name == "least_loaded":
        return LeastLoaded(first)
    if config.name == "prefix_aware":
        return PrefixAware(config, first)
    raise ConfigError(f"unknown policy {config.name!r}")
