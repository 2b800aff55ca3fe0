"""Many streams at once against a running cluster, and their results."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from baton.client import AsyncClient
from baton.proto.errors import BatonError
from baton.proto.sampling import SamplingParams

from .conftest import Cluster
from .driver import lost_requests

STREAMS_TIMEOUT = 100.0
_salts = itertools.count()


@dataclass(frozen=True)
class Job:
    """One request: prompt token ids and how to go on from them."""

    prompt: tuple[int, ...]
    params: SamplingParams
    images: tuple = ()


def jobs(count: int, *, prompt: int, new: int, seed: int = 0) -> list[Job]:
    """``count`` different requests of about ``prompt`` tokens, every other one sampled."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        length = rng.randint(prompt // 2, prompt)
        params = SamplingParams(
            max_new_tokens=new,
            ignore_eos=True,
            temperature=0.8 if index % 2 else 0.0,
            top_p=0.9,
            seed=1000 + index,
        )
        made.append(Job(tuple(rng.randrange(20, 900) for _ in range(length)), params))
    return made


@dataclass
class Stream:
    """What came of one job so far; times are seconds of the monotonic clock."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each output with tokens
    started: float = 0.0
    ended: float = 0.0
    error: BatonError | None = None
    prefill: str = ""
    decode: str = ""

    @property
    def longest_gap(self) -> float:
        """Longest wait between two outputs."""
        pairs = itertools.pairwise([*self.times, self.ended])
        return max((b - a for a, b in pairs), default=0.0)


Disturbance = Callable[[list[Stream]], Coroutine[object, object, None]]


async def follow(client: AsyncClient, job: Job, stream: Stream, salt: str) -> None:
    """Run one job to its end."""
    stream.started = time.monotonic()
    try:
        images = list(job.images)
        async for output in client.generate(job.prompt, job.params, cache_salt=salt, images=images):
            if output.tokens:
                stream.tokens += output.tokens
                stream.times.append(time.monotonic())
            stream.prefill, stream.decode = output.prefill, output.decode
    except BatonError as error:
        stream.error = error
    stream.ended = time.monotonic()


def new_salt() -> str:
    """An unused cache salt: nothing of earlier runs is found in the prefix caches."""
    return f"run-{next(_salts)}"


def run(address: str, work: Sequence[Job], disturb: Disturbance | None = None) -> list[Stream]:
    """All jobs at once over one connection; ``disturb`` sees the streams while they run."""

    async def body() -> list[Stream]:
        streams = [Stream() for _ in work]
        salt = new_salt()
        async with (
            asyncio.timeout(STREAMS_TIMEOUT),
            AsyncClient(address) as client,
            asyncio.TaskGroup() as group,
        ):
            for job, stream in zip(work, streams, strict=True):
                group.create_task(follow(client, job, stream, salt))
            if disturb is not None:
                group.create_task(disturb(streams))
        return streams

    return asyncio.run(body())


async def begun(streams: list[Stream], count: int, tokens: int = 1) -> None:
    """Wait until ``count`` streams have at least so many tokens."""
    while sum(len(stream.tokens) >= tokens for stream in streams) < count:
        await asyncio.sleep(0.002)


def tokens(streams: Sequence[Stream]) -> list[list[int]]:
    """The tokens of all; raises the first error."""
    for stream in streams:
        if stream.error is not None:
            raise stream.error
    return [stream.tokens for stream in streams]


def under_load(
    address: str, work: Sequence[Job], what: Callable[[], object], limit: float = 100.0
) -> list[tuple[int, Stream]]:
    """Run ``what`` while all jobs are in flight, each asked again as soon as it has ended.

    Returns the streams, with their job's number. ``limit``: seconds for all of it.
    """
    done = threading.Event()
    ended: list[tuple[int, Stream]] = []

    async def keep_asking(client: AsyncClient, number: int, salt: str) -> None:
        rounds = 0
        while not done.is_set() or not rounds:
            rounds += 1
            stream = Stream()
            ended.append((number, stream))
            await follow(client, work[number], stream, f"{salt}-{rounds}")

    async def disturb() -> None:
        try:
            while sum(bool(stream.tokens) for _, stream in ended) < len(work) // 2:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(what)
        finally:
            done.set()

    async def body() -> None:
        salt = new_salt()
        async with (
            asyncio.timeout(limit),
            AsyncClient(address) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(len(work)):
                group.create_task(keep_asking(client, number, salt))
            group.create_task(disturb())

    asyncio.run(body())
    return ended


def check(ended: Sequence[tuple[int, Stream]], undisturbed: Sequence[list[int]]) -> None:
    """Every job was asked, and every request ended with the tokens of its job."""
    assert {number for number, _ in ended} == set(range(len(undisturbed)))
    for number, stream in ended:
        assert stream.error is None, stream.error
        assert stream.tokens == undisturbed[number]


def check_a_kill(cluster: Cluster, work: Sequence[Job], expected: list, name: str, after: int):
    """Kill a worker when ``after`` streams have begun; all must give the ``expected`` tokens."""
    before = lost_requests(cluster)

    async def strike(streams: list[Stream]) -> None:
        await begun(streams, after)
        os.kill(cluster.pids()[name], signal.SIGKILL)

    for _ in range(3):  # on a busy machine the blow may come when all is over
        pid = cluster.pids()[name]
        assert tokens(run(cluster.address, work, strike)) == expected
        cluster.wait_replaced(name, pid)
        if lost_requests(cluster) > before:
            return
    raise AssertionError("nothing ran on the lost worker")
