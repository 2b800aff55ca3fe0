"""Errors of `ray up` for clusters that cannot start; no host runs a process afterwards."""

import pytest

from baton.deploy.ray.remote import CHECK_SECONDS

from .cluster import RayCluster

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120, func_only=True)]


@pytest.fixture(scope="module")
def cluster(lab, wheel):
    """A cluster that never starts."""
    hosts = [host.address for host in lab.hosts]
    return RayCluster(
        lab, wheel, name="refused", prefill=(hosts[1],), decode=(hosts[2], hosts[3]), decode_min=2
    )


def refused(cluster, said, **changed):
    """Check that `ray up` of a changed file fails with this sentence and starts no process."""
    text = cluster.file.read_text()
    for old, new in changed.values():
        assert old in text
        cluster.file.write_text(text.replace(old, new, 1))
    try:
        done = cluster.up()
    finally:
        cluster.file.write_text(text)
    assert done.returncode != 0 and said in done.stdout, done.stdout
    assert cluster.left() == {}
    return done.stdout


def test_an_unreachable_host_that_is_needed(cluster):
    cluster.lab.unplug(3)
    try:
        text = refused(cluster, "nothing was started: decode needs 2 hosts, 1 can be used")
    finally:
        cluster.lab.unplug(3, plugged=True)
    assert "host 10.77.0.3 cannot be reached" in text
    assert CHECK_SECONDS < 10


def test_a_head_that_cannot_be_one(cluster):
    moved = "mv ~/.baton/venv/bin/python ~/.baton/venv/bin/kept"
    cluster.lab.hosts[0].run(f"{moved} && ln -s /bin/true ~/.baton/venv/bin/python")
    try:
        text = refused(cluster, ".baton/venv has Python ,")
    finally:
        cluster.lab.hosts[0].run("cd ~/.baton/venv/bin && mv kept python")
    assert "host 10.77.0.1 cannot be a node: " in text


@pytest.mark.parametrize("missing", ["token", "keys"])
def test_a_missing_key(cluster, missing):
    path = getattr(cluster, missing)
    path.rename(path.with_name("kept"))
    try:
        refused(cluster, f"{path} does not exist")
    finally:
        path.with_name("kept").rename(path)


def test_a_key_that_others_can_read(cluster):
    key = cluster.keys / "router.key"
    key.chmod(0o644)
    try:
        refused(cluster, f"{key} has mode 0644, others may use it: chmod 600 {key}")
    finally:
        key.chmod(0o600)


def test_more_workers_than_hosts(cluster):
    change = ("min_workers: 2\n    max_workers: 2", "min_workers: 2\n    max_workers: 3")
    refused(cluster, "max_workers 3, but provider.pools.decode has 2 hosts", change=change)


def test_a_wrong_key_in_the_file(cluster):
    change = ("max_workers: 3", "autoscale: true\nmax_workers: 3")
    refused(cluster, "'autoscale' was unexpected", change=change)
    change = ("  pools:", "  pool: []\n  pools:")
    refused(cluster, "provider: Object contains unknown field `pool`", change=change)
    cluster.file.write_text(cluster.file.read_text() + "\n")
    checked = cluster.outside_run(f"baton ray-config --check {cluster.file}")
    assert checked.stdout.endswith(": refused, prefill 1 to 1, decode 2 to 2\n")
