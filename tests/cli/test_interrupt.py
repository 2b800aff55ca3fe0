"""Ctrl-C while a command is still importing modules ends it without output."""

import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

import baton.cli.__main__ as entry

LOADING = """
import os, signal, sys

class Interrupting:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
from baton.cli.__main__ import main
sys.argv[1:] = ["--version"]
sys.exit(main())
"""


def interrupted_at(module: str, before=None) -> subprocess.CompletedProcess:
    """Run ``baton --version`` and interrupt it before its import of ``module``."""
    code = LOADING.replace("sys.argv[1]", repr(module))
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=before,
        check=False,
    )


@pytest.mark.parametrize("module", ["baton.cli.command", "numpy", "zmq", "baton.cli.doctor"])
def test_an_interrupt_while_it_loads_is_silent(module):
    # A shell starts background processes with SIGINT ignored.
    ended = interrupted_at(module, lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("at_start", "handlers"),
    [
        (signal.default_int_handler, [entry._leave, signal.default_int_handler, entry._leave]),
        (signal.SIG_IGN, [signal.SIG_IGN] * 3),
    ],
    ids=["heeded", "ignored"],
)
def test_only_the_command_itself_sees_an_interrupt(at_start, handlers, monkeypatch):
    """The handler while the command is imported, while it runs, and afterwards."""
    seen = []

    class Command(ModuleType):
        @property
        def main(self):
            seen.append(signal.getsignal(signal.SIGINT))
            return lambda: seen.append(signal.getsignal(signal.SIGINT)) or 5

    monkeypatch.setitem(sys.modules, "baton.cli.command", Command("command"))
    before = signal.signal(signal.SIGINT, at_start)
    try:
        assert entry.main() == 5
        seen.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == handlers


def test_it_stays_ignored_where_it_was():
    ended = interrupted_at("numpy", lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.startswith(b"baton ")
