"""Failed pairs: avoided, retried, and listed in the status report."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from baton.proto.wire.messages import Assign, PeerLost, Status, StatusReport
from baton.router.pairs import MAX_PAIRS, FailedPairs


class Cut:
    """Scripted workers with some failed pairs, whose prefill workers answer PeerLost."""

    def __init__(self, bench, *pairs: tuple[int, int]) -> None:
        self.bench = bench
        self.pairs = {(f"prefill-{p}", f"ipc:///run/decode-{d}") for p, d in pairs}
        self.tried: list[tuple[str, str, int]] = []

    def play(self) -> dict[bytes, tuple[str, str]]:
        """Answer every Assign; return the pair that served each request."""
        done = {}
        while given := [
            (worker, assign)
            for worker in self.bench.workers
            for assign in self.bench.take(worker, Assign)
        ]:
            for worker, assign in given:
                worker.accept(assign)
                pair = (worker.id, assign.decode)
                self.tried.append((*pair, assign.attempt))
                if pair not in self.pairs:
                    worker.report(assign)
                    done[assign.request] = pair
                    continue
                where = {"request": assign.request, "attempt": assign.attempt}
                worker.say(PeerLost(endpoint=assign.decode, reason="no answer for 3 s", **where))
        return done

    def failures(self) -> int:
        """Return the number of attempts on failed pairs since the last call."""
        tried, self.tried = self.tried, []
        return sum((prefill, decode) in self.pairs for prefill, decode, _ in tried)


def listed(bench) -> list[dict]:
    bench.client(Status(), b"operator")
    return json.loads(bench.one(b"operator", StatusReport).report)["failed_pairs"]


def test_the_other_pairs_serve_while_one_is_cut(served):
    cut = Cut(served, (0, 1))
    for number in range(40):
        pin = "ipc:///run/prefill-0" if number % 2 else None
        key = served.submit(f"r{number}", target_endpoint=pin)
        assert key in cut.play()
    assert cut.failures() == 1, "only the first request tried the failed pair"


@pytest.mark.parametrize("pinned", ["prefill", "decode"])
def test_a_pinned_request_keeps_its_worker_and_gets_another_partner(served, pinned):
    cut = Cut(served, (0, 1))
    number = 0 if pinned == "prefill" else 1
    for turn in range(8):
        key = served.submit(
            f"r{turn}", target_endpoint=f"ipc:///run/{pinned}-{number}", pin="strict"
        )
        prefill, decode = cut.play()[key]
        assert (prefill if pinned == "prefill" else decode[11:]) == f"{pinned}-{number}"
    assert cut.failures() <= 1


def test_a_cut_pair_is_tried_by_one_request_now_and_then(served):
    cut = Cut(served, (0, 1))
    tries = []
    for number in range(240):
        served.submit(f"r{number}", target_endpoint="ipc:///run/prefill-0")
        assert cut.play(), "decode-0 can always be reached"
        if cut.failures():
            tries.append(served.now)
        served.advance(0.25)
    pauses = [round(later - one) for one, later in pairwise(tries)]
    assert pauses == [2, 4, 8, 16, 16]


def test_a_healed_pair_serves_again(served):
    cut = Cut(served, (0, 1))
    for number in range(8):
        served.submit(f"r{number}", target_endpoint="ipc:///run/prefill-0")
        cut.play()
    (entry,) = listed(served)
    cut.pairs.clear()
    served.advance(entry["next_try_s"] + 0.1)
    key = served.submit("s", target_endpoint="ipc:///run/prefill-0")
    assert cut.play()[key] == ("prefill-0", "ipc:///run/decode-1")
    assert listed(served) == []


def test_several_requests_that_fail_at_once_count_as_one_failure(served):
    cut = Cut(served, (0, 0), (0, 1), (1, 0), (1, 1))
    pairs = served.core.placement.failed_pairs
    for number in range(12):
        served.submit(f"r{number}")
    given = [(w, a) for w in served.workers for a in served.take(w, Assign)]
    for worker, assign in given:
        worker.accept(assign)
    for worker, assign in given:
        where = {"request": assign.request, "attempt": assign.attempt}
        worker.say(PeerLost(endpoint=assign.decode, reason="silent", **where))
    assert all(pair.pause == 2.0 for pair in pairs.listed(served.now))
    assert cut.play() == {}


def test_where_every_pair_is_cut_a_request_is_tried_until_its_deadline(served):
    cut = Cut(served, (0, 0), (0, 1), (1, 0), (1, 1))
    key = served.submit(deadline=20.0)
    for _ in range(220):
        cut.play()
        served.advance(0.1)
    terminal, *_ = served.terminals(key)
    assert terminal.code == "deadline_exceeded"
    assert "cannot reach" in terminal.message
    assert 10 < cut.failures() < 60


def test_where_every_pair_was_cut_the_first_that_heals_serves(served):
    cut = Cut(served, (0, 0), (0, 1), (1, 0), (1, 1))
    key = served.submit()
    for _ in range(100):
        assert not cut.play()
        served.advance(0.1)
    cut.pairs.clear()
    for _ in range(12):
        if key in cut.play():
            return
        served.advance(0.1)
    pytest.fail("the request was not tried within 1.2 s")


def test_a_worker_that_does_not_fit_is_no_failed_pair(bench):
    """An incompatible pair never recovers, so the request fails after the usual attempts."""
    prefill, _ = bench.pair()
    key = bench.submit()
    for _ in range(200):
        for assign in bench.take(prefill, Assign):
            where = {"request": key, "attempt": assign.attempt, "endpoint": assign.decode}
            prefill.say(PeerLost(reason="workers differ in numerics", refused=True, **where))
        bench.advance(0.1)
    terminal, *_ = bench.terminals(key)
    assert terminal.code == "worker_lost" and "differ in numerics" in terminal.message
    assert listed(bench) == []


def test_status_tells_of_failed_pairs_and_forgets_those_of_the_dead(served):
    cut = Cut(served, (0, 1))
    for number in range(8):
        served.submit(f"r{number}", target_endpoint="ipc:///run/prefill-0")
        cut.play()
    served.advance(1.5)
    (entry,) = listed(served)
    assert (entry["prefill"], entry["decode"]) == ("prefill-0", "decode-1")
    assert entry["reason"] == "no answer for 3 s" and entry["failures"] == 1
    assert 1.4 < entry["failing_s"] < 1.7 and 0.3 < entry["next_try_s"] < 0.6
    next(w for w in served.workers if w.id == "decode-1").gone()
    served.advance(10.0)
    assert listed(served) == []


def test_the_table_is_bounded_and_forgets(served):
    registry = served.core.registry
    prefill, decode = registry.find("prefill-0"), registry.find("decode-0")
    pairs = FailedPairs()
    for number in range(MAX_PAIRS + 10):
        prefill.incarnation = number
        pairs.failed(prefill, decode, "silent", 0.0)
    assert len(pairs.known) == MAX_PAIRS
    assert pairs.works(prefill, decode, 1.0, trial=True) is False
    assert pairs.works(prefill, decode, 60.0, trial=False)
    assert not list(pairs.listed(60.0))


@pytest.mark.parametrize("cut_off", ["prefill-0", "decode-1"])
def test_a_request_that_lost_time_goes_to_two_other_workers(served, cut_off):
    """Either worker of a failed pair may be cut off, perhaps from all workers."""
    cut = Cut(served, *(((0, 0), (0, 1)) if cut_off == "prefill-0" else ((0, 1), (1, 1))))
    for number in range(8):
        key = served.submit(f"r{number}", target_endpoint="ipc:///run/prefill-0", pin="prefer")
        served.core.table.requests[key].pin = None  # the pin only selected the first pair
        assert key in cut.play()
        assert [a for _, _, a in cut.tried] in ([1], [1, 2])
        cut.tried.clear()
