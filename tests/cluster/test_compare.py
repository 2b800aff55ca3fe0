"""``baton bench --compare`` with real clusters: equal tokens, rows of all requests, Ctrl-C."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from baton.cli import compare
from baton.cli.command import main
from baton.forecast import observe
from baton.forecast.beside import SEEDS

from ..processes import alive, wait_until
from .conftest import command_environment

pytestmark = pytest.mark.cluster
LOAD = ("--requests=6", "--concurrency=3", "--input=20-40", "--output=5-9", "--warmup=1")


def test_modes_give_equal_tokens_in_alternating_rounds(lasting_cluster, tmp_path, capsys):
    """Two clusters that it starts, and one that runs already."""
    running = lasting_cluster(prefill=1, decode=2)
    files = {"--json": tmp_path / "a.json", "--plot": tmp_path / "a.svg"}
    names = [f"{name}={path}" for name, path in files.items()]
    specs = f"1:1,colocated:2,there={running.address}"
    words = ["bench", f"--compare={specs}", "--rounds=2", "--slo=ttft=60s,itl=60s", *LOAD, *names]
    settings = tmp_path / "a.toml"
    settings.write_text('kv_memory = "32MiB"\nmetrics_port = 1\n')
    assert main([*words, f"--config={settings}", "--seed=3"]) == 0
    printed = capsys.readouterr().out
    assert "tokens: all 36 answers equal" in printed and "12 ok" in printed
    found = json.loads(files["--json"].read_text())
    order = ["1:1", "colocated:2", "there", "colocated:2", "there", "1:1"]
    assert [one["configuration"] for one in found["runs"]] == order
    assert found["equal_tokens"] and len(found["rows"]) == 36
    of = {}
    for row in found["rows"]:
        of.setdefault((row["round"], row["request"]), {})[row["configuration"]] = row
        assert row["output_tokens"] == len(row["answer"]) == 1 + len(row["itl"])
    for number in range(1, 7):
        first, second = of[1, number], of[2, number]
        assert len({str(row["answer"]) for row in first.values()}) == 1
        same = first["1:1"]["prompt_tokens"], first["1:1"]["output_tokens"]
        assert same == (second["1:1"]["prompt_tokens"], second["1:1"]["output_tokens"])
    assert all(row["prefill"] == row["decode"] for row in found["rows"][6:12])
    counted = {one["configuration"]: one["counters"] for one in found["runs"][:3]}
    assert counted["1:1"]["handoffs"] == counted["colocated:2"]["local"] == 6
    assert counted["1:1"]["handoff_bytes"] > 0 == counted["colocated:2"]["handoffs"]
    assert counted["1:1"]["kv_bytes"] == 2 * 32 << 20
    assert all(one["summary"]["attained"] == 1.0 for one in found["runs"])
    ET.fromstring(files["--plot"].read_text())
    running.wait_idle()


def test_a_forecast_stands_beside_what_was_measured(lasting_cluster, tmp_path, capsys, monkeypatch):
    """Of the cluster that was started; the simulator does not have the one that ran already."""
    monkeypatch.setattr(observe, "BUDGET_S", 0.0)  # one round
    address, file = lasting_cluster(prefill=1, decode=2).address, tmp_path / "a.json"
    load = ("--requests=4", "--rates=20", "--input=20", "--output=5", "--warmup=1")
    words = ["bench", f"--compare=1:1,there={address}", "--rounds=1", "--forecast", *load]
    assert main([*words, f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    assert "simulated with steps measured on this machine" in printed
    found = json.loads(file.read_text())["forecast"]
    assert list(found["configurations"]) == ["1:1"]
    assert found["configurations"]["1:1"]["ttft"]["count"] == 4 * SEEDS
    assert found["configurations"]["1:1"]["tpot"]["mean"] > 0
    assert "calibrated in a running cluster: prompts take" in printed
    (learned,), (seen,) = found["learned"], found["calibrations"]
    assert learned["service"]["cores"] >= 1 and learned["decode"] > 0
    asked = {(one["tokens"], one["others"]) for one in seen["prompts"]}
    assert asked >= {(16, 0.0), (64, 0.0), (256, 0.0)}
    assert 1 in {one["rows"] for one in seen["streams"]}


def test_different_tokens_are_an_error(lasting_cluster, monkeypatch, capsys):
    """One token of one configuration's answers is changed where it arrives."""
    address = lasting_cluster(prefill=1, decode=2).address
    taken = compare.sent

    async def falsified(*arguments):
        records = await taken(*arguments)
        falsified.runs += 1
        if falsified.runs == 2:
            records[4].answer[3] += 1
        return records

    falsified.runs = 0
    monkeypatch.setattr(compare, "sent", falsified)
    specs = f"--compare=a={address},b={address}"
    assert main(["bench", specs, "--rounds=1", *LOAD]) == 1
    caught = capsys.readouterr()
    said = "the tokens of request 5 in round 1 differ between a and b, from token 4 on"
    assert said in caught.err and f"tokens: {said}" in caught.out


def test_ctrl_c_ends_all_processes_and_shows_what_there_is(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")  # a socket's path must be short
    words = ["bench", "--compare=1:1,colocated:1", *LOAD, f"--json={folder / 'a.json'}"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(folder / "err").open("wb"),
        env=command_environment(folder),
        text=True,
    )
    try:
        first = lambda: "round 1, 1:1" in (folder / "err").read_text()  # noqa: E731
        wait_until(lambda: first() or process.poll() is not None, 120.0, "the first run")
        assert first(), (folder / "err").read_text()
        wait_until(lambda: descendants(process.pid), 60.0, "the second cluster")
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, (folder / "err").read_text()
    assert "of 6 runs" in printed and "TTFT p50, ms" in printed and "6 ok" in printed
    assert len(json.loads((folder / "a.json").read_text())["rows"]) >= 6
    wait_until(lambda: not any(map(alive, started)), 20.0, "all processes to end")


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children = (task / "children").read_text().split()
        found += [one for child in map(int, children) for one in (child, *descendants(child))]
    return found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--compare=2:0,1:1"], "'2:0': each number of workers must be at least 1"),
        (["--compare=colocated:0,1:1"], "'colocated:0': each number of workers"),
        (["--compare=best:2,1:1"], "'best:2' is not a configuration"),
        (["--compare=1:1,1:2", "--temperature=1"], "--compare cannot be combined with --temp"),
        (["--compare=1:1,1:2", "--concurrency=1,2"], "--compare takes one load"),
        (["--compare=1:1,1:2", "/nope/model"], "no model folder /nope/model"),
        (["--compare=a=ipc:///x,b=ipc:///y", "model"], "no cluster would start with the model"),
        (["--rounds=2"], "--rounds needs --compare"),
        (["--forecast"], "--forecast needs --compare"),
        (["--compare=1:1,1:2", "--forecast"], "--forecast needs --rates or --trace"),
        (
            ["--compare=a=ipc:///a,b=ipc:///b", "--rates=1", "--forecast"],
            "--forecast needs a configuration to start",
        ),
        (["--slo=ttft=1s", "--slo-ttft=1", "--slo-itl=1"], "--slo cannot be combined"),
        (["--slo=ttft=0s"], "is not limits such as ttft=1s,itl=50ms"),
        (["--compare=1:1,1:2", "--slo=ttft=1s,ttft=2s"], "is not limits such as"),
    ],
)
def test_wrong_calls_are_one_line(options, sentence, capsys):
    try:
        code = main(["bench", *options])
    except SystemExit as ended:
        code = ended.code
    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and sentence in line
