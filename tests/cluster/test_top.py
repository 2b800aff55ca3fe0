"""``baton top`` in a terminal, beside a running cluster."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from .conftest import command_environment, wait_until
from .driver import Job, ask_all, greedy

pytestmark = pytest.mark.cluster


class Terminal:
    """A command in a pseudo-terminal of 120 x 30 characters."""

    def __init__(self, folder, *command: str) -> None:
        self._own, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self._data = b""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.cli", *command],
            stdin=child, stdout=child, stderr=child,
            env={**command_environment(folder), "TERM": "xterm"},
            start_new_session=True,
        )  # fmt: skip
        os.close(child)

    def screen(self) -> str:
        """What the last update shows, without colors."""
        while select.select([self._own], [], [], 0)[0]:
            try:
                self._data += os.read(self._own, 65536)
            except OSError:  # the command has ended
                break
        last = self._data.decode(errors="replace").rpartition("\x1b[H")[2]
        return re.sub(r"\x1b\[[\d?]*[a-zA-Z]", "", last)

    def wait_for(self, text: str) -> str:
        return wait_until(
            lambda: text in (shown := self.screen()) and shown, what=f"{text!r} on the screen"
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self._own, key.encode())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=2)


@pytest.fixture
def top(pools, tmp_path):
    one = Terminal(tmp_path, "top", f"--address={pools.address}", "--interval=0.2")
    yield one
    one.end()


def test_keys_sort_drain_and_quit(pools, top):
    shown = top.wait_for("decode-1")
    assert "prefill-0" in shown
    assert "WORKER^" in shown
    top.press("s", "s", "s", "s")
    top.wait_for("BATCHv")
    top.press("\x1b[B")
    top.press("d")
    question = re.search(r"drain (\S+)\? y or n", top.wait_for("? y or n"))
    top.press("n")
    top.wait_for(f"{question[1]} is not drained")
    top.press("q")
    assert top.process.wait(60) == 0


def test_a_drained_worker_leaves(pools, top):
    top.wait_for("decode-1")
    for _ in range(3):  # to the decode worker that the sort by name shows second
        top.press("k")
    top.press("j")
    top.press("d")
    top.wait_for("drain decode-1? y or n")
    top.press("y")
    wait_until(
        lambda: pools.workers().get("decode-1", {"state": "gone"})["state"] in ("gone", "dead"),
        what="the drained worker to leave",
    )
    top.press("q")
    assert top.process.wait(60) == 0


def test_without_a_terminal_one_view_is_printed(pools, tmp_path):
    with pools.client() as client:
        ask_all(client, [Job([5, 6, 7], greedy(10))])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "top", f"--address={pools.address}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        env=command_environment(tmp_path),
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith("baton top   demo_model")
    assert "\x1b" not in done.stdout
    assert any(line.startswith("decode-0") for line in lines)


def test_one_address_of_a_cluster_with_two_routers_is_enough(shared_cluster):
    several = shared_cluster(prefill=1, decode=1, routers=2)
    first = several.address.split(",")[0]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "top", "--once", f"--address={first}"],
        capture_output=True, text=True, timeout=100, env=command_environment(several.folder),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 routers" in done.stdout
