"""Successive incarnations in one process."""

from __future__ import annotations

import gc
import weakref

import pytest

from baton.runtime.process import main
from baton.runtime.process.main import EXIT_RESTART, EXIT_TURN, run_incarnations


class Shell:
    """Ends at once with a given code. Has a reference cycle, like a shell and its callbacks."""

    def __init__(self, loop, exit_code, own_error=False, ended=True):
        self.ended = ended
        self.exit_code = exit_code
        self.own_error = own_error
        self.turning = False
        self._loop = loop
        self._itself = self

    def start(self):
        self._loop.stop()

    def drain(self):
        """Do nothing: there are never requests."""

    def turn(self):
        """Do nothing, as in a drain."""

    def close(self):
        return self.ended


def test_an_incarnation_leaves_nothing_to_the_next_one():
    """Its maps and buffers may be gigabytes, and full garbage collections are rare."""
    made = []

    def make(wiring, _doors):
        assert [last() for last in made] == [None] * len(made)
        shell = Shell(wiring.loop, EXIT_RESTART if len(made) < 2 else 0)
        made.append(weakref.ref(shell))
        return shell

    try:
        assert run_incarnations(None, make) == 0
    finally:
        gc.unfreeze()  # or objects of other tests would never be collected
    assert len(made) == 3


@pytest.mark.parametrize(("own_error", "apart", "lives"), [(True, 60.0, 3), (True, 0.0, 9)])
def test_own_errors_in_a_row_end_the_process(monkeypatch, own_error, apart, lives):
    """A new incarnation has empty books; if that does not help, the process is replaced."""
    monkeypatch.setattr(main, "OWN_ERRORS_APART_S", apart)
    made = []

    def make(wiring, _doors):
        made.append(1)
        return Shell(wiring.loop, EXIT_RESTART if len(made) < 9 else 0, own_error)

    try:
        assert run_incarnations(None, make) == (EXIT_RESTART if lives == 3 else 0)
    finally:
        gc.unfreeze()
    assert len(made) == lives


@pytest.mark.parametrize(("ended", "code"), [(True, EXIT_TURN), (False, EXIT_RESTART)])
def test_another_role_needs_a_model_that_no_step_uses(ended, code):
    try:
        shells = lambda wiring, _doors: Shell(wiring.loop, EXIT_TURN, ended=ended)  # noqa: E731
        assert run_incarnations(None, shells) == code
    finally:
        gc.unfreeze()


def test_an_incarnation_that_fails_in_its_change_of_role_is_the_last_of_its_role():
    made = []

    def make(wiring, _doors):
        made.append(Shell(wiring.loop, EXIT_RESTART))
        made[-1].turning = len(made) == 2
        return made[-1]

    try:
        assert run_incarnations(None, make) == EXIT_TURN
    finally:
        gc.unfreeze()
    assert len(made) == 2
