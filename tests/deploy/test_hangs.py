"""Distinguishing hanging processes from disconnected ones."""

from baton.deploy.controller.members import Member, View
from baton.deploy.report import DRAINED, ClusterReport, WorkerReport
from baton.deploy.supervise.hangs import Hangs


def decode_0(state, reason="", pid=10) -> ClusterReport:
    worker = WorkerReport(id="decode-0", role="decode", pid=pid, state=state, reason=reason)
    return ClusterReport(workers=[worker])


LOST = ClusterReport()
SEEN = decode_0("ready")
DEAD = decode_0("dead", "no heartbeat for 5.0 s")
STUCK = decode_0("dead", "no progress for 5.0 s")


def watch(hangs, start, end, report, *, signs=(), router="router", step=0.2):
    """Feed reports from ``start`` to ``end`` and heartbeats of ``signs``; return the hangs."""
    found, now = [], start
    while now <= end:
        for name in signs:
            hangs.alive(name, now)
        hangs.reported(router, report, now)
        found += [hang.name for hang in hangs.hung(now)]
        now += step
    return found


def begun() -> Hangs:
    hangs = Hangs()
    hangs.started("router", 1, "router")
    hangs.started("decode-0", 10, "decode")
    return hangs


def test_a_worker_that_the_router_lost_and_that_shows_no_life_hangs():
    hangs = begun()
    assert watch(hangs, 0, 2, SEEN, signs=["decode-0"]) == []
    assert watch(hangs, 2.2, 11.5, DEAD) == []
    assert watch(hangs, 11.6, 20, DEAD) == ["decode-0"]


def test_a_worker_that_shows_life_gets_a_minute_to_find_the_router_again():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    assert watch(hangs, 2.2, 61, DEAD, signs=["decode-0"]) == []
    assert watch(hangs, 61, 63, DEAD, signs=["decode-0"]) == ["decode-0"]


def test_a_worker_that_is_heard_and_makes_no_progress_hangs():
    hangs = begun()
    watch(hangs, 0, 2, SEEN, signs=["decode-0"])
    assert watch(hangs, 2.2, 11.5, STUCK, signs=["decode-0"]) == []
    assert watch(hangs, 11.6, 13, STUCK, signs=["decode-0"]) == ["decode-0"]


def test_a_worker_that_loads_does_not_hang():
    assert watch(begun(), 0, 60, LOST) == []


def test_a_restarted_worker_begins_anew():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    hangs.started("decode-0", 11, "decode")
    assert watch(hangs, 2.2, 60, LOST) == []
    watch(hangs, 60, 61, decode_0("ready", pid=11))
    assert watch(hangs, 61, 75, SEEN) == ["decode-0"]


def test_a_router_that_was_away_blames_no_worker():
    hangs = begun()
    watch(hangs, 0, 2, SEEN, signs=["decode-0"])
    assert watch(hangs, 59, 61.5, LOST, signs=["decode-0"]) == []


def test_a_new_router_blames_no_worker_and_is_not_blamed():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    hangs.started("router", 2, "router")
    assert hangs.hung(60) == []
    assert watch(hangs, 60, 62.5, LOST, signs=["decode-0"]) == []


def test_a_router_hangs_when_neither_answers_nor_signs_of_life_come():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    hangs.alive("router", 8)
    hangs.alive("decode-0", 8)
    assert hangs.hung(17.9) == []
    assert [hang.name for hang in hangs.hung(18)] == ["router", "decode-0"]
    assert hangs.hung(30) == []


def test_a_worker_whose_clock_stands_still_hangs_although_the_routers_reach_it():
    hangs = begun()
    assert watch(hangs, 0, 5, SEEN, signs=["decode-0", "router"]) == []
    assert watch(hangs, 5.2, 14.5, SEEN, signs=["router"]) == []
    assert watch(hangs, 14.6, 16, SEEN, signs=["router"]) == ["decode-0"]


def test_a_router_whose_clock_stands_still_hangs_although_it_answers():
    hangs = begun()
    assert watch(hangs, 0, 5, SEEN, signs=["decode-0", "router"]) == []
    assert watch(hangs, 5.2, 14.5, SEEN, signs=["decode-0"]) == []
    assert watch(hangs, 14.6, 16, SEEN, signs=["decode-0"]) == ["router"]


def test_a_heartbeat_without_a_turn_of_the_clock_is_no_sign_of_life():
    hangs = begun()
    found = []
    for second in range(40):
        hangs.alive("router", second, turns=min(second, 20))
        hangs.reported("router", SEEN, second)
        found += [(hang.name, second) for hang in hangs.hung(second)]
    assert found == [("router", 30)]


def test_quiet_is_the_time_since_the_last_heartbeat():
    hangs = begun()
    assert hangs.quiet("decode-0", 100.0) is None
    for second in (100.0, 103.0, 107.0):
        hangs.alive("decode-0", second)
    assert hangs.quiet("decode-0", 109.0) == 2.0
    assert hangs.quiet("router", 109.0) is None


def test_a_router_that_shows_life_never_hangs():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    for second in range(2, 1000):
        hangs.alive("router", second)
        assert hangs.hung(second) == []


def test_a_pause_of_the_supervisor_itself_is_no_silence_of_others():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    hangs.forgive_pause(2)
    hangs.forgive_pause(500)
    assert hangs.hung(500) == []


def test_one_of_two_routers_may_be_away():
    hangs = begun()
    hangs.started("router-1", 3, "router")
    watch(hangs, 0, 2, SEEN)
    assert watch(hangs, 0, 9, SEEN, router="router-1") == []


def test_what_has_ended_does_not_hang():
    hangs = begun()
    watch(hangs, 0, 2, SEEN)
    hangs.ended("decode-0")
    assert watch(hangs, 2.2, 20, LOST) == []


def test_a_namesake_with_another_key_hides_no_process():
    """Before or after it in the report, alive or dead."""
    for state in ("ready", "dead"):
        rogue = decode_0(state, "no heartbeat for 5.0 s", pid=99).workers
        for real in (SEEN, DEAD):
            for workers in ([*rogue, *real.workers], [*real.workers, *rogue]):
                hangs = begun()
                watch(hangs, 0.0, 5.0, ClusterReport(workers=workers), signs=("decode-0",))
                assert hangs.declared("decode-0") == (
                    DEAD.workers[0].reason if real is DEAD else ""
                )


def test_the_controller_finds_its_process_among_namesakes():
    member = Member("decode-0", "decode", 1, 0.0, pid=10)
    rogue = decode_0("dead", DRAINED, pid=99).workers
    for workers in ([*rogue, *SEEN.workers], [*SEEN.workers, *rogue]):
        assert View.of(ClusterReport(workers=workers)).state(member) == "ready"
