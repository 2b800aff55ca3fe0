import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.cli import demo, demo_steps, doctor, status
from baton.cli.command import VERBS, asked_verbs, build_parser, main
from baton.cli.settings import GROUPS
from baton.deploy.config import CHOICES, OPEN_CHOICES, OWN, ServeSettings, demo_model_folder
from baton.deploy.report import (
    ClusterReport,
    FailedPairRecord,
    HandoffRecord,
    HandoffTotals,
    LatencyReport,
    Percentiles,
    Rates,
    RequestCounts,
    RouterReport,
    WorkerReport,
)
from baton.proto.errors import ConfigError, InternalError


@pytest.fixture
def address(tmp_path, monkeypatch):
    """An address without a listener, which is also the default of every command."""
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
    for heading in GROUPS:
        assert f"\n{heading}:\n" in text
    for field, choices in CHOICES.items():
        own = [OWN] if field in OPEN_CHOICES else []
        assert f"{{{','.join([*choices, *own])}}}" in text
    assert "TEXT" not in text
    assert "Precedence" in text
    assert "BATON_" in text


@pytest.mark.parametrize(
    ("command", "words", "complaint"),
    [
        ("", "juggle", "no command 'juggle'"),
        ("", "stats", "no command 'stats'; did you mean status?"),
        ("", "--verion", "no option --verion; did you mean --version?"),
        (" serve", "--prefil 2", "no option --prefil; did you mean --prefill?"),
        (" drain", "--wiat", "no option --wiat; did you mean --wait?"),
        (" drain", "", "missing WORKER"),
        (" down", "now", "unexpected argument 'now'"),
        (" serve", "--decode", "--decode: expected one argument"),
        (" serve", "--prefill two", "--prefill: 'two' is not a whole number, 0 or more"),
        (" launch", "--kv-blocks -1", "--kv-blocks: '-1' is not a whole number, 0 or more"),
        (" serve", "--kv-blocks 1e3", "--kv-blocks: '1e3' is not a whole number, 0 or more"),
        (" serve", "--grace long", "--grace: 'long' is not a number of seconds, 0 or more"),
        (
            " serve",
            "--max-batchs 2",
            "no option --max-batchs; did you mean --max-num-batched-tokens?",
        ),
        (
            " serve",
            "--prefill-order sjf",
            "--prefill-order: must be one of auto, fcfs, edf, module:Class, not 'sjf'",
        ),
        (" serve", "--transport udp", "--transport: must be one of ipc, tcp, not 'udp'"),
        (" launch", "--backend numpy", "--backend: must be one of local, ray, not 'numpy'"),
        (" generate", "x --top-k y", "--top-k: 'y' is not a whole number"),
        (" generate", f"x --seed {2**80}", f"--seed: '{2**80}' is too large"),
        (" chat", "--temperature hot", "--temperature: 'hot' is not a number"),
        (" embed", "x --deadline nan", "--deadline: 'nan' is not a number of seconds, 0 or more"),
        (" status", "--timeout -1", "--timeout: '-1' is not a number of seconds, 0 or more"),
        (" status", "--handoffs -1", "--handoffs: '-1' is not a whole number, 0 or more"),
    ],
)
def test_bad_usage_is_2_and_one_line_of_flag_value_and_what_was_expected(
    command, words, complaint, capsys
):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), *words.split()])
    assert end.value.code == 2
    hint = "" if complaint.endswith("?") else f"; see baton{command} --help"
    assert capsys.readouterr() == ("", f"baton{command}: {complaint}{hint}\n")


@pytest.mark.parametrize("words", [[], ["--debug"]])
def test_no_command_at_all_shows_the_commands(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert [name for name in VERBS if name not in shown] == []


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("help", "--help"), ("help drain", "drain --help"), ("--debug help drain", "drain --help"),
        ("help stats", "stats"), ("help --verion", "--verion"),
    ],
)  # fmt: skip
def test_help_is_a_command(words, same, capsys):
    ends = []
    for line in (words, same):
        with pytest.raises(SystemExit) as end:
            main(line.split())
        ends.append((end.value.code, *capsys.readouterr()))
    assert ends[0] == ends[1]


