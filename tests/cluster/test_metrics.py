"""Metrics of a running cluster: the router's and a gateway's, read as Prometheus reads them."""

import http.client
import json
import shutil
import subprocess
import urllib.parse
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import baton.deploy
from baton.deploy.plan.addresses import free_ports

from .conftest import wait_until
from .driver import Job, ask_all, greedy
from .http import Gateway

pytestmark = pytest.mark.cluster
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def port():
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def pools(shared_cluster, port):
    return shared_cluster(prefill=1, decode=1, metrics_port=port, worker_timeout=5.0)


@pytest.fixture(scope="module")
def gateway(pools, tmp_path_factory):
    one = Gateway(pools, tmp_path_factory.mktemp("g"), "--metrics-compat=vllm").wait_ready()
    yield one
    assert one.end() == 0, one.text()


def scrape(port: int) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.status == 200
        return response.read().decode()


def samples(text: str) -> dict[str, float]:
    """The sum of each name over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_the_router_counts_what_was_served(pools, port):
    with pools.client() as client:
        ask_all(client, [Job([5, 6, 7, 8 + n], greedy(10)) for n in range(6)])

    def counted():
        found = samples(scrape(port))
        # Heartbeats bring what workers counted; the handoff's report may follow the answer.
        done = found["baton_worker_generated_tokens_total"] >= 60
        return done and found["baton_handoff_seconds_count"] >= 6 and found

    found = wait_until(counted, what="six requests in the metrics")
    assert found["baton_requests_total"] >= 6
    assert found["baton_generated_tokens_total"] >= 60
    assert found["baton_time_to_first_token_seconds_count"] >= 6
    assert found["baton_inter_token_latency_seconds_count"] > 0  # runs of several tokens
    # Not of a request whose record was dropped before its handoff's report arrived.
    assert found["baton_request_queue_seconds_count"] >= 1
    assert found["baton_request_prefill_seconds_count"] >= 1
    assert found["baton_worker_step_seconds_count"] > 0
    assert not any(name.startswith("vllm") for name in found)


def test_the_gateway_measures_at_its_edge_and_has_vllm_names(gateway):
    before = samples(scrape(gateway.port))
    gateway.post("/v1/completions", **COMPLETION)
    gateway.stream("/v1/completions", **COMPLETION)
    assert gateway.ask("GET", "/v1/nothing")[0] == 404
    text = scrape(gateway.port)
    found = samples(text)
    grown = {name: found[name] - before.get(name, 0.0) for name in found}
    assert grown["baton_gateway_time_to_first_token_seconds_count"] == 1  # of the stream alone
    assert grown["baton_gateway_request_duration_seconds_count"] == 2
    assert grown["baton_gateway_generated_tokens_total"] == 24
    # Of 12 tokens; tokens that arrive together have no gap between them.
    assert 0 < grown["baton_gateway_inter_token_latency_seconds_count"] < 12
    assert 'baton_gateway_requests_total{code="404",route="other"}' in text
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert "vllm:kv_cache_usage_perc" in found


def test_totals_survive_the_death_of_a_worker(pools, port):
    with pools.client() as client:
        ask_all(client, [Job([5, 6, 7], greedy(10))])
        counted = wait_until(
            lambda: samples(scrape(port))["baton_worker_generated_tokens_total"], what="tokens"
        )
        pid = pools.pids()["decode-0"]
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        pools.wait_replaced("decode-0", pid)
        found = samples(scrape(port))
        assert found["baton_worker_generated_tokens_total"] >= counted
        assert found["baton_worker_restarts_total"] == 1


def test_promtool_finds_nothing_wrong(pools, port, gateway):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    own = [line for line in scrape(gateway.port).splitlines() if "vllm:" not in line]
    for text in (scrape(port), "\n".join([*own, ""])):
        done = subprocess.run(
            [tool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.long
def test_prometheus_scrapes_the_cluster_and_evaluates_board_and_alerts(
    pools, port, gateway, tmp_path
):
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    files = Path(baton.deploy.__file__).parent / "monitoring"
    own = free_ports(1)[0]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(files / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": "baton",
                "static_configs": [{"targets": [f"127.0.0.1:{port}", f"127.0.0.1:{gateway.port}"]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                program,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: answers(own, "up") == [1.0, 1.0], what="two targets that are up")
        with pools.client() as client:
            ask_all(client, [Job([9, 8, 7, 6 + n], greedy(10)) for n in range(4)])
        gateway.stream("/v1/completions", **COMPLETION)
        board = json.loads((files / "grafana-dashboard.json").read_text())
        may_be_empty = {"Refused requests", "Restarts and preemptions in 15 min"}
        wait_until(lambda: empty_panels(own, board) <= may_be_empty, what="data in all panels")
        groups = ask(own, "/api/v1/rules")["groups"]
        health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        assert len(health) == 12
        wait_until(
            lambda: (
                {
                    rule["health"]
                    for group in ask(own, "/api/v1/rules")["groups"]
                    for rule in group["rules"]
                }
                == {"ok"}
            ),
            what="all rules to be evaluated",
        )
    finally:
        server.terminate()
        server.wait(60)


def empty_panels(port: int, board: dict) -> set[str]:
    """The titles of the dashboard's panels whose expressions have no values."""
    shown: dict[str, int] = {}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".+")
            found = answers(port, expression)
            shown[panel["title"]] = shown.get(panel["title"], 0) + len(found)
    return {title for title, count in shown.items() if not count}


def ask(port: int, path: str):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        found = json.loads(connection.getresponse().read())
    assert found["status"] == "success", found
    return found["data"]


def answers(port: int, expression: str) -> list[float]:
    """The values of an expression now; none while Prometheus is starting."""
    try:
        data = ask(port, f"/api/v1/query?query={urllib.parse.quote(expression)}")
    except (ConnectionError, json.JSONDecodeError):
        return []
    return [float(one["value"][1]) for one in data["result"]]
