"""Calls of an extension: what it raises is reported, and it takes a share of the time at most."""

import sys

import pytest

from baton.extend import POLICY
from baton.extend.guard import BURST_S, SHARE, Guard


class Bench:
    """A guard with a clock of its own."""

    def __init__(self):
        self.now = 100.0
        self.reports = []
        self.guard = Guard(POLICY, "own:Class", self.report, lambda: self.now)

    def report(self, event, error, fields):
        self.reports.append((event, error, fields))

    def take(self, seconds):
        def call():
            self.now += seconds
            return "result"

        return self.guard.call(call)


def raising(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize("error", [KeyError("rack"), RecursionError(), MemoryError()])
def test_an_exception_is_reported_with_its_traceback(error):
    bench = Bench()
    assert bench.guard.call(raising(error)) is None
    ((event, reported, fields),) = bench.reports
    assert (event, fields) == ("policy.failed", {"extension": "own:Class"})
    assert reported is error
    assert reported.__traceback__ is not None
    assert bench.guard.failures == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_extension_cannot_end_the_process(error):
    bench = Bench()
    assert bench.guard.call(raising(error)) is None
    assert bench.reports[0][1].__cause__ is error


def test_short_calls_are_never_skipped():
    bench = Bench()
    for _ in range(10_000):
        assert bench.take(0.0001) == "result"
        bench.now += 0.0005
    assert (bench.reports, bench.guard.skipped) == ([], 0)


def test_a_long_call_counts_and_the_extension_then_rests():
    bench = Bench()
    assert bench.take(0.05) == "result"
    assert [event for event, *_ in bench.reports] == ["policy.slow"]
    assert "50.0 ms in the last call" in str(bench.reports[0][1])
    assert "not called for up to 0.20 s" in str(bench.reports[0][1])
    assert bench.take(0.05) is None
    assert bench.guard.skipped == 1
    bench.now += (0.05 - BURST_S) / SHARE + 0.001
    assert bench.take(0.05) == "result"


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.05, 1.0])
def test_it_takes_its_share_of_the_time_and_one_call_at_most(seconds):
    bench = Bench()
    began, taken = bench.now, 0.0
    while bench.now < began + 60.0:
        before = bench.now
        bench.take(seconds)
        taken += bench.now - before
        bench.now += 0.0002
    assert taken <= SHARE * (bench.now - began) + BURST_S + seconds
    assert bench.guard.skipped > 0


def test_without_a_clock_calls_take_no_time():
    guard = Guard(POLICY, "own:Class", pytest.fail, None)
    assert guard.call(lambda: sys.intern("result")) == "result"


class Silent(Exception):
    """An exception without a text."""

    def __str__(self):
        raise LookupError("no text")


def test_an_exception_that_has_no_text_is_reported():
    bench = Bench()
    assert bench.guard.call(raising(Silent())) is None
    assert "own:Class raised Silent; it has no text" in str(bench.reports[0][1])


def test_the_last_error_is_one_printable_line():
    bench = Bench()
    bench.guard.call(raising(ValueError("two\nlines \x1b[2J \ud800" + 500 * "x")))
    found = bench.guard.counts()
    assert (found.calls, found.failures, found.skipped) == (1, 1, 0)
    assert found.error.startswith("ValueError: two lines ?[2J ?xxx")
    assert len(found.error) == 200
