"""What a cluster serves when its workers state different models or limits: one vote for each key.

Each key has one vote, however many workers it has. In a tie, the keys decide whose workers the key
list names literally; otherwise a tie changes nothing. So one foreign key never decides against two
others, nor against one whose statement came first.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton.proto.layout import ModelCard

CLAIM_S = 10.0
"""Seconds for which the Hello of a refused worker counts; the worker repeats it sooner."""


class Voter(Protocol):
    """What counts of a worker: its key states a card, and perhaps the key list names it."""

    role: str
    card: ModelCard
    vouched: bool

    @property
    def key(self) -> bytes:
        """CURVE key, empty without keys."""
        ...


class Claims:
    """The last refused card of each key. The key list limits the number of keys."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, tuple[ModelCard, bool, float]] = {}

    def add(self, card: ModelCard, key: bytes, now: float, *, vouched: bool) -> None:
        """Store the card of a refused worker, and drop old ones."""
        self._by_key = {k: c for k, c in self._by_key.items() if now < c[2] + CLAIM_S}
        self._by_key[key] = card, vouched, now

    def voters(self, card: ModelCard) -> dict[bytes, bool]:
        """Return the keys that claim this model; True if the list names the worker literally."""
        return {
            key: vouched
            for key, (claimed, vouched, _) in self._by_key.items()
            if claimed.mismatch(card) is None
        }


def votes(voters: Mapping[bytes, bool]) -> tuple[int, int]:
    """Return what a model's keys weigh: all of them, then the vouched ones."""
    return len(voters), sum(voters.values())


def keys_of(workers: Iterable[Voter]) -> dict[bytes, bool]:
    """Return the keys of workers; True if the key list names one of its workers literally."""
    found: dict[bytes, bool] = {}
    for worker in workers:
        found[worker.key] = found.get(worker.key, False) or worker.vouched
    return found


def joint_card(workers: Sequence[Voter], present: ModelCard | None) -> ModelCard | None:
    """Return the card of the cluster; ``present``: the card until now.

    Its limits are the lower ones of both roles, each as voted by the keys of the role: with one key
    the limit of the smallest worker. It has the features of all workers.
    """
    if not workers:
        return present
    base = _plain(_common(workers, present))
    length, side = (0, 0) if present is None else (present.max_length, present.max_pixels)
    roles = {role: [w for w in workers if w.role == role] for role in {w.role for w in workers}}
    limits = [_voted(there, [w.card.max_length for w in there], length) for there in roles.values()]
    drawing = [[w for w in there if w.card.max_pixels] for there in roles.values()]
    pixels = [_voted(there, [w.card.max_pixels for w in there], side) for there in drawing if there]
    features = dict.fromkeys(feature for w in workers for feature in w.card.features)
    return msgspec.structs.replace(
        base, max_length=min(limits), max_pixels=min(pixels, default=0), features=list(features)
    )


def _common(workers: Sequence[Voter], present: ModelCard | None) -> ModelCard:
    """Return the card that most keys state, apart from limits and features."""
    by_card: dict[bytes, list[Voter]] = {}
    for worker in workers:
        by_card.setdefault(_encoded(worker.card), []).append(worker)
    before = None if present is None else _encoded(present)
    best = max(by_card, key=lambda card: (*votes(keys_of(by_card[card])), card == before))
    return by_card[best][0].card


def _voted(workers: Sequence[Voter], limits: Sequence[int], present: int) -> int:
    """Return the median over keys of each key's smallest limit.

    Between the two middle ones, the smallest limit of a vouched worker decides, else ``present``.
    """
    smallest: dict[bytes, int] = {}
    for worker, limit in zip(workers, limits, strict=True):
        smallest[worker.key] = min(limit, smallest.get(worker.key, limit))
    ordered = sorted(smallest.values())
    lower, upper = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    vouched = [limit for w, limit in zip(workers, limits, strict=True) if w.vouched]
    return min(max(min(vouched, default=present), lower), upper)


def _plain(card: ModelCard) -> ModelCard:
    return msgspec.structs.replace(card, max_length=1, max_pixels=0, features=[])


def _encoded(card: ModelCard) -> bytes:
    return msgspec.msgpack.encode(_plain(card))
