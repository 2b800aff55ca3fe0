"""Users' own classes in processes: the examples, classes that fail, and names that are wrong."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.cli.command import main
from baton.deploy.plan.addresses import free_ports
from baton.proto.errors import BatonError
from baton.proto.sampling import SamplingParams

from ..engine.granite_folders import equal_llama, granite_folder
from ..processes import wait_until
from .conftest import command_environment
from .streams import jobs, run, tokens
from .test_metrics import scrape

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "extend"
FAULTY = ROOT / "tests" / "extend"
WORK = jobs(16, prompt=40, new=20)
RACKS = "prefill-0:rack=a,decode-0:rack=a,prefill-1:rack=b,decode-1:rack=b"


@pytest.fixture(scope="module")
def port():
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def own(shared_cluster, port):
    """A cluster with every example, and the fields of its requests' stories."""
    return shared_cluster(
        prefill=2, decode=2, mode="adaptive", labels=RACKS, metrics_port=port,
        extensions=EXAMPLES, policy="rack_policy:RackPolicy",
        decider="length_decider:LengthDecider", prefill_order="short_first:ShortFirst",
        metric="slo_metric:SloMetric",
    )  # fmt: skip


def test_the_examples_serve(own, port):
    assert own.workers()["decode-1"]["labels"] == {"rack": "b"}
    done = run(own.address, [*jobs(6, prompt=600, new=20), *WORK])
    assert [one for one in done if one.error] == []
    with own.client() as client:
        for number in range(4):
            prompt = [number, *random.sample(range(3, 903), 900)]  # cached nowhere
            (output,) = client.complete(prompt, SamplingParams(max_new_tokens=4)).outputs
            assert output.prefill.removeprefix("prefill-") == output.decode.removeprefix("decode-")

    def counted():
        kept = re.findall(r"kept_limits_requests_total\{.*\} (\d+)", scrape(port))
        return sum(map(int, kept)) >= 26  # more if the test is tried again

    wait_until(counted, what="the metric to count all requests")
    found = re.findall(
        r'baton_extension_failures_total\{extension="(\w+)",.*\} (\d+)', scrape(port)
    )
    assert {(point, int(count)) for point, count in found} == {
        ("policy", 0), ("decider", 0), ("metric", 0),
    }  # fmt: skip


def test_classes_that_fail_cost_no_request(cluster, lasting_cluster):
    wanted = tokens(run(lasting_cluster(prefill=1, decode=2).address, WORK))
    failing = cluster(
        prefill=2, decode=2, extensions=FAULTY, policy="faulty_classes:ByTurns",
        prefill_order="faulty_classes:Raises", metric="faulty_classes:Raises",
        metrics_port=free_ports(1)[0],
    )  # fmt: skip
    router = failing.pids()["router"]
    assert tokens(run(failing.address, WORK)) == wanted
    for event, error in (
        ("policy.failed", "KeyError: 'a rack that is not here'"),
        ("policy.slow", "takes more than 25% of the time"),
        ("prefill_order.failed", "ZeroDivisionError: no rank"),
        ("metric.failed", "LookupError: no count"),
    ):
        failing.wait_said(event)
        failing.wait_said(error)
    assert "Traceback" in failing.text()
    assert failing.pids()["router"] == router


def test_a_class_that_never_returns_is_named(start_cluster):
    hung = start_cluster(extensions=FAULTY, policy="faulty_classes:Hangs").wait_ready()
    with hung.client() as client:
        request = threading.Thread(target=asked, args=(client,), daemon=True)
        request.start()
        hung.wait_said("policy.hangs")
        hung.wait_said("faulty_classes:Hangs has not returned for ")
        hung.wait_said("faulty_classes.py, line ")
    request.join(60)
    hung.end()


@pytest.mark.long
def test_a_class_that_cannot_be_loaded_again_is_tried_until_it_can(cluster, tmp_path):
    """Streams wait meanwhile: another policy than the one that the setting names serves none."""
    good = (EXAMPLES / "rack_policy.py").read_text()
    module = tmp_path / "breaking_policy.py"
    module.write_text(good)
    own = cluster(extensions=tmp_path, policy="breaking_policy:RackPolicy")
    work = jobs(4, prompt=40, new=20)
    wanted = tokens(run(own.address, work))
    module.write_text("raise OSError('the disk is gone')")
    os.kill(own.pids()["router"], signal.SIGKILL)
    own.wait_said("importing breaking_policy raised OSError: the disk is gone")
    module.write_text(good)
    assert tokens(run(own.address, work)) == wanted


