"""One long stream whose router dies, stops or is cut off: another takes it over as it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from baton.simulator.cluster import Cluster
from baton.simulator.records import Record
from baton.simulator.run import Run
from baton.simulator.scenarios import Scenario
from baton.simulator.shape import Shape, Sizes
from baton.simulator.violation import Violation

SHAPE = Shape(
    prefill=1, decode=1, routers=2, clients=1, restart_s=9.0, sizes=Sizes(decode_blocks=600)
)
ANSWER = 1601  # odd: the client asks for a stream, not for the whole answer
PROMPT = [99]
"""The model's answer to it ends no earlier."""


def play(*plan):
    """``plan``: (when, what to do with the cluster); returns the cluster and the stream."""
    run = Run(1, Scenario(requests=0, load_s=4.0, shape=SHAPE))
    cluster, record = run.cluster, Record("long", PROMPT, ANSWER)
    cluster.network.at(0.1, partial(cluster.clients[0].submit, record))
    for when, act in plan:
        cluster.network.at(when, partial(act, cluster))
    run.play()
    assert len(record.tokens) == ANSWER
    return cluster, record


def computed_once(cluster):
    return cluster.stats["moves"] and cluster.prefills[0].core.load().prompt_tokens == len(PROMPT)


def crash(cluster):
    cluster.routers[0].crash()


def stop(cluster):
    cluster.routers[0].stop()


def go_on(cluster):
    cluster.routers[0].resume()


def links(cluster):
    router, client = cluster.routers[0].name, cluster.clients[0].name
    return {(router, client), (client, router)}


def cut(cluster):
    cluster.network.blocked.update(links(cluster))


def join(cluster):
    cluster.network.blocked.difference_update(links(cluster))


def test_a_router_that_died_is_replaced_at_once():
    cluster, record = play((1.0, crash))
    assert record.longest_wait < 0.1
    assert computed_once(cluster)


def test_a_router_that_is_stopped_is_replaced_by_its_silence():
    cluster, record = play((1.0, stop), (3.0, go_on))
    assert 1.4 < record.longest_wait < 2.0
    assert computed_once(cluster)


def test_a_client_that_was_cut_off_goes_on_elsewhere():
    """The old router lives and may free the request before the other one has asked for it."""
    _cluster, record = play((1.0, cut), (3.0, join))
    assert record.longest_wait < 2.0


def test_nothing_is_kept_for_a_router_and_a_client_that_never_come_back():
    cluster = Cluster(1, replace(SHAPE, restart_s=1e6))
    network, decode = cluster.network, cluster.decodes[0]
    network.at(0.1, partial(cluster.clients[0].submit, Record("long", PROMPT, ANSWER)))
    network.at(1.0, cluster.clients[0].crash)
    network.at(1.0, cluster.routers[0].crash)

    def run(until):
        while network.now < until:
            network.step()

    run(30.0)
    assert decode.core.idle
    assert decode.member.unacknowledged, "its end is kept for who may come back"
    run(65.0)
    assert not decode.member.unacknowledged


def test_a_stopped_routers_late_abort_would_harm(monkeypatch):
    """As the test above shows that it does not."""
    monkeypatch.setattr("baton.worker.base_core.other_owner", lambda held, router: None)
    with pytest.raises((AssertionError, Violation)):
        cluster, record = play((1.0, stop), (3.0, go_on))
        assert record.longest_wait < 2.0
        assert computed_once(cluster)