def test_the_package_runs_as_a_module():
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "baton", "help", "drain"],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ended.stdout.startswith("usage: baton drain")


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["serve", "--decode", "0"], 2, "--decode must be at least 1"),
        (["launch", "--backend=ray", "org/name"], 2, "under Ray each host reads the model from"),
        (["serve", "--grace", "inf"], 2, "--grace must be a finite number"),
        (["serve", "--http-port", "65536"], 2, "--http-port must be 0 to 65535"),
        (["serve", "--http-port=-1", "/no/such/model"], 2, "no model folder /no/such/model"),
        (["serve", "--http-port", "-1", "/no/such/model"], 2, "no model folder /no/such/model"),
        (["serve", "--metric", "own:Metric"], 2, "--metric needs --metrics-port"),
        (["serve", "--http-host", "0.0.0.0"], 2, "--http-host 0.0.0.0 is reachable from"),
        (["serve", "--http-host", "0.0.0.0", "--dry-run"], 2, "give an API key (--api-key-file"),
        (["serve", "--api-key-file", "/no/such"], 2, "--api-key-file /no/such: "),
        (["serve", "--ssl-certfile", "x.pem"], 2, "--ssl-certfile needs --ssl-keyfile too"),
        (["serve", "--kv-blocks", "1" + "0" * 12], 2, "--kv-blocks must be at most"),
        (["serve", "--address", "tcp://0.0.0.0:7000"], 2, "refusing to listen"),
        (["serve", "--address", "pigeon://x"], 2, "tcp://, ipc://"),
        (["serve", "--address", "ipc://@x"], 2, "is not a file"),
        (["serve", "--address", "ipc://*"], 2, "is not a file"),
        (["serve", "--address", "ipc:///no/such/folder/s.sock"], 2, "does not exist"),
        (["serve", "--address", "ipc:///no/such/folder/s", "--dry-run"], 2, "does not exist"),
        (["serve", "/no/such/model"], 2, "no model folder /no/such/model"),
        (["serve", "/no/such/model", "--dry-run"], 2, "no model folder /no/such/model"),
        (["generate", "x", "--json-schema", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["generate", "x", "--json-schema", __file__], 2, "test_main.py is not JSON: "),
        (["scale", "decod=2"], 2, "no pool 'decod'; scale prefill, decode or gateway"),
        (["scale", "decode=-1"], 2, "'-1' is not a number of workers"),
        (["rollout", "grac=1"], 2, "no setting 'grac'; did you mean grace?"),
        (["serve", "--config", "/no/such/file.toml"], 2, "cannot read"),
        (["serve", "--config", "/dev/zero"], 2, "cannot read /dev/zero: it is a device"),
        (["serve", "--api-key-file", "/dev/zero", "--dry-run"], 2, "it is a device"),
        (["generate", "x", "--json-schema", "/dev/zero"], 2, "it is a device"),
        (["serve", "--run-dir", "/no/such/folder"], 2, "cannot make a run folder"),
        (["status", "--address", "nonsense"], 2, "must start with"),
        (["status", "--timeout", "0.1"], 1, "baton serve"),
        (["wait-ready", "--timeout", "0.1"], 1, "baton serve"),
        (["drain", "decode-0", "--timeout", "0.1"], 1, "baton serve"),
        (["generate", "hello", "--timeout", "0.1"], 1, "baton serve"),
        (["generate", ""], 2, "prompt is empty"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(arguments, code, complaint, address, capsys):
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert complaint in err
    assert err.startswith("baton: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_found_before_anything_starts(name, words, tmp_path, capsys):
    model = shutil.copytree(demo_model_folder(), tmp_path / "model")
    (model / name).write_text('{"cut": tru')
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert main(["serve", str(model), f"--run-dir={run_dir}", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"baton: {model}: {name} ")
    assert err.count("\n") == 1
    assert list(run_dir.iterdir()) == []


def test_a_variable_that_sets_nothing_is_named_with_the_closest_that_does(
    address, monkeypatch, capsys
):
    monkeypatch.setenv("BATON_PREFIL", "2")
    monkeypatch.setenv("BATON_ZZZZ", "2")
    monkeypatch.setenv("BATON_SERVICE_PORT", "7070")  # Kubernetes sets it for a service named baton
    monkeypatch.setenv("BATON_HTTP_PORT", "tcp://10.0.0.1:80")  # and this for one named baton-http
    monkeypatch.setenv("BATON_PORT_7070_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("BATON_GRACE", "5")
    monkeypatch.setenv("BATON_SHARED_ARRAYS", "off")
    monkeypatch.setenv("BATON_SHARED_ARRAYS_KEY", "one cluster")
    main(["status", "--timeout", "0"])
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "baton: warning: BATON_PREFIL has no effect; did you mean BATON_PREFILL?",
        "baton: warning: BATON_ZZZZ has no effect",
    ]


def test_a_package_that_is_not_installed_is_named():
    code = (
        "import sys; sys.modules['zmq'] = None; sys.argv = ['baton', 'doctor'];"
        "from baton.cli.__main__ import main; sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    said = "baton: the Python package pyzmq is missing: pip install pyzmq\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)


def test_debug_shows_the_error_itself(address):
    with pytest.raises(Exception, match="prompt is empty"):
        main(["--debug", "generate", ""])


def test_dry_run_prints_the_plan_and_starts_nothing(address, tmp_path, capsys):
    assert main(["serve", "--dry-run", "--prefill", "2", "--decode", "3", "--block-size", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = [process["name"] for process in plan["processes"]]
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert names == ["router", *workers, "gateway-0"]
    assert plan["processes"][1]["config"]["runner"]["block_size"] == 8
    assert plan["address"] == address
    assert list(tmp_path.iterdir()) == []


def test_down_removes_what_a_killed_cluster_left(address, tmp_path, monkeypatch, capsys):
    """Its sockets, and its run folder, also below ``BATON_RUN_DIR``."""
    left = [tmp_path / "none.sock", tmp_path / "none.sock.admin"]
    for path in left:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("BATON_RUN_DIR", str(elsewhere))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for parent in (tmp_path, elsewhere):
        folder = parent / "baton-run-x"
        folder.mkdir(parents=True)
        (folder / "owner.lock").touch()
    plain = tmp_path / "notes"
    plain.write_text("not a socket")
    assert main(["down"]) == 0
    assert [*tmp_path.iterdir(), *elsewhere.iterdir()] in ([elsewhere, plain], [plain, elsewhere])
    assert main(["down", "--address", f"ipc://{plain}"]) == 0
    assert plain.exists()
    assert f"no cluster runs at {address}" in capsys.readouterr().out


def test_down_finds_the_run_folder_of_a_killed_cluster(address, tmp_path, monkeypatch, capsys):
    """Below its ``--run-dir``, which only the killed cluster knew."""
    monkeypatch.delenv("BATON_RUN_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    folder, other = tmp_path / "baton-run-x", tmp_path / "other"
    for each in (folder, other):
        each.mkdir()
        (each / "owner.lock").touch()
    lock = Path(f"{address.removeprefix('ipc://')}.admin.lock")
    lock.write_text(str(folder))
    assert main(["down"]) == 0
    assert f"removed {folder}, left by a killed cluster" in capsys.readouterr().out
    lock.write_text(str(other))  # not the name of a run folder
    assert main(["down"]) == 0
    assert list(tmp_path.iterdir()) == [other]


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
        assert f"other users may write to {tmp_path}" in capsys.readouterr().err


def test_dry_run_with_tcp_gives_every_socket_its_own_port(address, capsys):
    words = ["--transport", "tcp", "--address", "tcp://127.0.0.1:0"]
    main(["serve", "--dry-run", "--no-http", *words])
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


def test_status_names_pairs_of_workers_that_cannot_reach_each_other():
    pair = FailedPairRecord(
        prefill="prefill-0", decode="decode-1", reason="no answer", failures=3, failing_s=12.2,
        next_try_s=4.4,
    )  # fmt: skip
    text = "\n".join(status.describe(ClusterReport(failed_pairs=[pair])))
    assert "prefill-0 -> decode-1: unreachable, 12 s, 3 requests moved, next try in 4 s" in text


def test_status_begins_with_requests_throughput_and_uptime():
    counts = RequestCounts(
        finished=12, failed=1, refused=3, refused_by_reason={"overloaded": 2, "input": 1},
        cancelled=4, replayed=5, in_flight=6, queued=7,
    )  # fmt: skip
    rates = Rates(requests_per_s=1.26, prompt_tokens_per_s=10.0, generated_tokens_per_s=20.0)
    router = RouterReport(
        requests=counts, rates=rates, uptime_s=3700.0, restarts=1, prompt_tokens=8, cached_tokens=4
    )
    requests, throughput, uptime = status.describe(ClusterReport(router=router))[:3]
    assert requests == (
        "requests     12 ok, 1 failed, 3 refused (input 1, overloaded 2), 4 cancelled, 5 replayed, "
        "6 in flight, 7 queued"
    )
    assert throughput == (
        "throughput   1.3 requests/s, prompt 10.0 tok/s (50 % cached), generation 20.0 tok/s"
    )
    assert uptime == "uptime       1 h 1 min, 1 restart of workers"
    counts = RequestCounts(cancelled=4, disconnected=2)
    requests = status.describe(ClusterReport(router=RouterReport(requests=counts)))[0]
    assert "4 cancelled, 2 disconnected, 0 replayed" in requests


def test_status_is_shown_again_until_it_is_interrupted(monkeypatch, capsys):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) % 2 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", pause)
    monkeypatch.setattr(status, "_show", lambda arguments: print("shown"))
    assert main(["status", "--watch", "0"]) == 130
    assert main(["status", "--watch"]) == 130
    assert pauses == [status.LEAST_WATCH_S] * 2 + [status.WATCH_S] * 2
    assert capsys.readouterr().out.split() == ["shown"] * 4


def test_status_shows_waiting_times_and_what_was_dropped_when_there_is_any():
    waited = Percentiles(count=7, p50=0.0102, p90=0.02, p99=None)
    report = ClusterReport(
        workers=[
            WorkerReport(id="decode-0", role="decode", between_tokens_s=waited),
            WorkerReport(id="decode-1", role="decode", between_tokens_s=Percentiles()),
            WorkerReport(id="prefill-0", role="prefill", dropped={"data_frames": 2}),
        ],
        router=RouterReport(
            latency=LatencyReport(first_token_s=waited), dropped={"repeated_tokens": 7}
        ),
    )
    lines = status.describe(report, verbose=True)
    assert [line.split() for line in lines if "10.20" in line] == [
        ["TTFT", "all", "10.20", "20.00", "-", "7"],
        ["ITL", "decode-0", "10.20", "20.00", "-", "7"],
    ]
    assert lines[-2:] == ["messages dropped or refused:", "  prefill-0: data_frames 2"]
    assert "data_frames" not in "\n".join(status.describe(report))
    quiet = "\n".join(status.describe(ClusterReport(), verbose=True))
    assert "latency" not in quiet
    assert "dropped" not in quiet


@pytest.mark.parametrize(
    ("options", "kind", "folder", "questions"),
    [
        ("q", "", None, ["q"]), ("--pictures", "pictures", None, []),
        ("--pictures a b --output d", "pictures", "d", ["a", "b"]),
        ("--images --output d", "images", "d", []),
        ("--speech --output d a", "speech", "d", ["a"]),
    ],
)  # fmt: skip
def test_demo_has_three_kinds(options, kind, folder, questions):
    arguments = build_parser().parse_args(["demo", *options.split()])
    assert demo.kind_of(arguments) == (kind, folder, tuple(questions))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--images --pictures", "choose one"), ("--speech --pictures a", "choose one"),
        ("--images --speech", "choose one"),
        ("--output d", "--output needs"),
    ],
)  # fmt: skip
def test_demo_refuses_two_kinds_and_a_folder_without_use(options, error):
    with pytest.raises(ConfigError, match=error):
        demo.kind_of(build_parser().parse_args(["demo", *options.split()]))


def test_demo_checks_the_model_before_it_starts_or_writes_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "demo_flux_folder", lambda: tmp_path / "none")
    monkeypatch.setattr(demo, "LocalCluster", lambda *_, **__: pytest.fail("a cluster was made"))
    output = tmp_path / "pictures"
    arguments = build_parser().parse_args(["demo", "--pictures", "--output", str(output)])
    with pytest.raises(ConfigError, match="no model folder"):
        demo.run(arguments)
    assert capsys.readouterr().out == ""
    assert not output.exists()


def test_demo_timing_counts_from_the_start():
    timing = demo_steps.Timing(began=1.0)
    timing.count(0, 1.1)
    timing.count(1, 1.25)
    timing.count(4, 1.5)
    assert timing.line() == "TTFT 250.0 ms, 5 tokens, 10 tokens/s over 0.50 s"


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 4], [1, 2, 3, 4]])
def test_demo_refuses_an_answer_that_a_kill_changed(tokens):
    assert "all 3 tokens equal" in demo_steps.compare([1, 2, 3], [1, 2, 3])
    same = 3 if len(tokens) == 4 else 2
    with pytest.raises(InternalError, match=f"after {same} tokens: {len(tokens)} .* of 3"):
        demo_steps.compare([1, 2, 3], tokens)


def test_demo_kills_no_process_that_the_router_does_not_name():
    report = {
        "workers": [{"id": "decode-0", "role": "decode", "pid": 0}],
        "handoffs": {"count": 1, "last": [{"decode": "decode-0"}]},
    }
    client = SimpleNamespace(status=lambda handoffs: report)
    with pytest.raises(InternalError, match="no process id for decode-0"):
        demo_steps.kill_decode_worker(client, 0)


def test_demo_waits_for_no_handoff_of_an_answer_of_one_token(capsys):
    class OneToken:
        """A cluster whose answer has one token."""

        def status(self, handoffs):
            return {"handoffs": {"count": 0}}

        def chat(self, messages, params, *, images):
            return [SimpleNamespace(tokens=[2], text="", prefill="prefill-0", decode="")]

    demo_steps.show(OneToken(), demo_steps.Question("Hush?"))
    assert "[prefill-0 read the prompt and ended the answer]" in capsys.readouterr().out