def asked(client):
    with contextlib.suppress(BatonError):
        client.complete([1, 2, 3], SamplingParams(max_new_tokens=4))


def test_blocks_move_by_the_examples_transport(cluster, lasting_cluster, tmp_path, monkeypatch):
    wanted = tokens(run(lasting_cluster(prefill=1, decode=2).address, WORK))
    monkeypatch.setenv("KV_FOLDER", str(tmp_path))
    own = cluster(
        prefill=1, decode=1, extensions=EXAMPLES, kv_transport="folder_transport:FolderTransport"
    )
    assert tokens(run(own.address, WORK)) == wanted
    assert "kv_transport" not in own.text()
    assert list(tmp_path.glob("baton-kv-*")) == []

    def called():
        found = [one for worker in own.workers().values() for one in worker["extensions"]]
        return len(found) == 2 and all(one["calls"] > 0 for one in found)

    wait_until(called, what="the heartbeats of both workers to count calls of the transport")


@pytest.mark.parametrize("kind", ["FailsToPut", "LosesSome"])
def test_a_transport_that_fails_costs_frames_and_no_token(kind, cluster, lasting_cluster):
    wanted = tokens(run(lasting_cluster(prefill=1, decode=2).address, WORK))
    failing = cluster(prefill=1, decode=1, extensions=FAULTY, kv_transport=f"faulty_classes:{kind}")
    assert tokens(run(failing.address, WORK)) == wanted
    failing.wait_said("kv_transport.failed")


def test_a_folder_of_another_family_is_served_by_the_examples_class(cluster, tmp_path):
    work = jobs(8, prompt=40, new=20)
    wanted = tokens(run(cluster(model=equal_llama(tmp_path / "llama")).address, work))
    own = cluster(
        model=granite_folder(tmp_path / "granite"), extensions=EXAMPLES, mode="adaptive",
        model_family="granite_family:Granite",
    )  # fmt: skip
    assert tokens(run(own.address, work)) == wanted
    with own.client() as client:
        assert "family-" in client.describe().card.numerics


def serve(folder: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "serve", "--dry-run", *words],
        capture_output=True, text=True, timeout=100, cwd=where, check=False,
        env=command_environment(folder),
    )  # fmt: skip


def test_modules_of_the_working_directory(tmp_path):
    shown = serve(tmp_path, EXAMPLES, "--policy=rack_policy:RackPolicy")
    assert shown.returncode == 0, shown.stderr
    assert f'"extensions": "{EXAMPLES}"' in shown.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--policy=gone:Gone"], "--policy gone:Gone: no module gone in"),
        (["--prefill-order=rack_policy:RackPolicy"], "RackPolicy has no method rank"),
        (["--metric=slo_metric:Gone", "--metrics-port=9464"], "slo_metric.py has no Gone"),
        (["--metric=slo_metric:SloMetric"], "--metric needs --metrics-port"),
        (["--decider=length_decider:LengthDecider"], "--decider needs mode adaptive"),
        (["--model-family=short_first:ShortFirst"], "ShortFirst has no method config"),
        (["--model-family=granite_family:Granite"], "Granite: config() raised ValueError: this"),
        (["--model-family=granite_family:Granite", "--device=cuda"], "needs device cpu"),
        (["--policy=fastest"], "must be one of round_robin, least_loaded, prefix_aware, module"),
        (["--labels=rack"], "labels has 'rack', not of the form rack=r1"),
    ],
)
def test_what_is_wrong_is_named_before_a_process_starts(words, error, capsys, monkeypatch):
    """In this process, as another test shows that the command finds modules."""
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.delitem(sys.modules, "rack_policy", raising=False)
    try:
        code = main(["serve", "--dry-run", *words])
    except SystemExit as ended:
        code = ended.code
    assert code
    said = capsys.readouterr().err
    assert error in said
    assert "Traceback" not in said
    assert "rack_policy" not in sys.modules  # users' modules load in another process
