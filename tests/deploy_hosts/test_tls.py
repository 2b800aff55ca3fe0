"""Ray's TLS: hosts join with certificates, and the call that ends a Ray process is refused.

For comparison, the same call ends a head without TLS.
"""

import json
import shlex
from pathlib import Path

import pytest

from .cluster import RayCluster, wait_until
from .test_first_cluster import answers, ask

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(240, func_only=True)]

START_SYNC = (Path(__file__).parent / "start_sync.py").read_text()


def processes_of(host) -> dict[str, int]:
    """Return Ray's servers on a host, by name."""
    names = {line.split()[0].rpartition("/")[2]: pid for pid, line in host.processes().items()}
    return {name: pid for name, pid in names.items() if name in ("gcs_server", "raylet")}


@pytest.fixture
def cluster(lab, wheel):
    addresses = [host.address for host in lab.hosts[:3]]
    folder = lab.folder / "ray-tls"
    done = lab.outside.run(f"~/.baton/venv/bin/baton ray-certs {folder} {' '.join(addresses)}")
    assert done.returncode == 0, done.stdout
    cluster = RayCluster(
        lab, wheel, name="tls", prefill=(addresses[1],), decode=(addresses[2],),
        tls=str(folder / "nodes"), launch="--kv-memory 64MiB",
    )  # fmt: skip
    yield cluster
    cluster.down()


def test_a_cluster_with_tls_serves_and_reads_nothing_from_a_stranger(cluster):
    done = cluster.up()
    assert done.returncode == 0, done.stdout
    assert cluster.verb("wait-ready --prefill 1 --decode 1").startswith("ready: ")
    wanted = {"10.77.0.1": "head", "10.77.0.2": "prefill", "10.77.0.3": "decode"}
    wait_until(lambda: cluster.nodes() == wanted, "nodes with their pools")
    assert len(answers(ask(cluster, count=4))) == 4
    hosts = cluster.lab.hosts[:3]
    before = [processes_of(host) for host in hosts]
    for address, port in [("10.77.0.1", 6379), ("10.77.0.1", 6380), ("10.77.0.3", 6380)]:
        cluster.outside_python(START_SYNC, address, str(port))
    plain = "RAY_USE_TLS=0 timeout 20 ray status || echo refused"
    assert "refused" in cluster.on_head(plain)
    assert [processes_of(host) for host in hosts] == before
    assert len(answers(ask(cluster, count=4))) == 4
    said = cluster.on_head("baton down", timeout=120)
    assert "down:" in said, said
    done = cluster.down()
    assert done.returncode == 0, done.stdout
    assert cluster.left() == {}


def test_without_tls_the_same_call_ends_the_head(lab):
    head = lab.hosts[3]
    start = "ray start --head --port=6379 --num-cpus=0 --object-store-memory=80000000"
    quiet = "--include-dashboard=false --include-log-monitor=false --disable-usage-stats"
    token = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN={json.dumps('0123456789abcdef' * 2)}"
    here = f"--node-ip-address={head.address}"
    done = head.run(f"PATH=~/.baton/venv/bin:$PATH; {token} {start} {here} {quiet}", timeout=90)
    assert done.returncode == 0, done.stdout
    try:
        assert "gcs_server" in processes_of(head)
        python = "~/.baton/venv/bin/python -P -c"
        done = lab.outside.run(f"{python} {shlex.quote(START_SYNC)} {head.address} 6379")
        assert done.returncode == 0, done.stdout
        wait_until(lambda: "gcs_server" not in processes_of(head), "the end of gcs_server", 30)
    finally:
        head.run("PATH=~/.baton/venv/bin:$PATH; ray stop --force", timeout=60)
