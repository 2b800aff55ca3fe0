"""Log lines: one JSON object each, with role and process id."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

import msgspec
import pytest

from baton.runtime.process import log


@pytest.fixture(autouse=True)
def restored():
    yield
    log.configure(level="warning", human=True)


def test_json_lines_carry_role_and_id(capsys):
    log.configure("decode", "d0")
    log.get_logger().info("handoff.accepted", blocks=3, thing=object)
    line = json.loads(capsys.readouterr().err)
    assert line["event"] == "handoff.accepted" and line["blocks"] == 3
    assert (line["role"], line["process"], line["level"]) == ("decode", "d0", "info")


def test_a_traceback_stays_on_one_line(capsys):
    log.configure("decode", "d0")
    try:
        raise ValueError("broken")
    except ValueError:
        log.get_logger().exception("x.failed")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "ValueError: broken" in json.loads(lines[0])["traceback"]


def test_an_error_that_was_caught_elsewhere_is_logged_with_its_traceback(capsys):
    log.configure("decode", "d0")
    try:
        raise KeyError("lost")
    except KeyError as caught:
        error = caught
    log.get_logger().error("worker.fault", exc_info=error)
    text = json.loads(capsys.readouterr().err)["traceback"]
    assert "KeyError: 'lost'" in text and "test_log.py" in text


def test_level_and_human_format(capsys):
    log.configure("router", "r0", level="warning", human=True)
    log.get_logger().info("quiet")
    log.get_logger().warning("loud", key=1)
    text = capsys.readouterr().err
    assert "quiet" not in text and "loud" in text and "key=1" in text


def test_no_text_of_another_process_controls_the_terminal(capsys):
    log.configure("router", "r0", level="warning", human=True)
    escape = "x\n\x1b]0;owned\x07\x9b2J"
    try:
        raise KeyError("outer") from RuntimeError(escape)
    except KeyError as caught:
        error = caught
    log.get_logger().error("loud", worker=escape, more=[escape], exc_info=error)
    text = capsys.readouterr().err
    assert "worker=x??]0;owned??2J" in text.replace("'", "")
    assert "RuntimeError: x\n?]0;owned??2J" in text
    assert all(line.isprintable() for line in text.replace("\t", "").splitlines())


class Record(msgspec.Struct):
    number: int
    thing: object


@pytest.mark.parametrize("human", [False, True])
def test_many_records_are_logged_as_one_by_one(capsys, human):
    records = [Record(number, object) for number in range(20)]
    log.configure("router", "r0", human=human)
    log.get_logger().info_all("request.ended", records)
    together = capsys.readouterr().err.splitlines()
    for record in records:
        log.get_logger().info("request.ended", number=record.number, thing=object)
    alone = capsys.readouterr().err.splitlines()
    assert len(together) == len(alone) == 20
    if not human:
        together, alone = (
            [{**json.loads(line), "timestamp": ""} for line in lines] for lines in (together, alone)
        )
        assert together == alone


def test_many_records_below_the_level_are_not_logged(capsys):
    log.configure("router", "r0", level="warning")
    log.get_logger().info_all("request.ended", [Record(1, None)])
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_is_survived(monkeypatch):
    log.configure("router", "r0")
    monkeypatch.setattr("sys.stderr", None)
    log.get_logger().error("nobody hears")


LOG_A_LOT = """
import sys
from baton.runtime.process import log as log
log.configure("decode", "d0")
log.never_block()
for number in range(20_000):
    log.get_logger().info("step", number=number, text="x" * (9000 if number % 7 == 0 else 10))
print("still running", "structlog" in sys.modules, flush=True)
sys.stdin.readline()
log.get_logger().info("last")
"""


def test_a_process_whose_log_nobody_reads_goes_on_and_says_later_what_was_lost():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-P", "-c", LOG_A_LOT], **pipes) as child:
        # Only lines for people need structlog, whose import takes a tenth of a worker's start.
        assert child.stdout.readline() == b"still running False\n"
        written = os.read(child.stderr.fileno(), 1 << 20)
        while select.select([child.stderr], [], [], 0.05)[0]:
            written += os.read(child.stderr.fileno(), 1 << 20)
        _, rest = child.communicate(b"\n", timeout=60)
        assert child.returncode == 0
    events = [json.loads(line) for line in (written + rest).splitlines()]
    assert events[-1]["event"] == "last"
    kept = sum(event["event"] == "step" for event in events)
    assert 0 < kept < 10_000
    assert kept + sum(e["lines"] for e in events if e["event"] == "log.dropped") == 20_000


def test_reports_come_whatever_the_level(capsys):
    log.configure("decode", "d0", level="error")
    log.get_logger().info("quiet")
    log.get_logger().report("load.progress", bytes_done=1)
    assert json.loads(capsys.readouterr().err)["event"] == "load.progress"
