"""Parametrised tests of which ``make test`` runs a few cases, and ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from _pytest.mark import ParameterSet


def in_short(cases: Mapping[str, object], *kept: str) -> list[ParameterSet]:
    """Parameters of the values of ``cases`` by their names; those not ``kept`` are marked long."""
    if unknown := set(kept) - set(cases):
        raise ValueError(f"no cases {sorted(unknown)}")
    return [
        pytest.param(value, id=name, marks=() if name in kept else pytest.mark.long)
        for name, value in cases.items()
    ]


def examples(short: int, whole: int) -> int:
    """How many examples hypothesis draws: ``short`` in ``make test``, ``whole`` elsewhere."""
    from hypothesis import settings  # absent on a GPU machine

    return short if settings.get_current_profile_name() == "fixed" else whole


def some_long(kept: object, *others: object) -> list[object]:
    """Parameters of which the first is ``kept``; the others are marked long."""
    return [kept, *(pytest.param(other, marks=pytest.mark.long) for other in others)]
