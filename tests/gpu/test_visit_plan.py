"""The order of a visit to a GPU, what fits into a call, and what is left after an interruption."""

from __future__ import annotations

import pytest

from baton.benchmarks.gpu.parts import Part
from baton.benchmarks.gpu.visit import PLAN
from baton.benchmarks.gpu.visit_plan import (
    CALL_S,
    TRIES,
    VISIT_S,
    Planned,
    Progress,
    call_seconds,
    next_fitting,
    outline,
    waiting,
)

PARTS = [Part(name, "", limit) for name, limit in (("a", 100), ("b", 300), ("c", 50))]
PLANNED = [Planned(part, usual, "") for part, usual in zip(PARTS, (0, 200, 0), strict=True)]


def names(parts: list[Part]) -> list[str]:
    return [part.name for part in parts]


def test_a_part_is_passed_over_only_for_one_that_fits() -> None:
    assert next_fitting(PARTS, 300) is PARTS[0]
    assert next_fitting(PARTS[1:], 300) is PARTS[1]
    assert next_fitting(PARTS[1:], 299) is PARTS[2]
    assert next_fitting(PARTS, 49) is None


def test_interrupted_parts_come_last_and_not_for_ever() -> None:
    assert names(waiting(PARTS, {"b"}, {})) == ["a", "c"]
    assert names(waiting(PARTS, set(), {"a": 1})) == ["b", "c", "a"]
    assert names(waiting(PARTS, set(), {"a": TRIES})) == ["b", "c"]


def test_the_visit_bounds_its_last_call() -> None:
    assert (
        call_seconds(0) == CALL_S and call_seconds(0, 60) == 60 and call_seconds(0, 9999) == CALL_S
    )
    assert call_seconds(VISIT_S - 100) == 100
    assert call_seconds(VISIT_S + 1) == 0


def test_a_killed_call_is_charged_for_its_longest_part() -> None:
    limits = {part.name: part.limit_s for part in PARTS}
    killed = Progress(1, 40.0, {"a": 1000.0, "b": 1010.0}, {"b": 1})
    later = killed.resumed(limits, now=9999.0)
    assert later == Progress(2, 340.0, {}, {"a": 1, "b": 2})
    assert killed.resumed(limits, now=1030.0).spent_s == 70.0
    assert killed.resumed(limits, now=0.0).spent_s == 40.0  # the clock was set back
    assert killed.interrupted(90.0) == Progress(1, 90.0, {}, {"a": 1, "b": 2})
    assert Progress(1, 40.0).resumed(limits, now=9999.0) == Progress(2, 40.0)


def test_progress_survives_its_file() -> None:
    progress = Progress(2, 3.5, {"a": 1.0}, {"b": 1})
    assert Progress.from_json(progress.to_json()) == progress
    for wrong in (None, [], {"calls": 1}, {**progress.to_json(), "begun": [1]}):
        with pytest.raises((TypeError, ValueError, KeyError)):
            Progress.from_json(wrong)


def test_the_outline_splits_calls() -> None:
    found = [(call, at, each.part.name) for call, at, each in outline(PLANNED, 320)]
    # b's budget does not fit behind a; c does. In the next call b takes its usual time.
    assert found == [(1, 0, "a"), (1, 100, "c"), (2, 0, "b")]
    large = Planned(Part("large", "", 9999), 0, "")
    assert [(call, each.part.name) for call, _, each in outline([large, *PLANNED])] == [
        (1, "a"), (1, "b"), (1, "c"), (0, "large"),
    ]  # fmt: skip


def test_the_plan_is_made_for_thirteen_minutes() -> None:
    order = [each.part.name for each in PLAN]
    assert len({*order}) == len(order)
    # Kernels that nothing has compiled would be compiled in every part; a hang costs the last one.
    assert order[0] == "compile" and order[-1] == "words"
    fresh = {"kinds", "decode", "draw", "prefill", "products", "fp8", "cluster", "modes"}
    assert max(order.index(name) for name in fresh) < order.index("model")
    assert all(each.usual_s < each.part.limit_s <= CALL_S for each in PLAN)
    assert order.index("int8") < order.index("model")
    calls = [(call, each.part.name) for call, _, each in outline(PLAN)]
    assert {call for call, _ in calls} == {1, 2}
    # Also if every part that has never run takes all of its budget, those are in the first call.
    assert fresh <= {name for call, name in calls if call == 1}
