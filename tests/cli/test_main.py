import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from baton.cli import demo, doctor, status
from baton.cli.command import VERBS, asked_verbs, build_parser, main
from baton.deploy.config import ServeSettings
from baton.deploy.report import (
    ClusterReport,
    HandoffRecord,
    HandoffTotals,
    LatencyReport,
    Percentiles,
    RouterReport,
    WorkerReport,
)


@pytest.fixture
def address(tmp_path, monkeypatch):
    """An address where nobody listens, also as every verb's default."""
    monkeypatch.setenv("BATON_ADDRESS", f"ipc://{tmp_path}/none.sock")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return f"ipc://{tmp_path}/none.sock"


@pytest.mark.parametrize("arguments", [["--help"], ["--no-such-option"]])
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_by_itself_says_what_it_says_among_all(capsys, name, arguments):
    said = []
    for names in (VERBS, asked_verbs([name])):
        with pytest.raises(SystemExit) as end:
            build_parser(names).parse_args([name, *arguments])
        said.append((end.value.code, *capsys.readouterr()))
    assert said[0] == said[1]
    assert said[0][0] == (0 if arguments == ["--help"] else 2)
    assert f"baton {name}" in said[0][1] or arguments != ["--help"]


def test_a_line_that_does_not_begin_with_a_verb_is_told_of_all():
    assert asked_verbs(["drain", "serve"]) == ["drain"]
    assert asked_verbs(["--debug", "drain", "serve"]) == ["drain"]
    for line in ([], ["--help", "drain"], ["--version"], ["juggle", "drain"], ["wait_ready"]):
        assert asked_verbs(line) == VERBS


