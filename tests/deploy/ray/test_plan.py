"""The addresses of a cluster on Ray."""

import msgspec
import pytest

from baton.cli.command import main
from baton.deploy.config import ServeSettings
from baton.deploy.ray import launch as launching
from baton.deploy.ray.controller import ControllerFacts
from baton.deploy.ray.plan import ray_plan, ray_settings, with_worker_per_ray_gpu
from baton.proto.errors import ConfigError

HEAD = "10.0.0.1"


def test_without_keys_everything_stays_on_the_loopback():
    plan = ray_plan(ray_settings(ServeSettings(), HEAD), "ab")
    assert plan.address == "tcp://127.0.0.1:7070"
    assert plan.book.workers == {"router": "tcp://127.0.0.1:7170"}


def test_with_keys_routers_listen_where_other_hosts_reach_them():
    plan = ray_plan(ray_settings(ServeSettings(keys="/k", routers=2), HEAD), "ab")
    assert plan.address == "tcp://10.0.0.1:7070,tcp://10.0.0.1:7071"
    assert list(plan.book.workers.values()) == ["tcp://10.0.0.1:7170", "tcp://10.0.0.1:7171"]


def test_workers_are_told_the_routers_and_find_their_own_address():
    settings = ray_settings(ServeSettings(address="tcp://127.0.0.1:9000"), HEAD)
    specs = {spec.name: spec.config for spec in ray_plan(settings, "ab").processes}
    assert specs["decode-0"].endpoint == specs["decode-0"].data_endpoint == ""
    assert specs["decode-0"].routers == {"router": "tcp://127.0.0.1:9100"}
    assert specs["prefill-0"].runner.kv_bytes == 0  # the node chooses it
    assert not specs["prefill-0"].share_pool


def test_gateways_know_every_router_and_listen_at_a_fixed_port():
    settings = ray_settings(ServeSettings(routers=2, gateways=2), HEAD)
    plan = ray_plan(settings, "ab")
    gateways = [spec.config for spec in plan.processes if spec.role == "gateway"]
    assert [(each.host, each.port) for each in gateways] == [("127.0.0.1", 8000)] * 2
    assert gateways[0].routers == ("tcp://127.0.0.1:7070", "tcp://127.0.0.1:7071")
    assert all(each.share_port for each in gateways)
    assert plan.http_url == "http://127.0.0.1:8000/v1"
    with pytest.raises(ConfigError, match="http_port must not be 0 under Ray"):
        ray_settings(ServeSettings(http_port=0), HEAD)
    assert ray_plan(ray_settings(ServeSettings(http_port=0, gateways=0), HEAD), "ab").http_url == ""


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///tmp/x",
        "tcp://127.0.0.1:65500",
        "tcp://127.0.0.1:0",
        "nonsense",
        "tcp://a:1,tcp://b:2",
    ],
)
def test_an_address_without_room_for_all_is_refused(address):
    with pytest.raises(ConfigError, match="address"):
        ray_settings(ServeSettings(address=address), HEAD)


@pytest.mark.parametrize(
    ("resources", "settings", "counts"),
    [
        ({"CPU": 96.0, "GPU": 8.0}, {}, (2, 6)),
        ({"GPU": 16.0}, {"decode_max": 8}, (4, 8)),
        ({"GPU": 2.5}, {}, (1, 1)),
        ({"GPU": 0.5}, {"prefill_min": 2, "prefill": 2}, (2, 1)),
        ({"CPU": 4.0}, {}, (1, 1)),
    ],
)
def test_there_is_a_worker_per_gpu_of_the_ray_cluster(resources, settings, counts):
    found = with_worker_per_ray_gpu(ServeSettings(device="cuda", **settings), resources)
    assert (found.prefill, found.decode) == counts


class RayWithGpus:
    """Ray's calls of a launch: a head with GPUs, and perhaps a controller that has launched."""

    def __init__(self, monkeypatch, gpus, running=None):
        self.started, self.names = [], ["controller"] if running else []
        facts = ControllerFacts(launched=msgspec.to_builtins(running or ServeSettings()))
        monkeypatch.setattr(launching, "connect", lambda _address: self)
        monkeypatch.setattr(launching, "existing", lambda: self.names)
        monkeypatch.setattr(launching, "is_own_address", lambda _address: True)
        monkeypatch.setattr(launching, "check_model", lambda _settings: None)
        monkeypatch.setattr(launching, "put_value", lambda *_: None)
        monkeypatch.setattr(launching, "_watch_start", lambda *_: None)
        monkeypatch.setattr(launching, "_facts", lambda _ray, _actor: facts)
        self.cluster_resources = lambda: {"GPU": gpus}

    def nodes(self):
        resources = {"node:__internal_head__": 1.0}
        return [{"Alive": True, "NodeManagerAddress": HEAD, "Resources": resources}]

    def remote(self, *arguments):
        if isinstance(arguments[0], bytes):
            self.started.append(msgspec.json.decode(arguments[0], type=ServeSettings))
        return self

    def options(self, **_options):
        return self


def test_a_launch_asks_ray_for_its_gpus_once(monkeypatch):
    settings = ServeSettings(device="cuda")
    ray = RayWithGpus(monkeypatch, 8.0)
    launching.launch(settings, per_gpu=True)
    launching.launch(settings)  # numbers that the user gave
    assert [(each.prefill, each.decode) for each in ray.started] == [(2, 6), (1, 1)]
    # Hosts have joined since: a second launch finds the cluster, whatever its numbers.
    running = ServeSettings(device="cuda", prefill=1, decode=3)
    RayWithGpus(monkeypatch, 8.0, running)
    assert launching.launch(settings, per_gpu=True)[1]
    with pytest.raises(ConfigError, match="already running with other settings: decode;"):
        launching.launch(settings)


@pytest.mark.parametrize(
    ("flags", "counted"),
    [
        (["--device=cuda"], True),
        (["--device=cuda", "--decode=2"], False),
        (["--device=cuda", "--prefill=1"], False),
        ([], False),
    ],
)
def test_the_command_says_whether_gpus_decide(monkeypatch, flags, counted):
    seen = []

    def launch(settings, _address, *, per_gpu):
        seen.append((settings.prefill, settings.decode, per_gpu))
        return ControllerFacts(address="tcp://a:1"), False

    monkeypatch.setattr(launching, "launch", launch)
    assert main(["launch", "--backend=ray", *flags]) == 0
    assert seen == [(1, 2 if "--decode=2" in flags else 1, counted)]


def test_ray_alone_chooses_gpus():
    with pytest.raises(ConfigError, match="device_ids has no meaning under Ray"):
        ray_settings(ServeSettings(device="cuda", device_ids="1"), HEAD)
