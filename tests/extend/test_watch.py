"""A call of an extension that does not return is named, by another thread."""

import threading

from baton.extend import POLICY
from baton.extend.guard import Guard
from baton.extend.watch import CallWatch


def test_a_call_that_does_not_return_is_named_once():
    reports, said = [], threading.Event()

    def say(event, fields):
        reports.append((event, fields))
        said.set()

    guard = Guard(POLICY, "own:Class", lambda *_: None)
    watch = CallWatch([guard], say, hang_s=0.02)
    try:
        assert guard.call(lambda: said.wait(60))
        said.clear()
        assert guard.call(lambda: said.wait(60))
    finally:
        watch.stop()
    assert [event for event, _ in reports] == ["policy.hangs", "policy.hangs"]
    assert reports[0][1]["extension"] == "own:Class"
    assert "own:Class has not returned for " in reports[0][1]["error"]
    assert "threading.py, line " in reports[0][1]["error"]


def test_without_classes_there_is_no_thread():
    before = threading.active_count()
    CallWatch([], lambda *_: None)
    assert threading.active_count() == before
