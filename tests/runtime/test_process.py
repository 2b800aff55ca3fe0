"""Successive incarnations in one process."""

from __future__ import annotations

import gc
import weakref

from baton.runtime.process.main import EXIT_RESTART, run_incarnations


class Shell:
    """Ends at once with a given code. Has a reference cycle, like a shell and its callbacks."""

    def __init__(self, loop, exit_code):
        self.exit_code = exit_code
        self._loop = loop
        self._itself = self

    def start(self):
        self._loop.stop()

    def drain(self):
        """Do nothing: there are never requests."""

    def close(self):
        return True


def test_an_incarnation_leaves_nothing_to_the_next_one():
    """Its maps and buffers may be gigabytes, and full garbage collections are rare."""
    made = []

    def make(loop, _context, _doors):
        assert [last() for last in made] == [None] * len(made)
        shell = Shell(loop, EXIT_RESTART if len(made) < 2 else 0)
        made.append(weakref.ref(shell))
        return shell

    try:
        assert run_incarnations(None, make) == 0
    finally:
        gc.unfreeze()  # or objects of other tests would never be collected
    assert len(made) == 3
