"""The whole controller with real processes; this process replaces Ray."""

import http.client
import os
import signal
import threading

import msgspec
import pytest

from baton.deploy.config import ServeSettings
from baton.deploy.controller.admin import DrainWorker, RollOut, TurnWorker
from baton.deploy.controller.admin_client import AdminClient
from baton.deploy.controller.events import Down, Scale
from baton.deploy.plan.addresses import HttpPort, free_ports
from baton.deploy.ray.controller import RayCluster
from baton.deploy.ray.member import Supervisor
from baton.deploy.ray.placing import order_of, place, read_order
from baton.proto.errors import ConfigError, RequestFailed

from ...processes import wait_until

pytestmark = pytest.mark.cluster


class NoRay:
    """Runs members as supervisors in this process."""

    def __init__(self):
        self.members: dict[str, Supervisor] = {}
        self.saved: bytes | None = None
        self.requested: dict[str, int] = {}
        self.last_words: str | None = None
        self.autoscaled: dict[str, int] | None = {"router": 1, "prefill": 2, "decode": 2}

    def create(self, spec):
        if spec.name not in self.members:
            process = place(read_order(order_of(spec, "here")), "here")
            self.members[spec.name] = Supervisor(process, revision=spec.revision, host="here")
        return spec.name

    def ask(self, actor):
        return actor

    def answer(self, ticket):
        return self.members[ticket].report()

    def stop(self, actor, grace):
        self.members[actor].stop(grace)

    def turn(self, actor, spec):
        self.members[actor].turn(place(read_order(order_of(spec, "here")), "here"))

    def kill_child(self, actor, pid):
        self.members[actor].kill_child(pid)

    def kill(self, actor):
        self.members.pop(actor).close()

    def is_free(self, name):
        return name not in self.members

    def why_unplaced(self, actor, role):
        return ""

    def request(self, bundles):
        self.requested = bundles

    def capacity(self):
        return self.autoscaled

    def nodes(self):
        return {"prefill": 1, "decode": 1}

    def load(self):
        return self.saved

    def save(self, data):
        self.saved = data

    def forget(self, last_words):
        self.saved, self.last_words = None, last_words

    def existing(self):
        return list(self.members)


class Running:
    """A controller on a thread."""

    def __init__(self, ray, settings):
        self.cluster = RayCluster(settings, ray, "here")
        self.thread = threading.Thread(target=self.cluster.run, daemon=True)
        self.thread.start()

    def feed(self, event):
        self.cluster._loop.post(lambda: self.cluster._shell.feed(event))

    def ready(self):
        overview = self.cluster._shell.overview()
        return sorted(m.name for m in overview.members if m.stage == "ready")

    def crash(self):
        """Stop as after a kill: the actors and the saved state remain."""
        ray, saved = self.cluster._api, self.cluster._api.saved
        self.cluster._loop.post(self.cluster._loop.stop)
        self.thread.join(60)
        ray.saved = saved


@pytest.fixture
def ray():
    ray = NoRay()
    yield ray
    for supervisor in ray.members.values():
        supervisor.close()


@pytest.fixture
def settings(tmp_path):
    return ServeSettings(
        address=f"tcp://127.0.0.1:{free_ports(1)[0]}",
        admin=f"ipc://{tmp_path}/admin",
        kv_memory="16MiB",
        grace=5.0,
        gateways=0,
    )


