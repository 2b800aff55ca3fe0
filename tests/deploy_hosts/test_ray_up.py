"""A real `ray up` from Baton's own cluster file: hosts join by pool, are added, and all end."""

import pytest

from .cluster import RayCluster, wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(240)]

HEAD, PREFILL, DECODE, SPARE, ADDED = "h1", "h2", "h3", "h4", "h5"
REQUEST = """
import ray
from ray.autoscaler.sdk import request_resources
ray.init("auto", logging_level="error")
request_resources(bundles={bundles})
"""


@pytest.fixture(scope="module")
def cluster(lab, wheel):
    """A head, one prefill host and one of two decode hosts."""
    addresses = [host.address for host in lab.hosts]
    cluster = RayCluster(
        lab, wheel, prefill=(addresses[1],), decode=(addresses[2], addresses[3]), idle_minutes=0.05
    )
    done = cluster.up()
    assert done.returncode == 0, done.stdout
    yield cluster
    cluster.down()


def test_hosts_join_with_their_pools(cluster):
    wanted = {"10.77.0.1": "head", "10.77.0.2": "prefill", "10.77.0.3": "decode"}
    wait_until(lambda: set(cluster.raylets()) == {HEAD, PREFILL, DECODE}, "raylets")
    wait_until(lambda: cluster.nodes() == wanted, "nodes with their pools")
    state = cluster.on_head("stat -c %a ~/.baton/nodes ~/.baton/nodes/lab.json ~/.ray/auth_token")
    assert state.split() == ["700", "600", "600"]


def test_a_process_without_the_token_is_refused(cluster):
    no_token = "RAY_AUTH_TOKEN_PATH=/nowhere timeout 20 ray status 2>&1 || echo refused"
    said = cluster.on_head(no_token)
    assert "refused" in said and "Healthy" not in said, said


def test_a_second_decode_host_is_taken_and_given_back_and_prefill_is_untouched(cluster):
    before = cluster.raylets()
    cluster.on_head_python(REQUEST.format(bundles=[{"prefill": 1}, {"decode": 1}, {"decode": 1}]))
    wait_until(lambda: set(cluster.raylets()) == {HEAD, PREFILL, DECODE, SPARE}, "a host more")
    wait_until(lambda: len(cluster.nodes()) == 4, "a node more")
    cluster.on_head_python(REQUEST.format(bundles=[]))
    wait_until(lambda: len(cluster.left()) == 3, "a decode host to be given back")
    after = cluster.raylets()
    assert after[HEAD] == before[HEAD] and after[PREFILL] == before[PREFILL]
    assert len(after) == 3  # either decode host
    wait_until(lambda: sorted(cluster.nodes().values()) == ["decode", "head", "prefill"], "three")


def test_a_host_is_added_to_a_pool_of_a_running_cluster(cluster):
    before = cluster.raylets()
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


def test_ray_down_leaves_no_process_on_any_host(cluster):
    done = cluster.down()
    assert done.returncode == 0, done.stdout
    assert cluster.left() == {}
