"""Sends calibration requests to a small cluster on this machine, and records their times.

The cluster has one prefill worker and one decode worker with the settings of the planned workers.
Calibration requests do not belong to the load that is forecast.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import chain, cycle
from typing import Any

import numpy as np
import uvloop

from baton.client import AsyncClient
from baton.client.environment import find_cluster
from baton.engine.loading.loader import threads_of
from baton.engine.loading.runner_config import RunnerConfig
from baton.loadgen.plan import FIRST_ID, Job
from baton.loadgen.run import NativeTarget, Runner
from baton.loadgen.statistics import OK, Record
from baton.offline.cluster import OwnCluster
from baton.proto.errors import RequestFailed

from .calibration import NOTHING, Calibration, alone_seen, beside_seen, together_seen

START_S = 600.0
BUDGET_S = 5.0
"""Seconds after which no further round begins."""
ROUNDS = 6
PAUSE_S = 0.05
PROMPTS = (16, 64, 256)
ANSWER = 24
STREAMS = (2, 4)
BESIDE = 64
"""Tokens of a stream beside prompts."""
_OWN = ("workers", "prefill", "decode", "mode", "threads", "prefill_threads", "decode_threads")
"""Settings that the small cluster replaces."""


def calibrate(settings: Mapping[str, Any], runner: RunnerConfig) -> Calibration:
    """Start a cluster for the settings of ``baton serve``, measure it and end it.

    ``runner``: engine settings of the planned workers, whose number of threads the cluster uses.
    Raises the error of a cluster that does not start, and RequestFailed for a failed request.
    """
    kept = {name: value for name, value in settings.items() if name not in _OWN}
    small: dict[str, Any] = {"mode": "disaggregated", "prefill": 1, "decode": 1}
    if runner.backend != "cuda":
        small["threads"] = threads_of(runner).count
    cluster = OwnCluster({**kept, **small}, log=None, timeout=START_S)
    try:
        return uvloop.run(_observed(cluster.address))
    finally:
        cluster.close()


async def _observed(address: str) -> Calibration:
    addresses, keys = find_cluster(address, None)
    client = AsyncClient(addresses, keys=keys)
    target = NativeTarget(client, ignore_eos=True, temperature=0.0)
    try:
        card = (await client.model()).card
        return await Probes(Runner(target), card.vocab_size, card.max_length).observe()
    finally:
        await target.close()


class Probes:
    """The calibration requests of one cluster."""

    def __init__(self, runner: Runner, vocabulary: int, longest: int) -> None:
        self._runner = runner
        self._rng = np.random.default_rng(1)
        self._vocabulary = vocabulary
        self._longest = longest
        self._lengths = [min(length, longest // 4) for length in PROMPTS]

    async def observe(self) -> Calibration:
        """Return the sums of several rounds. A first round warms the cluster and is not counted."""
        await self._round()
        began, found = time.perf_counter(), NOTHING
        for _ in range(ROUNDS):
            found += await self._round()
            if time.perf_counter() - began > BUDGET_S:
                break
        return found

    async def _round(self) -> Calibration:
        found = NOTHING
        for length in self._lengths:
            await asyncio.sleep(PAUSE_S)
            (record,) = await self._sent([self._job(length, ANSWER)], 1)
            found += alone_seen(record)
        for count in STREAMS:
            await asyncio.sleep(PAUSE_S)
            jobs = [self._job(self._lengths[0], ANSWER) for _ in range(count)]
            found += together_seen(await self._sent(jobs, count))
        await asyncio.sleep(PAUSE_S)
        return found + await self._beside()

    async def _beside(self) -> Calibration:
        """Send prompts one by one while a stream runs."""
        stream = asyncio.ensure_future(self._sent([self._job(self._lengths[0], BESIDE)], 1))

        def jobs() -> Iterator[Job]:
            for length in chain(self._lengths[:1], cycle(self._lengths)):
                if stream.done():
                    return
                yield self._job(length, 1)

        prompts = await self._sent(jobs(), 1)
        return beside_seen((await stream)[0], prompts)

    async def _sent(self, jobs: Any, concurrency: int) -> list[Record]:
        records = await self._runner.closed_loop(jobs, concurrency)
        for record in records:
            if record.outcome != OK:
                raise RequestFailed(f"a calibration request failed: {record.error}")
        return records

    def _job(self, prompt: int, output: int) -> Job:
        low = min(FIRST_ID, self._vocabulary - 1)
        tokens = self._rng.integers(low, self._vocabulary, prompt).astype(np.int32)
        return Job(None, tokens, min(output, self._longest - prompt))
