"""The dashboard and the alert rules name only metrics and labels that Baton exports."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import baton.deploy
from baton.gateway.metrics import GatewayMetrics
from baton.proto.wire.messages import Buckets, WorkerLoad, WorkerTimes
from baton.runtime.metrics.families import GAP_S, STEP_SECONDS

from ..router.conftest import Bench, make_config

FOLDER = Path(baton.deploy.__file__).parent / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
ALERTS = (FOLDER / "alerts.yml").read_text()
OF_EVERY_SERIES = {"job", "instance"}


def expressions() -> list[str]:
    panels = [target["expr"] for one in DASHBOARD["panels"] for target in one.get("targets", [])]
    alerts = re.findall(r"expr: (?:>-\n)?((?:.+\n)+?) +(?:for|labels):", ALERTS)
    assert len(alerts) == ALERTS.count("- alert:")
    return [*panels, *alerts]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every sample name, of a router that has served a request, and of a gateway."""
    bench = Bench(make_config())
    prefill, decode = bench.pair()
    load = WorkerLoad(histograms={STEP_SECONDS: Buckets([1, *[0] * len(GAP_S)], 0.1)})
    decode.beat(load=load)
    key, assign = bench.run()
    prefill.report(assign, times=WorkerTimes(computing=0.1, computed=0.2))
    decode.end(key, 10)
    names: dict[str, set[str]] = {}
    for family in [*bench.core.families(bench.now), *GatewayMetrics().families()]:
        labels = {*family.labels, *OF_EVERY_SERIES}
        if family.kind == "histogram":
            names[f"{family.name}_bucket"] = {*labels, "le"}
            names[f"{family.name}_sum"] = names[f"{family.name}_count"] = labels
        else:
            names[family.name] = labels
    return names


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_of_an_expression_exists(expression, exported):
    names = set(re.findall(r"\bbaton_\w+", expression))
    assert names
    assert names <= exported.keys()
    labels = set().union(*(exported[name] for name in names))
    matched = re.findall(r"[{,](\w+)\s*(?:=~|!~|!=|=)", expression)
    grouped = ", ".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)).split(", ")
    assert {*matched, *filter(None, grouped)} <= labels


def test_the_legends_show_labels_that_the_expression_keeps():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            kept = ", ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"])).split(", ")
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(kept)


def test_panels_do_not_overlap_and_have_their_own_ids():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'baton_router_uptime_seconds{{instance="a"}}'
        values: '0+60x30'
      - series: 'baton_workers{{role="prefill", state="ready"}}'
        values: '1x30'
      - series: 'baton_workers{{role="decode", state="ready"}}'
        values: '1x9 0x20'
      - series: 'baton_workers{{role="decode", state="dead"}}'
        values: '0x9 1x20'
      - series: 'baton_requests_total{{outcome="ok", reason="stop"}}'
        values: '0+90x30'
      - series: 'baton_requests_total{{outcome="failed", reason="worker_lost"}}'
        values: '0+10x30'
      - series: 'baton_worker_restarts_total{{worker="decode-0", role="decode"}}'
        values: '0x9 1+1x20'
    alert_rule_test:
      - {{eval_time: 5m, alertname: BatonNoReadyWorker, exp_alerts: []}}
      - {{eval_time: 5m, alertname: BatonDown, exp_alerts: []}}
      - {{eval_time: 5m, alertname: BatonWorkerRestarts, exp_alerts: []}}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 25m
        exp_samples:
          - {{labels: '{{alertname="BatonNoReadyWorker"}}', value: 1}}
          - {{labels: '{{alertname="BatonRequestsFail"}}', value: 1}}
          - {{labels: '{{alertname="BatonWorkerMissing"}}', value: 1}}
          - {{labels: '{{alertname="BatonWorkerRestarts"}}', value: 1}}
"""


def test_promtool_accepts_the_rules_and_they_fire_for_their_reason_alone(tmp_path):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    rules = FOLDER / "alerts.yml"
    checks = tmp_path / "checks.yml"
    checks.write_text(RULE_TESTS.format(rules=rules))
    for command in (["check", "rules", str(rules)], ["test", "rules", str(checks)]):
        done = subprocess.run([tool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
