"""What a run sends and when: arrival times, prompts, answer lengths, cancellations. Pure.

Invariant: in an open loop every arrival time is fixed before the run starts, so a slow server
does not slow the arrivals down, and waiting for it counts as latency.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InputError

from .traces import BLOCK_TOKENS, Arrival

FIRST_ID = 10
"""Lowest token id of prompts: the lowest ids are often special tokens."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
MAX_LENGTH = 1 << 22


@dataclass(slots=True, frozen=True)
class Job:
    """One request.

    ``at``: seconds from the run's start, None in a closed loop. ``prompt``: token ids, int32
    ``[n]``. ``output``: tokens of the answer. ``cancel_after``: seconds after sending, or None.
    ``texts``: of a request for embeddings, whose prompt is as many equal parts; 0: it generates.
    """

    at: float | None
    prompt: npt.NDArray[np.int32]
    output: int
    cancel_after: float | None = None
    texts: int = 0


@dataclass(slots=True, frozen=True)
class Lengths:
    """A length in tokens: the same for all requests, or uniform between two bounds."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``128`` or ``64-256``. Raises InputError."""
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise InputError(f"{text!r} is not a length such as 128 or 64-256")
        least = int(found[1])
        most = int(found[2] or least)
        if not 1 <= least <= most <= MAX_LENGTH:
            raise InputError(f"{text!r}: lengths are 1 to {MAX_LENGTH} tokens, smaller first")
        return cls(least, most)

    def draw(self, rng: random.Random) -> int:
        """Return a length."""
        return rng.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(slots=True, frozen=True)
class Shape:
    """What requests look like.

    ``cancel_share``: share of the requests that are cancelled ``cancel_delay`` seconds after they
    were sent. ``vocabulary``: token ids are below. ``longest``: prompt and answer together have at
    most this many tokens (0: unlimited). ``texts``: of each request for embeddings, where
    ``prompt`` is the length of a text and ``output`` is unused; 0: requests generate.
    """

    prompt: Lengths
    output: Lengths
    cancel_share: float = 0.0
    cancel_delay: float = 0.0
    vocabulary: int = 1000
    longest: int = 0
    texts: int = 0


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return ``count`` arrival times in seconds of a Poisson process with ``rate`` per second."""
    rng, at, times = random.Random(seed), 0.0, []  # noqa: S311 -- a workload, no secret
    for _ in range(count):
        at += rng.expovariate(rate)
        times.append(at)
    return times


def constant(rate: float, count: int) -> list[float]:
    """Return ``count`` arrival times in seconds, ``1 / rate`` apart."""
    return [number / rate for number in range(count)]


def random_jobs(
    shape: Shape, times: Iterable[float | None], seed: int, *, series: int = 0
) -> Iterator[Job]:
    """Yield a job per arrival time, with prompts that share no prefix.

    Jobs of another ``series`` have other tokens and the same lengths.
    """
    rng = random.Random(seed)  # noqa: S311
    ids = np.random.default_rng((seed, series))
    for at in times:
        prompt, output = shape.prompt.draw(rng), shape.output.draw(rng)
        if shape.texts:
            prompt = shape.texts * min(prompt, shape.longest or prompt)
        else:
            prompt, output = fitting(prompt, output, shape.longest)
        tokens = ids.integers(*_ids(shape.vocabulary), prompt).astype(np.int32)
        yield Job(at, tokens, output, _cancel(shape, rng), shape.texts)


def trace_jobs(
    arrivals: Sequence[Arrival],
    shape: Shape,
    seed: int,
    *,
    speed: float = 1.0,
    scale: float = 1.0,
    series: int = 0,
) -> Iterator[Job]:
    """Yield the jobs of a trace. ``speed``: divides the times; ``scale``: multiplies the lengths.

    Equal block names of the trace become equal tokens, so the prompts share the trace's prefixes.
    Jobs of another ``series`` have other tokens.
    """
    rng = random.Random(seed)  # noqa: S311
    start = arrivals[0].at if arrivals else 0.0
    size = max(1, round(BLOCK_TOKENS * scale))
    for number, arrival in enumerate(arrivals):
        wanted = max(1, round(arrival.prompt * scale)), max(1, round(arrival.output * scale))
        prompt, output = fitting(*wanted, shape.longest)
        named = arrival.blocks[: prompt // size]
        seeds = [int.from_bytes(name, "little") for name in named]
        parts = [_block((seed, series, 0, one), size, shape.vocabulary) for one in seeds]
        left = prompt - size * len(parts)
        parts.append(_block((seed, series, 1, number), left, shape.vocabulary))
        at = (arrival.at - start) / speed
        yield Job(at, np.concatenate(parts), output, _cancel(shape, rng), shape.texts)


def fitting(prompt: int, output: int, longest: int) -> tuple[int, int]:
    """Shorten a prompt, then an answer, until both fit into ``longest`` tokens together."""
    if not longest or prompt + output <= longest:
        return prompt, output
    output = min(output, max(1, longest - 1))
    return max(1, min(prompt, longest - output)), output


def _block(seed: tuple[int, ...], size: int, vocabulary: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(*_ids(vocabulary), size).astype(np.int32)


def _ids(vocabulary: int) -> tuple[int, int]:
    return min(FIRST_ID, vocabulary - 1), vocabulary


def _cancel(shape: Shape, rng: random.Random) -> float | None:
    return shape.cancel_delay if rng.random() < shape.cancel_share else None
