"""``baton plan`` on a small trace."""

from __future__ import annotations

import json
import shlex

import pytest

from baton.cli.command import build_parser, main
from baton.cli.serve import settings_of
from baton.deploy.config import demo_model_folder
from baton.deploy.plan.plan import decode_budget
from baton.forecast import observe
from baton.forecast.cluster import Slo
from baton.forecast.goodput import CHUNK_TOKENS, EDF, Cluster
from baton.forecast.service import ServiceModel

TRACE = "timestamp_ms,input_length,output_length\n" + "".join(
    f"{100 * number},{200 + 37 * number % 500},{2 + number % 30}\n" for number in range(80)
)
LIMITS = "ttft=1s,itl=60ms"
MODES = {"colocated", "disaggregated", "adaptive"}


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    monkeypatch.setattr(observe, "BUDGET_S", 0.0)  # one round


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "load.csv"
    path.write_text(TRACE)
    return str(path)


def plan_of(folder, load, workers):
    """Return a plan for 60 equal requests; ``load``: milliseconds apart, prompt and output."""
    apart, rest = load.split(",", 1)
    path = folder / "load.csv"
    rows = "".join(f"{int(apart) * number},{rest}\n" for number in range(60))
    path.write_text("timestamp_ms,input_length,output_length\n" + rows)
    limits = ["--workers", str(workers), "--step-times", "h100x2-70b"]
    return ["plan", "m", "--trace", str(path), *limits]


def planned(capsys, trace, *more):
    words = ["plan", "m", "--trace", trace, "--workers", "2", "--slo", LIMITS, *more]
    code = main(words)
    return code, capsys.readouterr()


def test_the_table_ends_with_the_command(capsys, trace):
    code, output = planned(capsys, trace, "--step-times", "h100x2-70b")
    assert code == 0
    lines = output.out.splitlines()
    assert "80 requests" in lines[0] and "60 ms" in lines[0]
    rows = [line.split() for line in lines[3:-2]]
    assert {row[0] for row in rows} == MODES
    assert [row[6] for row in rows].count("-") == 1
    goodput = [float(row[5]) for row in rows]
    assert goodput == sorted(goodput, reverse=True)
    assert lines[-1].startswith(f"baton serve m --mode {rows[0][0]} ")


