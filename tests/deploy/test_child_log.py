import json
import re

import pytest

from baton.deploy.messages import json_line
from baton.deploy.supervise.children import ChildLog, Output


def ended(*events, code=1, level="warning"):
    lines = []
    log = ChildLog(Output(lines.append, level))
    for event in events:
        log.handle("decode-0", event)
    return (*log.ended("decode-0", code), lines)


def test_what_a_refused_start_said_is_the_reason_and_not_shown():
    failed = {"event": "process.failed", "level": "error", "error": "no such folder"}
    assert ended(failed) == ("no such folder", True, [])


@pytest.mark.parametrize(("code", "refused"), [(1, True), (4, False), (-9, False)])
def test_a_worker_refused_for_good_is_not_to_be_tried_again(code, refused):
    gone = {"event": "worker.exit", "level": "error", "reason": "architecture is X"}
    reason, was_refused, lines = ended(gone, code=code)
    assert (reason, was_refused) == ("architecture is X", refused)
    assert lines == ["decode-0: error: worker.exit reason=architecture is X"]


def test_an_interpreter_s_last_words_count_unless_a_signal_ended_it():
    raw = {"event": "No module named x", "level": "warning", "raw": True}
    assert ended(raw)[:2] == ("No module named x", False)
    assert ended(raw, code=-9)[:2] == ("", False)


def test_an_abort_at_a_limit_names_the_limit():
    """It was "killed by signal 6", and the cause was a line of a log."""
    raw = {"event": "Resource temporarily unavailable (src/thread.cpp:241)", "raw": True}
    reason, refused, _ = ended(raw, code=-6)
    assert reason.startswith("Resource temporarily unavailable (src/thread.cpp:241); raise the")
    assert ("ulimit -u" in reason, refused) == (True, False)
    raw = {"event": "RuntimeError: can't start new thread", "raw": True}
    assert "ulimit -u" in ended(raw)[0]
    failed = {"event": "process.failed", "level": "error", "error": "Too many open files"}
    assert ended(failed)[:2] == (
        "Too many open files; raise the limit on open files (ulimit -n)",
        True,
    )


def test_lines_below_the_level_are_not_shown_and_nothing_is_kept_for_the_next():
    lines = []
    log = ChildLog(Output(lines.append, "error"))
    log.handle("a", {"event": "x", "level": "warning"})
    log.handle("a", {"event": "y", "level": "error"})
    assert lines == ["a: error: y"]
    assert log.ended("a", 1) == ("y", False)
    assert log.ended("a", 1) == ("", False)


def test_as_json_a_line_keeps_its_fields_and_its_time():
    text, lines = [], []
    log = ChildLog(Output(text.append, "info", lines.append))
    at = "2026-11-23T07:00:00.000000Z"
    event = {"event": "x.y", "level": "info", "timestamp": at, "role": "decode", "blocks": 3}
    log.handle("decode-0", {**event, "process": "decode-0"})
    log.handle("decode-0", {"event": "not JSON", "level": "warning", "raw": True})
    first, second = map(json.loads, lines)
    assert first == {**event, "process": "decode-0"}
    assert (second["event"], second["level"]) == ("not JSON", "warning")
    ours = json.loads(json_line("supervisor", "ready"))
    for line in (second, ours):  # one form: lines can be sorted as text
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])
    assert text == []
