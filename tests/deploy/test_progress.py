import os
import pty
import re

import pytest

from baton.deploy.local.terminal import Terminal
from baton.deploy.supervise.children import LOADING_LINE_S, REDRAW_S, LoadProgress

END = "a loaded 1.0 MiB of weights in 3.0 s"
MIB = 1 << 20


def test_in_a_log_there_is_one_line_when_it_takes_long_and_one_at_the_end():
    lines, now = [], [0.0]
    progress = LoadProgress(lines.append, lambda: now[0])
    for second in range(4):
        now[0] = float(second)
        progress.update("a", second * MIB // 3, MIB)
        progress.update("a", second * MIB // 3, MIB) if second < 3 else None
    assert LOADING_LINE_S <= 1.0
    assert lines == ["a loads 1.0 MiB of weights", END]


def test_loading_that_takes_a_moment_is_one_line():
    lines = []
    progress = LoadProgress(lines.append, lambda: 0.0)
    for done in (0, MIB // 2, MIB):
        progress.update("a", done, MIB)
    assert lines == ["a loaded 1.0 MiB of weights in 0.0 s"]


def test_a_worker_that_ended_begins_anew():
    lines, now = [], [0.0]
    progress = LoadProgress(lines.append, lambda: now[0])
    progress.update("a", 1, 2)
    progress.forget("a")
    now[0] = 7.0
    progress.update("a", 1, 2)
    progress.update("a", 2, 2)
    assert lines == ["a loaded 2 B of weights in 0.0 s"]


@pytest.fixture
def screen(monkeypatch):
    """Return both ends of a 40-column terminal: the reading end, and the one for stdout."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with os.fdopen(theirs, "w") as stream, os.fdopen(ours, "rb", 0) as reader:
        yield reader, stream


def test_on_a_terminal_a_bar_is_drawn_over_and_gone_at_the_end(screen, monkeypatch):
    output, stream = screen
    monkeypatch.setattr("sys.stdout", stream)
    now = [0.0]
    terminal = Terminal()
    progress = LoadProgress(terminal, lambda: now[0])
    for done in (0, MIB // 2, MIB // 2, MIB):
        now[0] += REDRAW_S
        for name in ("a", "a-worker-with-a-long-name"):
            progress.update(name, done, MIB)
    terminal("ready")
    terminal.flush()
    read = b""
    while b"ready\r\n" not in read:  # a terminal passes its bytes on in pieces
        read += os.read(output.fileno(), 1 << 16)
    said = read.decode().replace("\r\n", "\n")
    assert "[######......]" in said
    assert said.count("\n") == 3
    drawn = [part.rpartition("\r\x1b[K")[2] for part in said.rstrip("\n").split("\n")]
    assert [line.partition(" of ")[0] for line in drawn] == [
        "a loaded 1.0 MiB", "a-worker-with-a-long-name loaded 1.0 MiB", "ready",
    ]  # fmt: skip
    bars = [part for part in re.split(r"\r\x1b\[K|\n", said) if "loading" in part]
    assert max(len(bar) for bar in bars) == 39
