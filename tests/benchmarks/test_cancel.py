"""The bar of ``python -m baton.benchmarks cancel`` and the exit code that goes with it."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from baton.benchmarks import cancel
from baton.benchmarks.cancel import BAR_MS, Moments


def took(*milliseconds: float) -> list[Moments]:
    return [Moments(0.0, 0.0, [(0.0, each / 1e3)]) for each in milliseconds]


def test_one_in_a_hundred_may_take_longer_and_two_may_not(capsys):
    assert cancel.show("lone", took(*[1.0] * 199, BAR_MS + 1))
    assert "MISSED" not in capsys.readouterr().out
    assert not cancel.show("lone", took(*[1.0] * 99, BAR_MS + 1))
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize(("held", "code"), [((True, True), 0), ((True, False), 1)])
def test_the_exit_code_says_whether_every_model_held_the_bar(monkeypatch, capsys, held, code):
    answers = iter(held)
    monkeypatch.setattr(cancel, "measure", lambda *_: next(answers))
    # Both change the process: its signals and its environment.
    monkeypatch.setattr(cancel, "scratch_folder", lambda: nullcontext(Path()))
    monkeypatch.setattr(cancel, "limit_blas_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["cancel", "--models", "embedded", "/a/folder"])
    assert cancel.main() == code
    assert f"bar: p99 {BAR_MS}" in capsys.readouterr().out
