"""``baton bench`` against a real cluster, over its own protocol and over HTTP."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

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
