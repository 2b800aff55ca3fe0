"""The router's benchmark counts the time of requests alone."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.benchmarks import router
from baton.benchmarks.synthetic import child, router_in


def test_the_start_of_the_router_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a router takes seconds to start; here it starts after the warm-up."""
    config, arguments = router_in(tmp_path)
    ended = 0
    readings: list[int] = []
    pump = router.pump_requests

    def count(cluster: router.Cluster, next_submit: router.NextSubmit) -> int:
        nonlocal ended
        done = pump(cluster, next_submit)
        ended += done
        return done

    def read(_pid: int) -> float:
        readings.append(ended)
        return float(len(readings))

    monkeypatch.setattr(router, "pump_requests", count)
    monkeypatch.setattr(router, "cpu_seconds", read)
    with ExitStack() as stack:
        late = threading.Timer(0.7, lambda: stack.enter_context(child(arguments)))
        late.start()
        cluster = router.Cluster(config.client_address, config.worker_address)
        stack.callback(cluster.close)
        rate = router.measure_requests(cluster, 0, 0.1, least=1)
        late.join()
    assert readings[0] > 0
    assert rate == readings[1] - readings[0]
