"""``baton bench`` against a real cluster, over its own protocol and over HTTP."""

import asyncio
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from baton.cli import bench, compare
from baton.cli.command import main

from .http import Gateway

pytestmark = pytest.mark.cluster
TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "mooncake_conversation.csv.gz"


@pytest.fixture(scope="module")
def running(lasting_cluster):
    return lasting_cluster(prefill=1, decode=2)


def test_a_sweep_with_cancellations_frees_everything(running, tmp_path, capsys):
    files = {"--json": tmp_path / "a.json", "--plot": tmp_path / "a.svg"}
    options = ["--concurrency=1,6", "--requests=16", "--input=8-40", "--output=12", "--warmup=1"]
    limits = ["--slo-ttft=60", "--slo-itl=60"]
    cancels = ["--cancel-share=0.4", "--cancel-delay=0.0001", "--seed=5"]
    names = [f"{name}={path}" for name, path in files.items()]
    assert main(["bench", running.address, *options, *limits, *cancels, *names]) == 0
    printed = capsys.readouterr().out
    assert "8-40 tokens in, 12 out, closed loop, seed 5" in printed and "at a time: 6" in printed
    found = json.loads(files["--json"].read_text())
    assert [run["load"] for run in found["runs"]] == [1.0, 6.0]
    assert found["options"]["input"] == "8-40"
    for run in found["runs"]:
        outcomes = run["outcomes"]
        assert outcomes["ok"] + outcomes["cancelled"] == run["requests"] == 16
        assert outcomes["cancelled"] > 0 and run["attained"] == outcomes["ok"] / 16
        assert run["ttft"]["count"] >= outcomes["ok"] and run["ttft"]["p50"] > 0
        assert run["itl"]["count"] >= 11 * outcomes["ok"]
    ET.fromstring(files["--plot"].read_text())

    running.wait_idle()  # also after the cancelled requests


def test_open_loops_of_rates_and_of_a_trace(running, capsys):
    address = running.address
    assert main(["bench", address, "--rates=200", "--requests=10", "--output=3"]) == 0
    assert "10 ok" in capsys.readouterr().out
    trace = [f"--trace={TRACE}", "--trace-scale=0.005", "--trace-speed=500", "--requests=12"]
    assert main(["bench", address, *trace, "--warmup=0"]) == 0
    assert "12 ok" in capsys.readouterr().out


def killed_in_mid_run(monkeypatch, module, cluster, *, run):
    """Kill the cluster in this run of ``module``, and count a server as lost after a second."""
    monkeypatch.setattr("baton.loadgen.run.LOST_S", 1.0)
    taken, runs = module.sent, []

    async def watched(arguments, runner, jobs, load):
        runs.append(load)
        before, sending = (
            runner.finished,
            asyncio.ensure_future(taken(arguments, runner, jobs, load)),
        )
        if len(runs) == run:
            while runner.finished < before + 5:
                await asyncio.sleep(0.01)
            cluster.process.kill()
        return await sending

    monkeypatch.setattr(module, "sent", watched)


def test_a_killed_cluster_ends_the_measurement(start_cluster, tmp_path, monkeypatch, capsys):
    """With the tables and the file of what was measured, also of the load before."""
    cluster, file = start_cluster(prefill=1, decode=1).wait_ready(), tmp_path / "a.json"
    killed_in_mid_run(monkeypatch, bench, cluster, run=2)
    options = ["--rates=200,5,5", "--requests=400", "--output=3", f"--json={file}"]
    assert main(["bench", cluster.address, *options]) == 1
    caught = capsys.readouterr()
    first, second = json.loads(file.read_text())["runs"]
    assert first["outcomes"]["ok"] == 400
    assert second["outcomes"]["ok"] >= 5 and second["outcomes"]["failed"] > 0
    assert f"{400 - second['requests']} of 400 requests were not sent" in caught.err
    assert "requests/s: 5\n" in caught.out and f"{second['outcomes']['ok']} ok" in caught.out
    assert "TTFT p50" in caught.out  # of the loads beside each other


def test_a_killed_cluster_ends_a_comparison(start_cluster, monkeypatch, capsys):
    cluster = start_cluster(prefill=1, decode=1).wait_ready()
    killed_in_mid_run(monkeypatch, compare, cluster, run=2)
    configurations = f"--compare=a={cluster.address},b={cluster.address}"
    options = ["--rates=40", "--requests=320", "--output=3", "--rounds=1"]
    assert main(["bench", configurations, *options]) == 1
    caught = capsys.readouterr()
    assert "1 of 2 runs" in caught.out and "320 ok" in caught.out
    assert "round 1, b: " in caught.err
    assert "baton: b: no connection to the server" in caught.err
    assert "of 320 requests were not sent" in caught.err


def test_over_http(running, tmp_path, capsys):
    gateway = Gateway(running, tmp_path).wait_ready()
    try:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        file = tmp_path / "a.json"
        for endpoint in ("completions", "chat"):
            options = [f"--endpoint={endpoint}", "--requests=6", "--output=5", f"--json={file}"]
            assert main(["bench", url, "--concurrency=3", *options]) == 0
            (run,) = json.loads(file.read_text())["runs"]
            assert run["outcomes"]["ok"] == 6
            assert run["output_tokens"] == 30
            assert run["prompt_tokens"] >= 6 * 64
        assert main(["bench", url, "--texts=2"]) == 2
        assert "--texts needs embeddings" in capsys.readouterr().err
        assert main(["bench", url, "--model=nope"]) == 2
        assert "the server has no model 'nope'" in capsys.readouterr().err
    finally:
        gateway.end()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rates=1", "--concurrency=1"], "--concurrency cannot be combined with --rates"),
        (["--trace-speed=2"], "--trace-speed needs --trace"),
        (["--json=/nope/a.json"], "--json /nope/a.json: the folder does not exist"),
        (["--trace=a.csv", "--texts=2"], "--texts cannot be combined with --trace"),
        (["--texts=0"], "--texts must be 1 to 2048"),
        (["ipc:///nope/x", "--requests=0"], "--requests must be at least 1"),
        (["http://127.0.0.1:1/v1"], "cannot connect to 127.0.0.1:1"),
        (["localhost:80"], "must start with"),
    ],
)
def test_wrong_calls_are_one_line(options, sentence, capsys):
    assert main(["bench", *options]) in (1, 2)
    line = capsys.readouterr().err
    assert sentence in line and line.count("\n") == 1
