"""The operator's terminal: a blocked output never blocks the supervisor."""

from __future__ import annotations

import os
import threading

import pytest

from baton.deploy.local.terminal import Terminal


@pytest.fixture
def pipe():
    """Yield both ends of a pipe."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, os.fdopen(read, "rb", 0) as reader:
        yield reader, stream


def test_lines_come_in_order(pipe, monkeypatch):
    output, stream = pipe
    monkeypatch.setattr("sys.stdout", stream)
    terminal = Terminal()
    for number in range(100):
        terminal(f"line {number}")
    terminal.flush()
    lines = os.read(output.fileno(), 1 << 16).decode().splitlines()
    assert lines == [f"line {number}" for number in range(100)]


def test_an_output_that_stands_still_costs_lines_and_no_time(pipe, monkeypatch):
    output, stream = pipe
    monkeypatch.setattr("sys.stdout", stream)
    terminal = Terminal(max_waiting=10)
    for _ in range(5_000):
        terminal("x" * 100)
    terminal.flush(timeout=0.01)  # returns early: the pipe is full
    text = bytearray()
    ended = threading.Event()

    def read() -> None:
        while b"not printed" not in text or b"last\n" not in text:
            text.extend(os.read(output.fileno(), 1 << 16))
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    terminal.flush(timeout=10.0)
    terminal("last")
    assert ended.wait(10.0)
    lines = text.decode().splitlines()
    dropped = [line for line in lines if "not printed" in line]
    kept = lines.count("x" * 100)
    assert kept < 1000
    assert sum(int(line.split()[0][1:]) for line in dropped) == 5_000 - kept


def test_a_closed_output_is_survived(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    terminal = Terminal()
    terminal("nobody reads this")
    terminal.flush()