def http_status(port: int) -> int:
    """Status of /ready; 0 while nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def test_the_port_of_another_cluster_is_refused_for_gateways(ray, settings):
    """Gateways share their port, so the kernel would give this cluster requests of the other."""
    other = HttpPort("127.0.0.1", 0)
    try:
        settings = msgspec.structs.replace(settings, gateways=1, http_port=other.number)
        with pytest.raises(ConfigError, match=f"http_port {other.number} of 127.0.0.1 is in use"):
            RayCluster(settings, ray, "here")
    finally:
        other.close()


def test_a_controller_that_dies_is_followed_by_one_that_goes_on(ray, settings):
    port = free_ports(1)[0]
    settings = msgspec.structs.replace(settings, gateways=1, http_port=port)
    first = Running(ray, settings)
    assert first.cluster.http == f"http://127.0.0.1:{port}/v1"
    one_each = ["decode-0", "gateway-0", "prefill-0", "router"]
    wait_until(lambda: first.ready() == one_each, what="all to be ready")
    assert ray.requested == {"router": 1, "prefill": 1, "decode": 1}
    first.feed(Scale("ticket", {"decode": 2}))
    wait_until(lambda: "decode-1" in first.ready(), what="another decode worker")
    pid = ray.members["gateway-0"].report().pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ray.members["gateway-0"].report().pid not in (0, pid), what="a restart")
    wait_until(lambda: http_status(port) == 200, what="its successor to serve at the same port")
    wait_until(lambda: "gateway-0" in first.ready(), what="its successor to be ready")
    with pytest.raises(OSError, match="in use"):
        HttpPort("127.0.0.1", port)
    pids = {name: member.report().pid for name, member in ray.members.items()}
    first.crash()

    second = Running(ray, settings)
    wait_until(lambda: len(second.ready()) == 5, what="all to be seen again")
    assert http_status(port) == 200
    assert {name: member.report().pid for name, member in ray.members.items()} == pids
    second.feed(Scale("ticket", {"decode": 1}))
    wait_until(lambda: second.ready() == one_each, what="one to leave")
    second.feed(Down())
    second.thread.join(60)
    assert not second.thread.is_alive()
    assert http_status(port) == 0
    HttpPort("127.0.0.1", port).close()
    assert ray.members == {}
    assert ray.requested == {}
    assert (ray.saved, ray.last_words) == (None, "")


def test_workers_of_a_host_that_leaves_are_followed_by_others(ray, settings):
    running = Running(ray, settings)
    wait_until(lambda: running.ready() == ["decode-0", "prefill-0", "router"], what="all")
    assert running.cluster.leave("there") == []
    assert sorted(running.cluster.leave("here")) == ["decode-0", "prefill-0"]
    after = ["decode-1", "prefill-1", "router"]
    wait_until(lambda: running.ready() == after, what="others to be ready")
    # other members may be ready before the actors of ended members are gone
    wait_until(lambda: sorted(ray.members) == after, what="those that left to be gone")
    running.feed(Down())
    running.thread.join(40)
    assert not running.thread.is_alive()


def test_without_a_spare_node_a_rollout_is_refused_at_once_and_goes_in_place(ray, settings):
    ray.autoscaled = None
    running = Running(ray, settings)
    wait_until(lambda: running.ready() == ["decode-0", "prefill-0", "router"], what="all")
    before = {name: member.report().pid for name, member in ray.members.items()}
    with AdminClient(settings.admin, timeout=20.0) as client:
        with pytest.raises(
            RequestFailed, match=r"no room for one more prefill worker, .*--in-place"
        ):
            list(client.ask(RollOut()))
        with pytest.raises(RequestFailed, match="decode must keep at least 1 ready worker"):
            list(client.ask(DrainWorker(worker="decode-0")))
        with pytest.raises(RequestFailed, match="decode must keep at least 1 ready"):
            list(client.ask(TurnWorker(worker="decode-0", role="prefill")))
        said = list(client.ask(RollOut(in_place=True), wait=60.0))
    assert said[-1].text == "3 of 3 replaced"
    after = {name: member.report().pid for name, member in ray.members.items()}
    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())
    running.feed(Down())
    running.thread.join(40)
    assert not running.thread.is_alive()


def test_what_cannot_run_ends_it_with_the_reason(ray, settings):
    broken = Running(ray, msgspec.structs.replace(settings, model="/no/such/model"))
    broken.thread.join(60)
    assert not broken.thread.is_alive()
    assert ray.members == {}
    assert "/no/such/model" in (ray.last_words or "")


def test_keys_that_are_missing_are_said_before_anything_starts(ray, settings):
    with pytest.raises(ConfigError, match="/no/such/keys"):
        RayCluster(msgspec.structs.replace(settings, keys="/no/such/keys"), ray, "here")
    assert ray.members == {}


def test_a_worker_changes_its_role_and_a_restart_and_the_next_controller_keep_it(ray, settings):
    settings = msgspec.structs.replace(settings, decode=2)
    first = Running(ray, settings)
    four = ["decode-0", "decode-1", "prefill-0", "router"]
    wait_until(lambda: first.ready() == four, what="all")
    nodes = dict(ray.requested)
    pid = ray.members["decode-1"].report().pid
    with AdminClient(settings.admin, timeout=20.0) as client:
        wait_until(lambda: first.cluster._core.can_turn, what="the settings to be judged")
        list(client.ask(TurnWorker(worker="decode-1", role="prefill"), wait=60.0))
        overview = client.overview()
    assert overview.targets == {"prefill": 2, "decode": 1}
    roles = {member.name: member.role for member in overview.members}
    assert roles["decode-1"] == "prefill"
    assert ray.members["decode-1"].report().pid == pid
    assert ray.requested == nodes  # the worker stays on its node
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ray.members["decode-1"].report().pid not in (0, pid), what="a restart")
    wait_until(lambda: first.ready() == four, what="its successor")
    first.crash()

    second = Running(ray, settings)
    wait_until(lambda: second.ready() == four, what="all to be seen again")
    again = {member.name: member.role for member in second.cluster._shell.overview().members}
    assert again == roles
    assert ray.members["decode-1"].report().role == "prefill"
    wait_until(lambda: ray.requested == nodes, what="the same nodes")
    second.feed(Down())
    second.thread.join(60)
    assert not second.thread.is_alive()
