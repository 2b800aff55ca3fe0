"""The compute thread: order of items, errors, posts from its function, end."""

from __future__ import annotations

import threading

from baton.runtime.process.compute import ComputeThread


def test_results_come_in_order_on_the_loop_thread(loop, drive):
    done, threads = [], set()

    def on_done(item, result):
        threads.add(threading.get_ident())
        done.append((item, result))

    compute = ComputeThread(loop, lambda n: n * n, on_done)
    for n in range(50):
        compute.submit(n)
    drive.until(lambda: len(done) == 50)
    assert done == [(n, n * n) for n in range(50)]
    assert threads == {threading.get_ident()}
    assert compute.progress == 50 and not compute.busy
    assert compute.stop()


def test_an_exception_is_a_result(loop, drive):
    done = []
    compute = ComputeThread(loop, lambda n: 1 // n, lambda i, r: done.append(r))
    compute.submit(0)
    compute.submit(1)
    drive.until(lambda: len(done) == 2)
    assert isinstance(done[0], ZeroDivisionError) and done[1] == 1
    assert compute.stop()


def test_events_from_within_come_before_the_result(loop, drive):
    seen = []

    def work(item):
        compute.post(lambda: seen.append("half"))
        return item

    compute = ComputeThread(loop, work, lambda i, r: seen.append("done"))
    compute.submit("x")
    drive.until(lambda: "done" in seen)
    assert seen == ["half", "done"]
    assert compute.stop()


def test_stop_waits_for_the_running_item_and_drops_the_rest(loop):
    started, release, ran = threading.Event(), threading.Event(), []

    def work(item):
        ran.append(item)
        started.set()
        release.wait(30)

    compute = ComputeThread(loop, work, lambda i, r: None)
    compute.submit(1)
    compute.submit(2)
    assert started.wait(30)
    assert compute.busy
    assert not compute.stop(timeout=0.01)
    release.set()
    assert compute.stop()
    assert ran == [1]
