"""`baton serve` as a service of Type=notify: a datagram socket in systemd's place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.local.service import READY, STOPPING, notify


@pytest.fixture(params=["file", "name"])
def manager(request, tmp_path, monkeypatch) -> Iterator[socket.socket]:
    """The socket to which a service sends its states; a file or a name without one."""
    address = str(tmp_path / "notify")
    if request.param == "name":
        address = f"@baton-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address.replace("@", "\0"))
        receiver.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        yield receiver


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder in which the paths of sockets have less than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield folder


def test_a_state_reaches_the_manager(manager):
    notify(READY)
    notify(STOPPING)
    assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


@pytest.mark.parametrize("address", ["", "vsock:2:1", "/nowhere/at/all", "@nobody-listens"])
def test_without_a_manager_nothing_is_sent(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify(READY)


@pytest.mark.parametrize("manager", ["file"], indirect=True)
def test_serve_is_ready_with_its_workers_and_says_when_it_stops(manager, tmp_path, short_folder):
    words = ["serve", "--no-http", "--kv-memory=16MiB", "--decode=1", f"--run-dir={short_folder}"]
    address = ["--address", f"ipc://{short_folder}/c", "--admin", f"ipc://{short_folder}/a"]
    log = tmp_path / "log"
    with log.open("w") as out:
        serve = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", *words, *address], stdout=out, stderr=out
        )
    try:
        assert manager.recv(100) == b"READY=1"
        serve.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert serve.wait(120) == 0, Path(log).read_text()
        assert "ready" in log.read_text()  # the terminal's lines may come after the state
    finally:
        serve.kill()
        serve.wait()
