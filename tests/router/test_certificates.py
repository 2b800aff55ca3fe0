"""Certificates of death: workers that are dead by the word of their supervisor."""

import pytest

from baton.proto.wire.messages import (
    Aborted,
    Assign,
    CertificateReceived,
    DeathCertificate,
    Heartbeat,
    PeerDead,
    Rejected,
)
from baton.proto.wire.proofs import seal_of
from baton.router.events import FromWorker

from .test_liveness import silence, states

SUPERVISOR = b"supervisor-1"


def secret(worker):
    return f"secret of {worker.id} {worker.hello.pid}".encode()


def sealed(bench, role, number=0, pid=9, **fields):
    seal = seal_of(f"secret of {role}-{number} {pid}".encode())
    return bench.join(role, number, pid=pid, seal=seal, **fields)


def certify(bench, *workers, status=-9):
    """Send certificates of these workers in one envelope; return the answers."""
    found = [
        DeathCertificate(worker=worker.id, secret=secret(worker), status=status)
        for worker in workers
    ]
    bench.feed(FromWorker(SUPERVISOR, found))
    bench.workers = [worker for worker in bench.workers if worker not in workers]
    answers = bench.take(SUPERVISOR, CertificateReceived)
    assert {answer.secret for answer in answers} == {secret(worker) for worker in workers}


@pytest.fixture
def trio(bench):
    """A prefill worker, two decode workers, and a stream on the first of these."""
    prefill = sealed(bench, "prefill")
    decodes = [sealed(bench, "decode", number) for number in range(2)]
    key, assign = bench.run()
    prefill.report(assign)
    decode = bench.decode_of(assign)
    decode.tokens(key, 10, 5)
    decodes.remove(decode)
    return prefill, decode, decodes[0], bench.core.table.requests[key]


def counted(bench):
    return bench.core.dropped["unknown_certificate"]


@pytest.mark.parametrize("silent", [0.0, 0.8, 1.5, 3.0])
def test_streams_of_a_certified_worker_move_at_once_however_long_it_was_silent(bench, trio, silent):
    prefill, decode, other, request = trio
    silence(bench, silent, prefill, other)
    assert not bench.take(prefill, Assign)
    certify(bench, decode)
    assert bench.one(prefill, Assign).decode == other.endpoint
    assert (request.deaths, request.losses, request.blame) == (1, 1, 1.0)
    dead = next(w for w in bench.core.registry.listed() if w.id == decode.id)
    assert (dead.state.value, dead.reason) == ("dead", "its process was killed by signal 9")
    assert bench.take(other, PeerDead)[0].incarnation == decode.hello.incarnation
    assert counted(bench) == 0


@pytest.mark.parametrize("order", ["certificate first", "connection first"])
def test_one_death_counts_once_in_both_orders(bench, trio, order):
    prefill, decode, other, request = trio
    if order == "connection first":
        decode.gone()
        assert bench.one(prefill, Assign).decode == other.endpoint
        assert (request.deaths, len(request.doubts)) == (0, 1)
        certify(bench, decode)
    else:
        certify(bench, decode)
        assert bench.one(prefill, Assign).decode == other.endpoint
        decode.gone()
    bench.advance(8.0)
    assert (request.deaths, request.doubts, request.losses) == (1, frozenset(), 1)


def test_a_repeated_certificate_has_no_effect(bench, trio):
    _prefill, decode, _other, request = trio
    certify(bench, decode)
    certify(bench, decode)
    certify(bench, decode)
    assert (request.deaths, request.losses, counted(bench)) == (1, 1, 2)


def test_a_certificate_of_an_earlier_process_does_not_touch_its_successor(bench, trio):
    _prefill, decode, _other, request = trio
    decode.gone()
    new = sealed(bench, "decode", int(decode.id[-1]), pid=10)
    deaths = request.deaths
    certify(bench, decode)
    assert states(bench)[new.id] == "ready"
    assert (request.deaths, counted(bench)) == (deaths, 1)


def test_a_certificate_counts_for_every_incarnation_of_its_process(bench, trio):
    """A worker that was declared dead registers again in the same process."""
    prefill, decode, other, _request = trio
    silence(bench, 5.5, prefill, other)
    assert states(bench)[decode.id] == "dead"
    again = sealed(bench, "decode", int(decode.id[-1]))
    assert states(bench)[again.id] == "ready"
    certify(bench, again)
    assert states(bench)[again.id] == "dead"


def test_nobody_without_the_secret_can_certify(bench, trio):
    """A worker, and whoever has read the seal."""
    prefill, decode, _other, _request = trio
    for guess in (b"", decode.hello.seal, seal_of(decode.hello.seal), b"x" * 32):
        certificate = DeathCertificate(worker=decode.id, secret=guess, status=-9)
        bench.feed(FromWorker(b"rogue", [certificate]))
    bench.feed(FromWorker(prefill.identity, [certificate]))
    assert set(states(bench).values()) == {"ready"}
    assert counted(bench) == 5


def test_a_worker_without_a_supervisor_has_no_certificate(bench):
    bench.pair()
    bench.feed(FromWorker(SUPERVISOR, [DeathCertificate(worker="decode-0", secret=b"", status=1)]))
    assert set(states(bench).values()) == {"ready"}


def test_workers_certified_together_do_not_get_each_others_requests(bench):
    prefill = sealed(bench, "prefill")
    decodes = [sealed(bench, "decode", number) for number in range(3)]
    for number in range(9):
        key = bench.submit(f"r{number}")
        assign = bench.one(prefill, Assign)
        prefill.accept(assign)
        prefill.report(assign)
        bench.decode_of(assign).tokens(key, 10, 5)
    certify(bench, *decodes[:2])
    assert {m.decode for m in bench.take(prefill, Assign)} == {decodes[2].endpoint}
    assert {r.losses for r in bench.core.table.requests.values()} == {0, 1}


def test_messages_of_a_certified_worker_that_come_later_change_nothing(bench, trio):
    prefill, decode, other, request = trio
    certify(bench, decode)
    assign = bench.one(prefill, Assign)
    decode.tokens(request.key, 11, 6)
    decode.say(Aborted(request=request.key, attempt=9))
    decode.say(Heartbeat(incarnation=decode.hello.incarnation, progress=1))
    assert {m.code for m in bench.take(decode, Rejected)} == {"endpoint_unknown"}
    decode.say(decode.hello)
    assert bench.one(decode, Rejected).code == "endpoint_dead"
    prefill.accept(assign)
    prefill.report(assign)
    other.tokens(request.key, 11, 6, attempt=2)
    assert bench.streamed(request.key) == [(10, 5), (11, 6)]


def test_the_certified_end_of_a_drained_worker_is_no_death(bench, trio):
    _prefill, _decode, other, _request = trio
    bench.core.registry.drain(bench.core.registry.find(other.id))
    certify(bench, other, status=0)
    dead = next(w for w in bench.core.registry.listed() if w.id == other.id)
    assert dead.reason == "drained"


def test_a_request_that_kills_two_workers_is_poisoned_without_waiting_for_timeouts(bench, trio):
    prefill, decode, other, request = trio
    decode.gone()
    certify(bench, decode)
    assign = bench.one(prefill, Assign)
    prefill.accept(assign)
    prefill.report(assign)
    certify(bench, other)
    assert request.terminal is not None
    assert request.terminal.code == "poisoned"
