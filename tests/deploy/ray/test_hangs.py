"""Who is held to hang, and who is only not known yet."""

from baton.deploy.ray.hangs import Hangs
from baton.deploy.report import ClusterReport, WorkerReport


def report(**pids: int) -> ClusterReport:
    """Workers ``decode_0=pid`` that the router finds alive."""
    workers = [
        WorkerReport(id=name.replace("_", "-"), role="decode", pid=pid, state="ready")
        for name, pid in pids.items()
    ]
    return ClusterReport(workers=workers)


def hear(hangs, start, end, said, step=0.2, router="router"):
    """Reports from ``start`` to ``end``; returns whoever hung meanwhile."""
    found, now = [], start
    while now <= end:
        hangs.heard(router, said, now)
        found += hangs.hung(now)
        now += step
    return found


def begun() -> Hangs:
    hangs = Hangs()
    hangs.started("router", "router", 1)
    hangs.started("decode-0", "decode", 10)
    return hangs


def test_a_worker_the_router_has_lost_hangs():
    hangs = begun()
    assert hear(hangs, 0, 2, report(decode_0=10)) == []
    assert hear(hangs, 2.2, 4.5, report()) == []
    assert hear(hangs, 4.6, 8, report()) == [("decode-0", 10)]


def test_a_worker_that_loads_does_not_hang():
    assert hear(begun(), 0, 60, report()) == []


def test_a_restarted_worker_begins_anew():
    hangs = begun()
    hear(hangs, 0, 2, report(decode_0=10))
    hangs.started("decode-0", "decode", 11)
    assert hear(hangs, 2.2, 60, report()) == []
    hear(hangs, 60, 61, report(decode_0=11))
    assert hear(hangs, 61, 70, report(decode_0=10)) == [("decode-0", 11)]


def test_a_router_that_was_away_blames_nobody():
    hangs = begun()
    hear(hangs, 0, 2, report(decode_0=10))
    assert hear(hangs, 9, 11.5, report()) == []


def test_a_new_router_blames_nobody_and_is_not_blamed():
    hangs = begun()
    hear(hangs, 0, 2, report(decode_0=10))
    hangs.started("router", "router", 2)
    assert hangs.hung(60) == []
    assert hear(hangs, 60, 62.5, report()) == []


def test_a_silent_router_hangs():
    hangs = begun()
    hear(hangs, 0, 2, report(decode_0=10))
    assert hangs.hung(11) == []
    assert hangs.hung(12.5) == [("router", 1)]
    assert hangs.hung(13) == []


def test_one_of_two_routers_may_be_away():
    hangs = begun()
    hangs.started("router-1", "router", 3)
    hear(hangs, 0, 2, report(decode_0=10))
    assert hear(hangs, 0, 9, report(decode_0=10), router="router-1") == []


def test_who_has_ended_does_not_hang():
    hangs = begun()
    hear(hangs, 0, 2, report(decode_0=10))
    hangs.ended("decode-0")
    assert hear(hangs, 2.2, 8, report()) == []
