"""Calibration requests that reach a server."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.forecast import observe
from baton.loadgen.run import Runner


class Answers:
    """A server that answers token by token, and keeps the lengths of prompts and answers."""

    def __init__(self):
        self.asked = set()

    async def send(self, job, record):
        self.asked.add((len(job.prompt), job.output))
        for _ in range(job.output):
            await asyncio.sleep(0.001)
            record.stamp(time.perf_counter(), 1)

    async def close(self):
        """Nothing to end."""


@pytest.mark.parametrize("longest", [64, 4096])
def test_requests_fit_the_models_context(longest, monkeypatch):
    monkeypatch.setattr(observe, "BUDGET_S", 0.0)  # one round
    server = Answers()
    seen = asyncio.run(observe.Probes(Runner(server), 100, longest).observe())
    assert max(prompt + output for prompt, output in server.asked) <= longest
    assert seen.prompts and seen.handoffs
    assert {one.rows for one in seen.streams} == {1, *observe.STREAMS}
    assert any(one.others for one in seen.prompts) and any(one.others for one in seen.streams)
