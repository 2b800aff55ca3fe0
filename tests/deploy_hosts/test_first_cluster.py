"""`ray up` with Baton's cluster file, and an operator's later work with the cluster.

The tests share one cluster, and each continues where the previous test ended. The hosts and the
machine outside are namespaces. Requests are sent from outside, with keys, to the router's socket.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from baton.deploy.ray import firewall
from baton.deploy.supervise.oom import WORKER_MARGIN, score_adjustment

from .cluster import RayCluster, wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(240, func_only=True)]

HEAD, PREFILL, DECODE, SPARE, ADDED = "h1", "h2", "h3", "h4", "h5"
IN_FLIGHT = 24
ENVIRONMENT = {b"RAY_gcs_rpc_server_reconnect_timeout_s=900", b"RAY_memory_monitor_refresh_ms=0"}
# The new head does not answer before the first probe of `baton launch` has timed out.
SLOW_HEAD = (
    "P=$(pgrep -x gcs_server) && kill -STOP $P && "
    '{ setsid sh -c "sleep 9; kill -CONT $P" >/dev/null 2>&1 </dev/null & }'
)
# Sends greedy requests of several lengths at once; prints the tokens and end of each.
ASK = """
import json, sys
from baton.client import Client
from baton.proto.sampling import SamplingParams
count, length, address, keys = json.loads(sys.argv[1])
with Client(address, keys=keys, connect_timeout=30.0) as client:
    running = [
        client.generate([(7 * i + j) % 200 + 5 for j in range(20 + 9 * i)],
                        SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True))
        for i in range(count)
    ]
    print("BEGUN", flush=True)
    answers = []
    for generation in running:
        tokens = []
        for output in generation:
            tokens += output.tokens
            if output.is_done:
                answers.append([tokens, str(output.final_status.value)])
    print("ANSWERS " + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def cluster(lab, wheel):
    """A head, a prefill host and one of two decode hosts; the last test stops the cluster."""
    addresses = [host.address for host in lab.hosts]
    cluster = RayCluster(
        lab,
        wheel,
        prefill=(addresses[1],),
        decode=(addresses[2], addresses[3]),
        idle_minutes=0.05,
        reconnect=900,
        launch="--kv-memory 64MiB --worker-timeout 8 --decode-max 3 --prefill-max 1",
    )
    done = cluster.up()
    assert done.returncode == 0, done.stdout
    yield cluster
    cluster.down()


def ask(cluster, *, count=IN_FLIGHT, length=64, address=None, keys=None):
    """Return the answers of a program outside; by default from this cluster."""
    given = [count, length, address or cluster.address, str(cluster.keys if keys is None else keys)]
    return cluster.outside_python(ASK, json.dumps(given))


def answers(output):
    """Return the tokens of each request; assert that all finished."""
    line = next(line for line in output.splitlines() if line.startswith("ANSWERS "))
    found = json.loads(line.removeprefix("ANSWERS "))
    assert {status for _, status in found} == {"maximum_length"}, found
    return [tokens for tokens, _ in found]


def replayed(cluster):
    """Return the number of requests that the router replayed."""
    return json.loads(cluster.verb("status --json"))["router"]["requests"]["replayed"]


@pytest.fixture(scope="module")
def expected(cluster):
    """Return the answers of `baton serve` on the machine outside to the same requests."""
    address = "ipc:///tmp/local.sock"
    command = f"baton launch --kv-memory 64MiB --address {address} && baton wait-ready"
    done = cluster.outside_run(f"export BATON_ADDRESS={address}; {command}")
    assert done.returncode == 0, done.stdout
    short = answers(ask(cluster, address=address, keys=""))
    cluster.outside_run(f"baton down --address {address}")
    return short


@pytest.fixture(scope="module")
def expected_long(cluster, expected):
    """The same with 400 tokens, from the cluster itself before any fault."""
    return answers(ask(cluster, length=400))


def test_hosts_join_with_their_pools(cluster):
    wait_until(lambda: set(cluster.raylets()) == {HEAD, PREFILL, DECODE}, "raylets")
    wanted = {"10.77.0.1": "head", "10.77.0.2": "prefill", "10.77.0.3": "decode"}
    wait_until(lambda: cluster.nodes() == wanted, "nodes with their pools")
    state = cluster.on_head("stat -c %a ~/.baton/nodes ~/.baton/nodes/lab.json ~/.ray/auth_token")
    assert state.split() == ["700", "600", "600"]
    assert cluster.verb("wait-ready --prefill 1 --decode 1").startswith(
        "ready: 1 prefill, 1 decode"
    )
    where = {name: host for host, members in cluster.members().items() for name in members}
    assert where == {"router": HEAD, "gateway-0": HEAD, "prefill-0": PREFILL, "decode-0": DECODE}


def test_a_host_has_the_keys_of_what_runs_there_and_no_others(cluster):
    def held(number: int) -> set[str]:
        said = cluster.lab.hosts[number].run("ls ~/.baton/keys; stat -c %a ~/.baton/keys/*.key")
        assert set(said.stdout.split()) >= {"600"} and "644" not in said.stdout, said.stdout
        return {word for word in said.stdout.split() if not word.isdigit()}

    assert held(0) == {"allowed.toml", "router.key", "operator.key", "prefill.key", "decode.key"}
    assert held(1) == {"allowed.toml", "prefill.key"}
    assert held(2) == {"allowed.toml", "decode.key"}
    assert cluster.outside_run("ls /tmp | grep baton-keys- || true").stdout == ""


def test_every_port_that_a_host_opens_is_one_that_firewall_rules_name(cluster):
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    low, high = firewall.WORKER_PORTS.values()
    node = {22, *firewall.NODE_PORTS.values(), *range(low, high + 1)}
    head = {*node, firewall.GCS, firewall.CLIENT, *firewall.METRICS.values(), 7070, 7170}
    worker = {*node, *range(first, last + 1)}  # Baton's ports, which accept only listed keys
    for host, known in zip(cluster.lab.hosts, (head, worker, worker), strict=False):
        found = host.listening()
        assert found >= {22, firewall.NODE_PORTS["node-manager-port"]} and found <= known, host.name


def test_the_kernel_would_kill_workers_before_what_manages_them(cluster):
    for host, members in cluster.members().items():
        usual = score_adjustment(cluster.raylets()[host])
        for name, pid in members.items():
            margin = 0 if name in ("router", "gateway-0") else WORKER_MARGIN
            assert score_adjustment(pid) == usual + margin, name
    running = cluster.lab.hosts[0].processes().items()
    actors = [pid for pid, line in running if line.startswith(("ray::Controller", "ray::Pool"))]
    # The controller, and the actors of the router and the gateway.
    assert len(actors) == 3 and {score_adjustment(pid) for pid in actors} == {usual}


def test_firewall_rules_keep_strangers_from_ray_and_let_clients_in(cluster, expected):
    """The rules stay in effect for the following tests."""
    nft = shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if nft is None:
        pytest.skip("needs nft")
    *_, decode = pools = [host.address for host in cluster.lab.hosts]
    words = f"--head {pools[0]} --prefill {pools[1]} --decode {','.join(pools[2:])}"
    rules = cluster.outside_run(f"baton ray-config --firewall {words}").stdout
    assert decode in rules
    for host in cluster.lab.hosts:
        command = ["nsenter", "--target", str(host.pid), "--net", nft, "-f", "-"]
        subprocess.run(command, input=rules, text=True, check=True)

    def reached(port):
        try_it = f"timeout 2 bash -c '</dev/tcp/{pools[0]}/{port}' 2>/dev/null"
        return cluster.outside_run(try_it).returncode == 0

    assert reached(22) and reached(7070)
    closed = [firewall.GCS, *firewall.NODE_PORTS.values()]
    assert [port for port in closed if reached(port)] == []
    assert answers(ask(cluster)) == expected


def test_requests_from_outside_give_the_tokens_of_a_local_cluster(cluster, expected):
    assert len(expected) == IN_FLIGHT and all(len(tokens) == 64 for tokens in expected)
    assert answers(ask(cluster)) == expected


def test_without_the_token_and_without_a_key_nobody_gets_in(cluster):
    said = cluster.on_head("RAY_AUTH_TOKEN_PATH=/nowhere timeout 20 ray status || echo refused")
    assert "refused" in said and "Healthy" not in said, said
    assert cluster.verb("status --timeout 3", keys="", code=1)


def test_launching_again_changes_nothing(cluster):
    before = cluster.members()
    words = re.search("- (baton launch .*?)(?: #|$)", cluster.file.read_text(), re.MULTILINE)
    assert "already running" in cluster.on_head(words[1])
    assert cluster.members() == before


def test_a_decode_host_more_and_prefill_is_untouched(cluster, expected):
    before, raylets = cluster.members(), cluster.raylets()
    said = cluster.on_head("baton scale decode=2 --wait", timeout=120)
    assert "reached" in said, said + cluster.monitor_log()
    after = cluster.members()
    assert {host: after[host] for host in before} == before  # names and pids
    assert list(after[SPARE]) == ["decode-1"]
    assert raylets.items() <= cluster.raylets().items()
    assert answers(ask(cluster)) == expected


def test_back_to_one_drains_and_loses_no_request(cluster, expected_long):
    before = replayed(cluster)
    running = cluster.outside_begin(
        ASK, json.dumps([IN_FLIGHT, 400, cluster.address, str(cluster.keys)])
    )
    assert running.stdout.readline() == "BEGUN\n"
    said = cluster.on_head("baton scale decode=1 --wait", timeout=120)
    assert "reached" in said, said
    output, _ = running.communicate(timeout=120)
    assert answers(output) == expected_long
    assert replayed(cluster) == before
    wait_until(lambda: len(cluster.left()) == 3, "a decode host to be given back")
    assert sorted(name for names in cluster.members().values() for name in names)[1:] == [
        "gateway-0",
        "prefill-0",
        "router",
    ]


def test_a_host_is_added_to_a_pool_of_a_running_cluster(cluster, expected):
    before, members = cluster.raylets(), cluster.members()
    text = cluster.file.read_text()
    for old, new in (
        ("decode: [10.77.0.3, 10.77.0.4]", "decode: [10.77.0.3, 10.77.0.4, 10.77.0.5]"),
        ("min_workers: 1\n    max_workers: 2", "min_workers: 3\n    max_workers: 3"),
        ("\nmax_workers: 3", "\nmax_workers: 4"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    cluster.file.write_text(text)
    done = cluster.up("--no-restart")
    assert done.returncode == 0, done.stdout
    every = {HEAD, PREFILL, DECODE, SPARE, ADDED}
    wait_until(lambda: set(cluster.raylets()) == every, "the new host")
    assert before.items() <= cluster.raylets().items()
    assert cluster.members() == members and answers(ask(cluster)) == expected


def newer(wheel, folder):
    """Return the same wheel with another version, as a next release."""
    path = folder / wheel.name.replace("0.1.0", "0.1.1")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "baton/__init__.py" or name.endswith((".dist-info/METADATA", "/RECORD")):
                data = data.replace(b"0.1.0", b"0.1.1")
            new.writestr(name.replace("0.1.0.dist-info", "0.1.1.dist-info"), data)
    return path


def test_a_new_wheel_reaches_every_host_while_requests_go_on(cluster, wheel, expected):
    """Running hosts get it by `baton install`, and new hosts by the cluster file."""
    release = newer(wheel, cluster.lab.folder)
    before = cluster.members()
    text = cluster.file.read_text().replace(str(wheel), str(release))
    cluster.file.write_text(text.replace(wheel.name, release.name))
    done = cluster.up("--no-restart")
    assert done.returncode == 0, done.stdout

    nodes = [host for host in cluster.lab.hosts if host.name in cluster.raylets()]

    def versions():
        return [host.run(". ~/.bashrc; baton --version").stdout.split()[-1] for host in nodes]

    assert versions() == ["0.1.1", *["0.1.0"] * (len(nodes) - 1)]
    said = cluster.on_head(f"baton install ~/.baton/wheel/{release.name}", timeout=120)
    assert said.splitlines()[-1] == "next: baton rollout --wait", said
    assert said.count(": 0.1.1 installed\n") == len(nodes)
    assert versions() == ["0.1.1"] * len(nodes)
    assert cluster.members() == before and answers(ask(cluster)) == expected


def test_a_host_that_leaves_is_emptied_first(cluster, expected_long):
    """The command of a pod's preStop hook, with requests in flight."""
    before = replayed(cluster)
    running = cluster.outside_begin(
        ASK, json.dumps([IN_FLIGHT, 400, cluster.address, str(cluster.keys)])
    )
    assert running.stdout.readline() == "BEGUN\n"
    leaving = cluster.lab.hosts[2]
    done = leaving.run(". ~/.bashrc; python -P -m baton.deploy.ray.leave --within 90", timeout=110)
    assert done.returncode == 0, done.stdout
    assert DECODE not in cluster.members()
    output, _ = running.communicate(timeout=120)
    assert answers(output) == expected_long
    assert replayed(cluster) == before  # drained, so no request was replayed
    assert cluster.verb("wait-ready --prefill 1 --decode 1").startswith("ready: ")
    (host,) = {SPARE, ADDED} & set(cluster.members())
    assert len(cluster.members()[host]) == 1


def test_without_rays_head_requests_go_on_and_ray_up_mends_it(cluster, expected):
    running = cluster.lab.hosts[0].processes().items()
    (gcs,) = [pid for pid, line in running if line.split()[0].endswith("/gcs_server")]
    for host in (cluster.lab.hosts[0], cluster.lab.hosts[1]):
        raylet = cluster.raylets()[host.name]
        assert set(Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")) >= ENVIRONMENT
    before = cluster.members()
    os.kill(gcs, signal.SIGKILL)
    assert answers(ask(cluster)) == expected
    assert cluster.members() == before
    text = cluster.file.read_text()
    cluster.file.write_text(
        text.replace("  - baton launch ", f"  - {SLOW_HEAD}\n  - baton launch ")
    )
    done = cluster.up()
    cluster.file.write_text(text)
    assert done.returncode == 0, done.stdout
    assert "does not answer yet; probing it again" in done.stdout
    assert cluster.verb("wait-ready --prefill 1 --decode 1").startswith("ready: ")
    assert answers(ask(cluster)) == expected


def test_baton_down_and_ray_down_leave_no_process_on_any_host(cluster):
    said = cluster.on_head("baton down", timeout=120)
    assert "down:" in said, said
    wait_until(lambda: cluster.members() == {}, "the end of every worker")
    done = cluster.down()
    assert done.returncode == 0, done.stdout
    assert cluster.left() == {}
