"""Users' own classes in the simulator: the examples, and classes that fail under all faults."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.simulator.__main__ import SLOW_S, main
from baton.simulator.run import run
from baton.simulator.scenarios import SCENARIOS, Scenario, with_extensions
from baton.simulator.shape import Shape

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "extend"
FAULTY = ROOT / "tests" / "extend"
OPTIONS = {
    "rack_policy": ("--policy", "rack_policy:RackPolicy"),
    "length_decider": ("--decider", "length_decider:LengthDecider"),
    "short_first": ("--prefill-order", "short_first:ShortFirst"),
}


@pytest.mark.parametrize("example", OPTIONS)
def test_an_example(example, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("THRESHOLD", "20")
    scenarios = ["--scenario", "crash", "--scenario", "adaptive"]
    assert main(["--seeds", "1", *scenarios, *OPTIONS[example]]) == 0
    printed = capsys.readouterr().out
    assert "crash: 1/1" in printed
    assert "adaptive: 1/1" in printed


def test_the_policy_keeps_handoffs_in_one_rack(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    plain = run(1, SCENARIOS["plain"])
    own = run(1, with_extensions(SCENARIOS["plain"], "rack_policy:RackPolicy", "", ""))
    assert plain["pairs in one rack"] < plain["pairs"]
    assert own["pairs in one rack"] == own["pairs"] > 0


@pytest.mark.parametrize("kind", ["Raises", "Nonsense"])
@pytest.mark.parametrize("scenario", ["plain", "crash-noise", "adaptive-all"])
def test_no_class_that_fails_harms_a_request(kind, scenario, monkeypatch):
    monkeypatch.chdir(FAULTY)
    name = f"faulty_classes:{kind}"
    failures: dict[str, str] = {}
    for seed in range(2):
        run(seed, with_extensions(SCENARIOS[scenario], name, name, name), failures=failures)
    assert set(failures) == {"policy.failed", "decider.failed", "prefill_order.failed"}
    assert "Traceback" in failures["policy.failed"]


def test_a_policy_that_returns_dead_workers(monkeypatch):
    monkeypatch.chdir(FAULTY)
    failures: dict[str, str] = {}
    scenario = replace(SCENARIOS["crash"], crashes=8, shape=Shape(prefill=3, decode=3))
    for seed in range(2):
        own = with_extensions(scenario, "faulty_classes:Remembers", "", "")
        run(seed, own, failures=failures)
    assert "which is none of the workers" in failures["policy.failed"]


def test_a_failure_is_printed_and_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.chdir(FAULTY)
    words = ["--seeds", "1", "--scenario", "plain", "--policy", "faulty_classes:Raises"]
    assert main(words) == 1
    assert "KeyError: 'no rack for " in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "warned"), [(SLOW_S, True), (1000.0, False)])
def test_slow_calls_are_warned_of(limit, warned, monkeypatch, capsys):
    monkeypatch.chdir(FAULTY)
    monkeypatch.setattr("baton.simulator.__main__.SLOW_S", limit)
    short = replace(SCENARIOS["plain"], requests=4)
    monkeypatch.setitem(SCENARIOS, "plain", short)
    words = ["--seeds", "1", "--scenario", "plain", "--policy", "faulty_classes:Slow"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert ("warning: policy faulty_classes:Slow takes " in printed) == warned
    assert "steps taken" not in printed


def test_without_classes_a_scenario_is_as_it_was():
    assert with_extensions(Scenario(), "", "", "") == Scenario()
