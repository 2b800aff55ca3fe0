"""The addresses of a cluster on Ray."""

import pytest

from baton.deploy.config import ServeSettings
from baton.deploy.ray.plan import ray_plan, ray_settings
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


def test_ray_alone_chooses_gpus():
    with pytest.raises(ConfigError, match="device_ids has no meaning under Ray"):
        ray_settings(ServeSettings(device="cuda", device_ids="1"), HEAD)
