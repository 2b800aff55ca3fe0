"""Log lines: one JSON object each, with the speaker."""

from __future__ import annotations

import json

import pytest

from baton.runtime import log


@pytest.fixture(autouse=True)
def restored():
    before = log.get_logger()._out
    yield
    log.get_logger().configure(before)


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


def test_level_and_human_format(capsys):
    log.configure("router", "r0", level="warning", human=True)
    log.get_logger().info("quiet")
    log.get_logger().warning("loud", key=1)
    text = capsys.readouterr().err
    assert "quiet" not in text and "loud" in text and "key=1" in text


def test_a_closed_stderr_is_survived(monkeypatch):
    log.configure("router", "r0")
    monkeypatch.setattr("sys.stderr", None)
    log.get_logger().error("nobody hears")
