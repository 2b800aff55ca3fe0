"""Certificates of death in the supervisor: repeated until acknowledged, for some time."""

from baton.deploy.supervise.certificates import GIVE_UP_S, REPEAT_S, Certificates
from baton.proto.wire.messages import DeathCertificate

ONE = DeathCertificate(worker="decode-0", secret=b"1", status=-9)
TWO = DeathCertificate(worker="decode-1", secret=b"2", status=1)


def test_it_is_sent_at_once_and_repeated_until_each_router_has_it():
    core = Certificates()
    core.died(["a", "b"], ONE, 1.0)
    assert core.due(1.0) == {"a": [ONE], "b": [ONE]}
    assert core.due(1.1) == {}
    core.acknowledged("a", b"1")
    assert core.due(1.0 + REPEAT_S) == {"b": [ONE]}
    core.acknowledged("b", b"another")
    assert core.routers == {"b"}
    core.acknowledged("b", b"1")
    core.acknowledged("b", b"1")
    assert core.routers == set()
    assert core.due(9.0) == {}


def test_certificates_of_workers_that_died_together_travel_together():
    core = Certificates()
    core.died(["a"], ONE, 1.0)
    core.died(["a"], TWO, 1.0)
    assert core.due(1.0) == {"a": [ONE, TWO]}
    core.acknowledged("a", b"1")
    assert core.due(2.0) == {"a": [TWO]}


def test_a_new_connection_gets_it_at_once():
    core = Certificates()
    core.died(["a"], ONE, 1.0)
    core.due(1.0)
    core.connected("a")
    assert core.due(1.01) == {"a": [ONE]}
    core.connected("unknown")
    assert core.due(1.02) == {}


def test_a_router_that_never_answers_is_given_up():
    core = Certificates()
    core.died(["a"], ONE, 0.0)
    sent, now = 0, 0.0
    while core.routers:
        sent += bool(core.due(now))
        now += 0.05
        assert now < GIVE_UP_S + 1
    assert GIVE_UP_S / REPEAT_S / 2 < sent <= GIVE_UP_S / REPEAT_S
