"""Work with a time limit: every item is answered, even if a thread overruns."""

import threading

from baton.proto.errors import CapacityError
from baton.runtime.process.compute import MAX_OVERRUN, TimeLimited


class Bench:
    """Items are functions; answers are recorded in order."""

    def __init__(self, loop, limit: float) -> None:
        self.answers = []
        self.limit = limit
        self.gate = threading.Event()
        self.hanging = 0
        self.work = TimeLimited(
            loop,
            lambda item: item(),
            lambda _, result: self.answers.append(result),
            lambda: self.limit,
            name="work",
        )

    def hang(self) -> str:
        self.hanging += 1
        assert self.gate.wait(30)
        return "late"


def test_results_and_errors_come_in_order(loop, drive):
    bench = Bench(loop, 30.0)
    bench.work.submit(lambda: 1)
    bench.work.submit(lambda: 1 // 0)
    bench.work.submit(lambda: threading.current_thread().name)
    assert bench.answers == []
    drive.until(lambda: len(bench.answers) == 3)
    assert bench.answers[0] == 1
    assert isinstance(bench.answers[1], ZeroDivisionError)
    assert bench.answers[2] == "work"
    bench.work.stop()


def test_what_overruns_is_given_up_and_the_next_goes_on(loop, drive):
    bench = Bench(loop, 0.0)
    bench.work.submit(bench.hang)
    bench.limit = 30.0
    bench.work.submit(lambda: "next")
    drive.until(lambda: len(bench.answers) == 2)
    assert isinstance(bench.answers[0], TimeoutError)
    assert bench.answers[1] == "next"
    bench.gate.set()  # its late result is dropped
    bench.work.submit(lambda: "after")
    drive.until(lambda: len(bench.answers) == 3)
    assert bench.answers[2] == "after"
    bench.work.stop()


def test_what_is_dropped_is_not_answered(loop, drive):
    bench, items = Bench(loop, 30.0), []
    for number in range(4):
        items.append((lambda n: lambda: n)(number))
    bench.work.submit(bench.hang)
    for item in items:
        bench.work.submit(item)
    drive.until(lambda: bench.hanging == 1)
    bench.work.drop(lambda item: item in (items[1], items[3], bench.hang))
    bench.gate.set()
    drive.until(lambda: len(bench.answers) == 2)
    assert bench.answers == [0, 2]
    bench.work.submit(items[1])  # again, and this time it is not dropped
    drive.until(lambda: len(bench.answers) == 3)
    assert bench.answers == [0, 2, 1]
    bench.work.stop()


def test_what_overruns_and_was_dropped_is_not_answered(loop, drive):
    bench = Bench(loop, 0.0)
    bench.work.submit(bench.hang)
    bench.limit = 30.0
    bench.work.submit(lambda: "next")
    bench.work.drop(lambda item: item == bench.hang)
    drive.until(lambda: bench.answers == ["next"])
    bench.gate.set()
    bench.work.stop()


def test_with_too_many_overruns_new_items_are_refused_until_one_ends(loop, drive):
    bench = Bench(loop, 0.01)
    while bench.hanging < MAX_OVERRUN:  # an item dropped before its start does not overrun
        bench.answers.clear()
        bench.work.submit(bench.hang)
        drive.until(lambda: bench.answers)
    bench.answers.clear()
    bench.work.submit(lambda: "refused")
    bench.work.submit(lambda: "refused")
    drive.until(lambda: len(bench.answers) == 2)
    assert [type(a) for a in bench.answers[-2:]] == [CapacityError, CapacityError]
    bench.gate.set()
    bench.limit = 30.0

    def again() -> bool:
        if isinstance(bench.answers[-1], CapacityError):
            bench.work.submit(lambda: "at last")
        return bench.answers[-1] == "at last"

    drive.until(again)
    bench.work.stop()


def test_without_a_thread_every_item_is_refused_until_one_starts(loop, drive, monkeypatch):
    """The exception left the item without an answer, and its request waited for its deadline."""
    bench = Bench(loop, 30.0)

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        bench.work.submit(lambda: "first")
        bench.work.submit(lambda: "second")
        drive.until(lambda: len(bench.answers) == 2)
    assert [type(answer) for answer in bench.answers] == [CapacityError, CapacityError]
    assert "can't start new thread" in str(bench.answers[0])
    assert "ulimit -u" in str(bench.answers[0])
    bench.work.submit(lambda: "third")
    drive.until(lambda: len(bench.answers) == 3)
    assert bench.answers[2] == "third"
    bench.work.stop()


def test_after_stop_nobody_is_answered(loop, drive):
    bench = Bench(loop, 30.0)
    bench.work.submit(bench.hang)
    bench.work.submit(lambda: "queued")
    bench.work.stop()
    bench.gate.set()
    seen = []
    loop.call_later(0.05, lambda: seen.append(1))
    drive.until(lambda: seen)
    assert bench.answers == []
