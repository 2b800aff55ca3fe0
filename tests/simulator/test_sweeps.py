"""No single fault in the small run does harm: each message, each event, each node."""

from __future__ import annotations

import pytest

from baton.simulator import sweeps

MESSAGES, EVENTS = sweeps.measure()


def play(runs):
    return sum(run.play()["requests"] > 0 for run in runs)


def test_the_small_run_holds_what_matters():
    run = sweeps.Run(sweeps.SEED, sweeps.SMALL)
    figures = run.play()
    handoffs = run.cluster.routers[0].core.handoffs
    assert figures["ended cancelled"]
    assert handoffs.count >= 4
    assert handoffs.bytes_sent > 2000
    assert any(record.deadline for record in run.cluster.clients[0].history)


def test_any_single_message_may_be_lost():
    assert play(sweeps.messages("drop", range(1, MESSAGES + 1, 3)))


@pytest.mark.parametrize("kind", ["duplicate", "delay"])
def test_any_single_message_may_come_twice_or_late(kind):
    assert play(sweeps.messages(kind, range(1, MESSAGES + 1, 7)))


def test_any_node_may_die_at_any_moment():
    assert play(sweeps.crashes(range(1, EVENTS + 1, 23)))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", sweeps.KINDS)
def test_every_single_message(kind):
    assert play(sweeps.messages(kind, range(1, MESSAGES + 1))) == MESSAGES


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_any_node_may_die_after_every_event():
    assert play(sweeps.crashes(range(1, EVENTS + 1)))