def test_a_verb_does_not_wait_for_what_others_import():
    code = "import sys; from baton.cli.command import main; sys.exit(main(sys.argv[1:]))"
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); " + code
    ended = subprocess.run(
        [sys.executable, "-P", "-c", told, "keygen", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "baton.cli.keygen" in ended.stdout
    assert not {"baton.cli.serve", "baton.engine", "jinja2"} & set(ended.stdout.split())


def test_serve_help_names_every_setting_and_the_precedence(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for field in ServeSettings.__struct_fields__:
        assert field == "model" or f"--{field.replace('_', '-')}" in text
    assert "Precedence" in text
    assert "BATON_" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["juggle"],
        ["serve", "--prefill", "two"],
        ["drain"],
        ["generate", "x", "--top-k", "y"],
        ["generate", "x", "--max-new-tokens", "1" + "0" * 20],
        ["generate", "x", "--deadline", "nan"],
        ["status", "--timeout", "-1"],
        ["status", "--handoffs", "-1"],
        ["drain", "decode-0", "--wait-timeout", "nan"],
        ["wait-ready", "--prefill", "-1"],
    ],
)
def test_bad_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: baton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["serve", "--decode", "0"], 2, "decode must be at least 1"),
        (["serve", "--policy", "dice"], 2, "known are"),
        (["serve", "--grace", "inf"], 2, "grace must be a finite number"),
        (["serve", "--kv-blocks", "1" + "0" * 20], 2, "kv_blocks must be at most"),
        (["serve", "--address", "tcp://0.0.0.0:7000"], 2, "refusing to listen"),
        (["serve", "--address", "pigeon://x"], 2, "tcp://, ipc://"),
        (["serve", "--address", "ipc://@x"], 2, "is no file"),
        (["serve", "--address", "ipc://*"], 2, "is no file"),
        (["serve", "--address", "ipc:///no/such/folder/s.sock"], 2, "does not exist"),
        (["serve", "/no/such/model"], 1, "no such model folder"),
        (["serve", "--config", "/no/such/file.toml"], 2, "cannot read"),
        (["serve", "--run-dir", "/no/such/folder"], 2, "cannot make a run folder"),
        (["status", "--address", "nonsense"], 2, "must start with"),
        (["status", "--timeout", "0.1"], 1, "baton serve"),
        (["wait-ready", "--timeout", "0.1"], 1, "baton serve"),
        (["drain", "decode-0", "--timeout", "0.1"], 1, "baton serve"),
        (["generate", "hello", "--timeout", "0.1"], 1, "baton serve"),
        (["generate", ""], 1, "prompt is empty"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(arguments, code, complaint, address, capsys):
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert complaint in err
    assert err.startswith("baton: ")
    assert err.count("\n") == 1


def test_debug_shows_the_error_itself(address):
    with pytest.raises(Exception, match="prompt is empty"):
        main(["--debug", "generate", ""])


def test_dry_run_prints_the_plan_and_starts_nothing(address, tmp_path, capsys):
    assert main(["serve", "--dry-run", "--prefill", "2", "--decode", "3", "--block-size", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = [process["name"] for process in plan["processes"]]
    assert names == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert plan["processes"][1]["config"]["runner"]["block_size"] == 8
    assert plan["address"] == address
    assert list(tmp_path.iterdir()) == []


def test_a_relative_address_is_made_absolute(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--dry-run", "--address", "ipc://x.sock"]) == 0
    assert json.loads(capsys.readouterr().out)["address"] == f"ipc://{tmp_path}/x.sock"


def test_a_default_folder_that_others_may_write_to_is_not_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BATON_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status", "--timeout", "0.1"]) == 1
    assert "baton serve" in capsys.readouterr().err
    tmp_path.chmod(0o770)
    for verb in (["status"], ["serve"]):
        assert main(verb) == 2
        assert f"others may write to {tmp_path}" in capsys.readouterr().err


def test_dry_run_with_tcp_gives_every_socket_its_own_port(address, capsys):
    main(["serve", "--dry-run", "--transport", "tcp", "--address", "tcp://127.0.0.1:0"])
    plan = json.loads(capsys.readouterr().out)
    router, prefill, decode = (process["config"] for process in plan["processes"])
    bound = [router["client_address"], router["worker_address"], prefill["endpoint"]]
    bound += [decode["endpoint"], decode["data_endpoint"]]
    assert len(set(bound)) == 5
    assert all(a.startswith("tcp://127.0.0.1:") and not a.endswith(":0") for a in bound)


def test_doctor_finds_this_machine_fit(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    subjects = {line.split()[1] for line in lines}
    assert {
        "python",
        "packages",
        "kernels",
        "blas",
        "shm",
        "ipc",
        "tcp",
        "model",
        "ray",
    } <= subjects


def test_doctor_says_what_to_do_about_a_long_temporary_folder(monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/" + "x" * 100)
    (finding,) = doctor.check_ipc()
    assert finding.level == "fail"
    assert "TMPDIR" in finding.line()


def test_status_table_shows_workers_and_handoffs():
    report = ClusterReport(
        workers=[
            WorkerReport(
                id="decode-0", role="decode", pid=12, state="ready", kv_blocks_used=3,
                kv_blocks_total=64, endpoint="ipc:///d",
            ),
            WorkerReport(id="decode-1", role="decode", state="dead", reason="drained"),
            WorkerReport(id="decode-2", role="decode", state="dead", reason="silent"),
        ],
        handoffs=HandoffTotals(
            count=2, bytes_sent=2048, bytes_received=2048,
            last=[HandoffRecord(prefill="prefill-0", decode="decode-0", transport="zmq", blocks=4)],
        ),
    )  # fmt: skip
    text = "\n".join(status.describe(report))
    for part in ("decode-0", "3/64", "ipc:///d", "handoffs: 2, 2.0 KiB sent", "4 blocks over zmq"):
        assert part in text
    states = dict(line.split()[:2] for line in text.splitlines() if line.startswith("decode-"))
    assert states == {"decode-0": "ready", "decode-1": "left", "decode-2": "dead"}


def test_status_shows_waiting_times_and_what_was_dropped_when_there_is_any():
    waited = Percentiles(count=7, p50=0.0102, p90=0.02, p99=None)
    report = ClusterReport(
        workers=[
            WorkerReport(id="decode-0", role="decode", between_tokens_s=waited),
            WorkerReport(id="decode-1", role="decode", between_tokens_s=Percentiles()),
            WorkerReport(id="prefill-0", role="prefill", dropped={"data_frames": 2}),
        ],
        router=RouterReport(latency=LatencyReport(first_token_s=waited)),
    )
    lines = status.describe(report)
    assert [line.split() for line in lines if "10.20" in line] == [
        ["first", "token", "all", "10.20", "20.00", "-", "7"],
        ["between", "tokens", "decode-0", "10.20", "20.00", "-", "7"],
    ]
    assert lines[-1] == "  prefill-0: data_frames 2"
    quiet = "\n".join(status.describe(ClusterReport()))
    assert "latency" not in quiet
    assert "dropped" not in quiet


def test_demo_timing_counts_from_the_start():
    timing = demo.Timing(began=1.0)
    timing.count(0, 1.1)
    timing.count(1, 1.25)
    timing.count(4, 1.5)
    assert timing.line() == "TTFT 250.0 ms, 5 tokens, 10 tokens/s over 0.50 s"


def test_demo_waits_for_no_handoff_of_an_answer_of_one_token(capsys):
    class OneToken:
        """A cluster whose answer ends with its first token."""

        def status(self, handoffs):
            return {"handoffs": {"count": 0}}

        def chat(self, messages, params):
            return [SimpleNamespace(tokens=[2], text="", prefill="prefill-0", decode="")]

    demo.show(OneToken(), "Hush?")
    assert "[prefill-0 read the prompt and ended the answer]" in capsys.readouterr().out
