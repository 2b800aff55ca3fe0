"""The table of modes: its bars, and the regret of decisions."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from baton.benchmarks.modes import Cell, cells, line, regret
from baton.forecast.cluster import Slo
from baton.forecast.goodput import EDF, Cluster, Trials
from baton.forecast.service import ServiceModel
from baton.loadgen.traces import Arrival

APART, MIXED = Cluster("disaggregated", 1, 1, EDF), Cluster("adaptive", 1, 1, EDF)
CELL = Cell("t", "tight", "loose", 1.0, (0.9, APART), (1.3, MIXED), 1.5, 0.0)


@pytest.mark.parametrize(
    ("cell", "missed"),
    [
        (CELL, ""),
        (replace(CELL, adaptive=(1.2, MIXED)), "1.20 of 1.25"),  # the pure modes are close
        (replace(CELL, disaggregated=(0.7, APART), adaptive=(0.99, MIXED)), ""),
        (replace(CELL, disaggregated=(0.7, APART), adaptive=(0.97, MIXED)), "0.97 of 0.98"),
        (replace(CELL, disaggregated=(1.25, APART)), "1.04 of 1.25"),
        (replace(CELL, regret=0.06), "regret 6.0%"),
    ],
)
def test_a_cell_names_the_bars_that_it_misses(cell, missed):
    assert "; ".join(cell.missed).endswith(missed)
    assert bool(cell.missed) is bool(missed)
    assert f"{cell.adaptive[0]:.2f} (1:1)" in line(cell)


def test_a_folder_of_traces_gives_nine_cells_each(tmp_path, capsys):
    rows = [f"{50 * number},{100 + number % 7 * 300},{2 + number % 5}" for number in range(60)]
    text = "timestamp_ms,input_length,output_length\n" + "\n".join(rows)
    (tmp_path / "mine.csv.gz").write_bytes(gzip.compress(text.encode()))
    found = cells("mine", tmp_path, workers=2, most=40)
    assert len({(cell.ttft, cell.itl) for cell in found}) == 9
    assert len(capsys.readouterr().out.splitlines()) == 9
    for cell in found:
        assert (
            cell.adaptive[0] >= cell.colocated
        )  # in the order of arrival, without a prefill worker
        assert 0 <= cell.regret <= 1


def test_the_regret_of_wrong_decisions_is_seen(monkeypatch):
    trace = [Arrival(0.15 * number, 1500, 3) for number in range(120)]
    trials, slo = Trials(trace, ServiceModel()), Slo(0.3, 0.03)
    assert regret(trials, MIXED, slo, 1.0) < 0.05
    wrong = property(lambda costs: costs.alone > costs.over_prefill)
    monkeypatch.setattr("baton.router.decider.Costs.prefers_local", wrong)
    assert regret(trials, MIXED, slo, 1.0) > 0.2
