"""The node provider on real hosts: accepted hosts, reported hosts, termination."""

import json
import shlex
import sys

import pytest

from baton.deploy.ray.remote import CHECK_SECONDS, CONNECT_SECONDS

from .cluster import wait_until
from .conftest import make_environment
from .hosts import Lab, missing

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120, func_only=True)]

PYTHON = f"{sys.base_prefix}/bin/python3.11"
SCRIPT = """
import json, sys, logging
from baton.deploy.ray.provider import FixedHosts
logging.basicConfig(format="%(message)s")
pools, key, python, calls = json.loads(sys.argv[1])
provider = FixedHosts(dict(type="external", module="x", pools=pools, python=python, grace=1,
                           ssh_user="root", ssh_private_key=key), "tried")
for name, *arguments in calls:
    try:
        print("RESULT " + json.dumps(getattr(provider, name)(*arguments)))
    except Exception as problem:
        print("RESULT " + json.dumps(f"{type(problem).__name__}: {problem}"))
"""
TAGS = {"ray-user-node-type": "decode", "ray-node-type": "worker"}
# A process with a raylet's command line, and a child found by its environment; both ignore TERM.
STUBBORN = """
exec >/dev/null 2>&1
trap '' TERM
cd /tmp && mkdir -p raylet && cp $(command -v sleep) raylet/raylet
export RAY_CLOUD_INSTANCE_ID={address}@7
/tmp/raylet/raylet 1000 & sleep 1001 &
env -u RAY_CLOUD_INSTANCE_ID sleep 1002 &
disown -a
"""


class Provider:
    """Calls the provider in a separate process on the machine outside."""

    def __init__(self, lab, **pools) -> None:
        self.lab, self.pools, self.python, self.said = lab, pools, PYTHON, ""

    def call(self, *calls):
        """Run calls in one process; return their results."""
        given = json.dumps([self.pools, str(self.lab.key), self.python, calls])
        command = f"~/.baton/venv/bin/python -P -c {shlex.quote(SCRIPT)} {shlex.quote(given)}"
        done = self.lab.outside.run(command)
        self.said = done.stdout
        marked = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert len(marked) == len(calls), done.stdout
        return [json.loads(line.removeprefix("RESULT ")) for line in marked]

    def create(self, count):
        """Call create_node once."""
        (made,) = self.call(["create_node", {}, TAGS, count])
        return made


@pytest.fixture
def provider(lab):
    """A provider with two decode hosts, without state of earlier tests."""
    lab.outside.run("rm -rf ~/.baton/nodes")
    return Provider(lab, head=["10.77.0.1"], decode=["10.77.0.2", "10.77.0.3"])


def test_hosts_are_taken_in_order_and_an_id_is_never_used_again(provider):
    assert provider.create(1) == {"10.77.0.2@1": {}}
    assert provider.create(1) == {"10.77.0.3@2": {}}
    listed, tags, _, left = provider.call(
        ["non_terminated_nodes", TAGS],
        ["node_tags", "10.77.0.2@1"],
        ["terminate_node", "10.77.0.2@1"],
        ["non_terminated_nodes", {}],
    )
    assert listed == ["10.77.0.2@1", "10.77.0.3@2"] and tags == TAGS and left == ["10.77.0.3@2"]
    assert provider.create(1) == {"10.77.0.2@3": {}}


def test_more_hosts_than_there_are_is_an_error_that_keeps_those_it_got(provider):
    made = provider.create(3)
    assert "1 of 3 hosts missing: all 2 are in use" in made and "NodeLaunchException" in made
    assert len(provider.call(["non_terminated_nodes", {}])[0]) == 2


def test_an_unreachable_host_is_named_within_ten_seconds_and_the_next_is_taken(provider):
    provider.lab.unplug(2)
    try:
        assert provider.create(1) == {"10.77.0.3@1": {}}
        assert CONNECT_SECONDS < CHECK_SECONDS < 10
        assert "host 10.77.0.2 cannot be reached" in provider.said
    finally:
        provider.lab.unplug(2, plugged=True)


