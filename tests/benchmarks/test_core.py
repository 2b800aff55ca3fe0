"""The loop that measures the router's core."""

from baton.benchmarks.core import STEPS, WINDOW, Run, counted


def test_every_request_of_a_run_ends_and_is_forgotten():
    run = Run()
    for served in (2 * WINDOW, 3 * WINDOW):
        took = run.play(served - run.served)
        assert len(took) == len(STEPS)
        assert run.core.metrics.total("ok") == served
        assert run.core.kept == 0
    assert run.core.handoffs.count == 3 * WINDOW


def test_bytecodes_are_counted_per_request():
    bytecodes, calls = counted(WINDOW)
    assert 100 * calls > bytecodes > calls > 1
