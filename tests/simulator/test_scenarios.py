"""Every scenario over a few seeds, or over many in ``make test-all``."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from baton.simulator.__main__ import main
from baton.simulator.recording import observed
from baton.simulator.records import Record
from baton.simulator.run import Run, run
from baton.simulator.scenarios import SCENARIOS, Scenario
from baton.simulator.shape import Shape
from baton.simulator.violation import Violation

SEEDS = 3
"""Most runs in which the events of a scenario must all happen; one or two are enough today."""
FULL_SEEDS = 200
FIGURES = {
    "noise": ["lost", "duplicated", "reordered", "damaged"],
    "damage": ["damaged", "damaged_control"],
    "crash": ["replays"],
    "scarce": ["preemptions"],
    "hang": ["exits"],
    "stop": ["worker.suspect", "worker.returned"],
    "pauses": ["worker.suspect", "worker.returned"],
    "absent": ["worker.dead", "exits"],
    "twins": ["worker.refused"],
    "drain": ["drained"],
    "rolling": ["drained"],
    "roles": ["turned", "drained"],
    "roles-crash": ["turned", "replays"],
    "roles-noise": ["turned", "lost", "worker.suspect"],
    "rolling-noise": ["drained"],
    "drains": ["drained"],
    "orphans": ["ended orphaned"],
    "poison": ["poisoned", "ended poisoned"],
    "deadline": ["ended deadline_exceeded"],
    "slow": ["full"],
    "narrow": ["credits"],
    "failover": ["moves", "looks"],
    "failover-noise": ["moves", "lost"],
    "failover-stop": ["moves"],
    "cut-off": ["worker.suspect", "worker.returned"],
    "isolated": ["moves", "lost"],
    "failover-all": ["moves", "exits"],
    "cut": ["cuts", "lost", "replays"],
    "cut-narrow": ["cuts", "lost", "replays"],
    "cut-in-place": ["cuts", "lost", "replays"],
    "cuts-noise": ["cuts", "lost", "replays"],
    "embed": ["vectors", "batches", "ended internal", "ended cancelled"],
    "embed-noise": ["vectors", "replays", "ended internal", "lost", "duplicated"],
    "pictures": ["pictures", "previews", "ended cancelled"],
    "pictures-crash": ["pictures", "replays"],
    "pictures-scarce": ["pictures", "replays"],
    "raises": ["raised", "faults"],
    "raises-router": ["raised", "faults", "ended internal"],
    "raises-prefill": ["raised", "faults"],
    "raises-decode": ["raised", "faults"],
    "raises-links": ["raised", "faults"],
    "rogue": ["rogue_received Rejected", "rogue_received Stale", "rogue_refused", "foreign_frames"],
    "rogue-failover": ["rogue_received Adopt", "rogue_malformed"],
    "rogue-greedy": ["surrendered"],
    "adaptive": ["local", "credits", "replays"],
    "colocated": ["local", "abandoned", "lost"],
    "colocated-crash": ["local", "replays"],
    "colocated-scarce": ["local", "preemptions", "grammars", "replays"],
    "colocated-router": ["local", "moves"],
    "colocated-raises": ["local", "raised", "faults"],
    "colocated-rogue": ["local", "surrendered"],
    "mixed": ["local", "credits", "replays"],
    "mixed-all": ["local", "credits", "grammars"],
    "mixed-rogue": ["local", "rogue_received Rejected"],
    "structured": ["grammars", "grammars_dropped", "preemptions", "replays"],
}
"""The events that a scenario must contain to deserve its name."""
UNHARMED = ("plain", "noise", "router", "scarce", "narrow", "clients", "rolling", "twins")
"""Nothing dies or stops here that has a request, so nothing may have to be computed again."""


TABLES = ("device", "misfit", "router", "plain", "noise", "rolling-pauses")


BY_HAND = {"request: decoding hand over", "request: decoding reassign"}
"""Steps too rare here: the tests of the router take them."""


def play(name: str, seeds: range) -> Counter[str]:
    sums: Counter[str] = Counter()
    for seed in seeds:
        sums += run(seed, SCENARIOS[name])
    return sums


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    sums: Counter[str] = Counter()
    runs, missing = 0, FIGURES.get(name, [])
    while not runs or (missing and runs < SEEDS):
        sums += run(runs, SCENARIOS[name])
        runs, missing = runs + 1, [figure for figure in missing if not sums[figure]]
    assert not missing, sums
    least = 10 if name.startswith("lives") else 100
    assert sums["tokens"] > least * runs or sums["vectors"] > 30 * runs
    if name in UNHARMED:
        assert not sums["replays"]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_over_many_seeds(name):
    play(name, range(1000, 1000 + FULL_SEEDS))


def test_every_declared_step_is_taken():
    with observed() as coverage:
        for name in (*TABLES, "scarce-crash", "all", "colocated"):
            play(name, range(3, 5))
        # A second router follows an attempt.
        play("absent-all", range(8, 10))
        play("failover", range(4, 6))
        a_router_restarts_while_workers_drain().play()
        a_prompt_of_whole_blocks_comes_again().play()
        what_nobody_has_any_more_is_cancelled().play()
    taken, missing = coverage.report()
    assert missing <= BY_HAND
    assert len(taken) > 33


def a_router_restarts_while_workers_drain():
    """So that they send Hello while they drain."""
    scenario = Scenario(requests=6, load_s=0.1, answer=200, shape=Shape(restart_s=0.05))

    def strike(cluster):
        for worker in cluster.workers:
            worker.drain()
        cluster.routers[0].crash()

    return Run(1, scenario, at_event={500: strike})


def a_prompt_of_whole_blocks_comes_again():
    """So that all of it is cached where it is handed over."""
    shape = Shape(prefill=1, decode=1, clients=1)
    run = Run(1, Scenario(requests=0, load_s=0.4, shape=shape))
    client = run.cluster.clients[0]
    for when in (0.1, 0.3):
        record = Record(f"at {when}", list(range(1, 17)), 4)
        run.cluster.network.at(when, partial(client.submit, record))
    return run


def what_nobody_has_any_more_is_cancelled():
    """While the router, restarted as all workers were, still waits for a Hello that lists it."""
    run = Run(1, Scenario(requests=6, load_s=0.1, answer=200))
    cluster = run.cluster

    def strike():
        for node in [*cluster.routers, *cluster.workers]:
            node.crash()

    def cancel():
        for client in cluster.clients:
            for record in list(client.live.values()):
                client.cancel(record, report=True)

    cluster.network.at(0.12, strike)
    cluster.network.at(1.0, cancel)
    return run


def test_a_run_is_repeated_exactly():
    scenario = SCENARIOS["all"]
    assert run(11, scenario) == run(11, scenario)
    assert run(11, scenario) != run(12, scenario)


def test_the_command_prints_figures_and_what_failed(capsys, monkeypatch):
    assert main(["--seeds", "1", "--scenario", "plain"]) == 0
    assert "plain: 1/1" in capsys.readouterr().out

    def fail(seed, *_arguments):
        raise Violation(f"seed {seed}: wrong tokens")

    monkeypatch.setattr("baton.simulator.__main__.run", fail)
    assert main(["--seeds", "2", "--scenario", "plain"]) == 1
    text = capsys.readouterr().out
    assert "plain: 0/2" in text
    assert "seed 1: wrong tokens" in text