@pytest.mark.parametrize("wrong", ["python", "ray"])
def test_a_wrong_version_is_named_and_the_next_host_is_taken(provider, wrong):
    packages = "~/.baton/venv/lib/python3.11/site-packages"
    if wrong == "ray":
        folder = f"{packages}/ray-2.59.0.dist-info"
        plant = f"mkdir {folder}; echo -e 'Name: ray\\nVersion: 2.59.0' > {folder}/METADATA"
        mend, text = f"rm -r {folder}", "has Ray 2.59.0, but this cluster runs Ray 2.60.0"
    else:
        answer = "#!/bin/sh\\necho 3.10"
        plant = "mv ~/.baton ~/.kept; mkdir -p ~/.baton/venv/bin; F=~/.baton/venv/bin/python; "
        plant += f"echo -e '{answer}' > $F; chmod +x $F"
        mend, text = "rm -r ~/.baton; mv ~/.kept ~/.baton", "has Python 3.10, but this cluster runs"
    host = provider.lab.hosts[1]
    assert host.run(plant).stdout == ""
    try:
        assert provider.create(1) == {"10.77.0.3@1": {}}
    finally:
        host.run(mend)
    assert (
        f"host 10.77.0.2 cannot be a node: ~/.baton/venv {text}".replace("~", "/root")
        in provider.said
    )


def test_a_missing_python_is_named(provider):
    provider.python = "python3.99"
    made = provider.create(1)
    assert "host 10.77.0.2 cannot be a node: has no python3.99; install Python 3.11 there" in made


def test_terminate_ends_what_ignores_it_and_nothing_else(provider):
    host = provider.lab.hosts[1]
    (node,) = provider.create(1)
    host.run(STUBBORN.format(address=host.address))
    # a shell before its exec does not have the environment yet
    begun = ["/tmp/raylet/raylet 1000", "sleep 1001", "sleep 1002"]
    wait_until(lambda: sorted(host.processes().values()) == begun, "three processes")
    (result,) = provider.call(["terminate_node", node])
    assert result is None
    assert list(host.processes().values()) == ["sleep 1002"]
    host.run("pkill -x sleep")  # in the host's own process namespace


def test_a_node_ended_by_hand_is_ended_without_a_word(provider):
    (node,) = provider.create(1)
    result, left = provider.call(["terminate_node", node], ["non_terminated_nodes", {}])
    assert (result, left) == (None, [])


def test_a_lost_host_counts_as_ended_with_a_warning(provider):
    (node,) = provider.create(1)
    provider.lab.unplug(2)
    try:
        result, left = provider.call(["terminate_node", node], ["non_terminated_nodes", {}])
    finally:
        provider.lab.unplug(2, plugged=True)
    assert (result, left) == (None, [])
    assert "10.77.0.2 cannot be reached" in provider.said and "was not ended" in provider.said


def test_hosts_end_with_whoever_made_them(tmp_path):
    if why := missing():
        pytest.skip(why)
    lab = Lab(tmp_path, 1, keep=[])
    namespace = lab.hosts[0]
    # the script that sets it may still be running
    wait_until(lambda: namespace.run("hostname").stdout == "h1\n", "its name")
    namespace.run("sleep 1000 >/dev/null 2>&1 & disown -a")
    # the shell that starts it may still be forking
    wait_until(lambda: list(namespace.processes().values()) == ["sleep 1000"], "sleep alone")
    lab.close()
    assert namespace.processes() == {}


def test_a_prebuilt_environment_knows_ray_and_not_yet_baton(lab):
    host = lab.hosts[4]
    assert host.run("~/.baton/venv/bin/python -P -c 'import ray'").returncode == 0
    assert host.run("~/.baton/venv/bin/python -P -c 'import baton'").returncode != 0
    make_environment(host)  # idempotent
