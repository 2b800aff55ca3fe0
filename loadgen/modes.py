"""What ``baton bench --compare`` compares: configurations of a cluster, from text. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.proto.errors import InputError

COLOCATED, DISAGGREGATED, ADAPTIVE = "colocated", "disaggregated", "adaptive"
MOST = 16
"""Configurations of one comparison at most."""
MAX_WORKERS = 64
"""Workers of one configuration at most: all run on this machine."""
_NAME = re.compile(r"[\w.:+-]{1,24}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_SCHEMES = ("ipc://", "tcp://")
FORMS = "colocated:N, PREFILL:DECODE, adaptive:PREFILL:DECODE, NAME=one of these or NAME=ADDRESS"


@dataclass(slots=True, frozen=True)
class Configuration:
    """A cluster to start, or one that runs at ``address``.

    ``prefill`` is 0 in mode colocated, whose workers are decode workers.
    """

    name: str
    mode: str = ""
    prefill: int = 0
    decode: int = 0
    address: str = ""

    @property
    def workers(self) -> int:
        """Return the number of worker processes to start."""
        return self.prefill + self.decode

    def settings(self) -> dict[str, Any]:
        """Return the settings of ``baton serve`` for it."""
        if self.mode == COLOCATED:
            return {"mode": self.mode, "workers": self.decode}
        return {"mode": self.mode, "prefill": self.prefill, "decode": self.decode}


def parse_configurations(text: str) -> list[Configuration]:
    """Read ``colocated:4,1:3,adaptive:2:2,other=tcp://HOST:PORT``. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not 2 <= len(parts) <= MOST:
        raise InputError(f"a comparison has 2 to {MOST} configurations, not {len(parts)}")
    found = [parse_configuration(part) for part in parts]
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{twice!r} is there twice; name one of them, as in again={twice}")
    return found


def parse_configuration(text: str) -> Configuration:
    """Read one of them. Raises InputError."""
    name, given, rest = text.partition("=")
    if not given:
        name, rest = text, text
    if not rest or _NAME.fullmatch(name) is None:
        raise InputError(f"{text[:60]!r} is not a configuration: {FORMS}")
    if rest.startswith(_SCHEMES):
        return Configuration(name, address=rest)
    mode, *counts = rest.split(":")
    if mode not in (COLOCATED, DISAGGREGATED, ADAPTIVE):
        mode, counts = DISAGGREGATED, [mode, *counts]
    if len(counts) != (1 if mode == COLOCATED else 2):
        raise InputError(f"{text[:60]!r} is not a configuration: {FORMS}")
    numbers = [_count(one, text) for one in counts]
    if sum(numbers) > MAX_WORKERS:
        raise InputError(f"{text[:60]!r} has {sum(numbers)} workers; the limit is {MAX_WORKERS}")
    return Configuration(name, mode, prefill=sum(numbers[:-1]), decode=numbers[-1])


def _count(word: str, text: str) -> int:
    if _NUMBER.fullmatch(word) is None:
        raise InputError(f"{text[:60]!r} is not a configuration: {FORMS}")
    if int(word) < 1:
        raise InputError(f"{text[:60]!r}: each number of workers must be at least 1")
    return int(word)


def warnings(configurations: Sequence[Configuration], processors: int) -> list[str]:
    """Return sentences about what makes a comparison unfair or pointless."""
    own = [one for one in configurations if not one.address]
    many = [f"{one.name} has {one.workers}" for one in own if one.workers > processors]
    found = []
    if many:
        found.append(
            f"{', '.join(many)} workers, and Baton may use {processors} processors: "
            "workers will wait for each other"
        )
    if len({one.workers for one in own}) > 1:
        found.append("the configurations have different numbers of workers, so not equal resources")
    return found