def test_the_command_gives_workers_the_steps_that_were_simulated(capsys, tmp_path):
    """Long prompts, so that a decode worker which computes them needs more than 512 tokens."""
    words = plan_of(tmp_path, "400,6000,40", workers=2)
    assert main([*words, "--slo", "ttft=20s,itl=1s"]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    settings = settings_of(build_parser(["serve"]).parse_args(command[1:]))
    assert settings.mode != "disaggregated"
    assert decode_budget(settings) == CHUNK_TOKENS
    simulated = Cluster(settings.mode, settings.prefill, settings.decode, EDF)
    slo = Slo(settings.slo_ttft, settings.slo_itl)
    assert simulated.setup(slo, settings.step_time).token_budget == decode_budget(settings)


def test_a_running_cluster_gets_the_commands_that_change_its_roles(capsys, tmp_path):
    words = plan_of(tmp_path, "500,9000,2", workers=3)
    words += ["--slo", "ttft=5s,itl=1s", "--now", "1:2"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    head, move = lines[-4:-2]
    assert head.startswith("disaggregated with changes of role: goodput ") and "(+" in head
    assert move == "now: baton role decode-1 prefill"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["moves"]
    assert found["moves"] == [{"at": 0.0, "worker": "decode-1", "role": "prefill"}]
    assert found["goodput"] > 1.5 * found["goodput_now"]


def test_a_running_cluster_of_another_size_is_refused_before_anything_is_measured(capsys, trace):
    words = ["plan", "no-model", "--trace", trace, "--workers", "3", "--slo", LIMITS]
    assert main([*words, "--now", "2:2"]) == 2
    assert "another number of workers" in capsys.readouterr().err


def test_json_has_all_and_its_times_are_read_again(capsys, trace, tmp_path):
    _, output = planned(capsys, trace, "--step-times", "h100x2-70b", "--json")
    found = json.loads(output.out)
    assert found["step_times"]["kv_tokens"] == ServiceModel().kv_tokens
    assert {one["mode"] for one in found["choices"]} == MODES
    assert found["choices"][0]["worse"] == 0
    again = tmp_path / "times.json"
    again.write_text(output.out)
    _, output = planned(capsys, trace, "--step-times", str(again), "--json")
    assert json.loads(output.out) == found


def test_the_steps_of_the_model_are_measured(capsys, trace):
    words = ["plan", str(demo_model_folder()), "--trace", trace, "--workers", "2"]
    assert main([*words, "--slo", LIMITS, "--requests", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 20
    assert found["step_error"] >= 0
    assert 0 < found["step_times"]["prefill_token_s"] < 0.1
    assert found["calibration"]["decode"] > 0
    assert found["step_times"]["cores"] >= 1


def test_requests_beyond_the_context_are_counted(capsys, trace, tmp_path):
    _, output = planned(capsys, trace, "--step-times", "h100x2-70b", "--json")
    found = json.loads(output.out)
    assert (found["shortened"], output.err) == (0, "")
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"step_times": found["step_times"] | {"max_length": 600}}))
    lengths = [(200 + 37 * number % 500, 2 + number % 30) for number in range(80)]
    long = sum(prompt + answer > 600 for prompt, answer in lengths)
    refused = sum(prompt > 599 for prompt, _ in lengths)
    assert long > refused > 0
    code, output = planned(capsys, trace, "--step-times", str(times))
    assert code == 0
    assert output.err == (
        f"baton: warning: {long} of 80 requests exceed the model's context of 600 tokens and are "
        f"shortened here; a cluster refuses {refused} of them, whose prompts alone are too long\n"
    )


def test_a_measurement_is_printed_with_what_its_error_means(capsys, trace):
    words = ["plan", str(demo_model_folder()), "--trace", trace, "--workers", "2"]
    assert main([*words, "--slo", LIMITS, "--requests", "5"]) == 0
    first, steps, beside, slow, last = capsys.readouterr().out.splitlines()[:5]
    error = first.rpartition(" ")[2]
    assert "a running cluster: prompts take" in steps and "beside a busy worker" in beside
    assert slow.startswith("the slowest of 100 prompts takes")
    assert last.startswith(f"differences (worse) below {error} mean nothing")


def test_limits_that_nothing_keeps_are_named(capsys, trace):
    words = ["plan", "m", "--trace", trace, "--workers", "2", "--step-times", "h100x2-70b"]
    assert main([*words, "--slo", "ttft=1ms,itl=1ms"]) == 0
    assert "no mode keeps these limits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--workers", "1"], "2 to 16"), (["--workers", "17"], "2 to 16"),
        (["--slo", "ttft=0s"], "limits such as"), (["--slo", "x"], "limits such as"),
        (["--requests", "0"], "1 or more"), (["--now", "colocated:2"], "both pools"),
        (["--now", "x"], "not a configuration"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(capsys, trace, words, named):
    given = ["plan", "m", "--trace", trace, "--workers", "2", "--slo", LIMITS, *words]
    with pytest.raises(SystemExit) as ended:
        main(given)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert named in error and error.count("\n") == 1


def test_a_bad_file_is_one_line(capsys, trace, tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("x\n1\n")
    code, output = planned(capsys, str(bad), "--step-times", "h100x2-70b")
    assert code == 1
    assert "trace line 2" in output.err and output.err.count("\n") == 1
    code, output = planned(capsys, trace, "--step-times", str(tmp_path / "none"))
    assert code == 2
    assert output.err.count("\n") == 1
