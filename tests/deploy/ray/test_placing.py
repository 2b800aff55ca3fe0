"""The member settings that the head sends, and the settings that the node adds."""

import msgspec
import pytest

from baton.decode_worker.config import DecodeWorkerConfig
from baton.deploy.config import ServeSettings, check, demo_model_folder
from baton.deploy.controller.backend import MemberSpec
from baton.deploy.plan.revisions import Revisions
from baton.deploy.ray.placing import order_of, place, read_order
from baton.deploy.ray.plan import ray_plan, ray_settings
from baton.deploy.supervise.process import ProcessSpec
from baton.engine.loading.runner_config import RunnerConfig
from baton.gateway.config import GatewayConfig
from baton.proto.errors import ConfigError
from baton.router.config import RouterConfig

HEAD = "10.0.0.1"


def worker(keys="", **runner) -> MemberSpec:
    config = DecodeWorkerConfig(
        worker_id="decode-0",
        endpoint="",
        routers={"router": "tcp://10.0.0.1:7071"},
        runner=RunnerConfig(**{"model": "", "kv_bytes": 1 << 20, **runner}),
        keys=keys,
    )
    module = "baton.decode_worker"
    process = ProcessSpec(name="decode-0", role="decode", module=module, config=config)
    return MemberSpec(name="decode-0", role="decode", revision=3, process=process)


def placed(spec: MemberSpec, host: str) -> ProcessSpec:
    return place(read_order(order_of(spec, HEAD)), host)


def test_a_worker_listens_at_its_own_node():
    process = placed(worker(keys="/etc/baton/keys"), "10.0.0.7")
    assert process.config.endpoint == "tcp://10.0.0.7:0"
    assert process.config.routers == {"router": "tcp://10.0.0.1:7071"}
    assert process.config.runner.model == str(demo_model_folder())
    assert process.module == "baton.decode_worker"


def test_without_keys_it_listens_for_this_machine_alone():
    assert placed(worker(), HEAD).config.endpoint == "tcp://127.0.0.1:0"


def test_without_keys_another_host_is_refused():
    with pytest.raises(ConfigError, match="baton keygen"):
        placed(worker(), "10.0.0.7")


def test_memory_is_chosen_by_what_is_free_on_the_node():
    chosen = placed(worker(kv_bytes=0), HEAD).config.runner.kv_bytes
    assert chosen > 1 << 20
    assert placed(worker(kv_bytes=0, num_blocks=7), HEAD).config.runner.kv_bytes == 0


def test_the_gpu_that_ray_gives_is_always_device_0():
    runner = placed(worker(backend="cuda", ordinal=3, device_sharers=9), HEAD).config.runner
    assert (runner.ordinal, runner.device_sharers) == (0, 1)


def test_a_key_folder_in_a_home_folder_is_that_of_the_node(monkeypatch):
    monkeypatch.setenv("HOME", "/home/node")
    config = placed(worker(keys="~/keys"), "10.0.0.7").config
    assert config.keys == "/home/node/keys"


def test_a_router_keeps_its_addresses():
    config = RouterConfig(client_address="tcp://127.0.0.1:7070", worker_address="ipc:///x")
    process = ProcessSpec(name="router", role="router", module="baton.router", config=config)
    spec = MemberSpec(name="router", role="router", revision=0, process=process)
    assert placed(spec, HEAD).config == msgspec.structs.replace(
        config, model_folder=str(demo_model_folder())
    )


def test_a_gateway_keeps_its_port_and_runs_where_the_routers_are():
    config = GatewayConfig(routers=("tcp://127.0.0.1:7070",), port=8000, share_port=True)
    process = ProcessSpec(name="gateway-0", role="gateway", module="baton.gateway", config=config)
    spec = MemberSpec(name="gateway-0", role="gateway", revision=0, process=process)
    assert placed(spec, HEAD) == process
    with pytest.raises(ConfigError, match="baton keygen"):
        placed(spec, "10.0.0.7")


def test_what_is_no_order_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        read_order(b'{"name": 3}')
    order = order_of(worker(), HEAD).replace(b'"worker_id"', b'"worker_ix"')
    with pytest.raises(ConfigError, match="settings of decode-0"):
        place(read_order(order), HEAD)


def test_modes_and_classes_of_the_user_reach_the_processes_of_all_nodes(tmp_path):
    settings = check(
        ServeSettings(
            mode="adaptive", policy="own:Policy", decider="own:Decider", metric="own:Metric, own:B",
            prefill_order="own:Order", kv_transport="own:Way", extensions=str(tmp_path),
            slo_ttft=1.5, slo_itl=0.05, metrics_port=9100, workers_max=4, autoscale="on",
        )
    )  # fmt: skip
    revisions = Revisions(ray_plan(ray_settings(settings, HEAD), "ab" * 32))

    def config(name: str):
        return placed(revisions.spec(name, name.partition("-")[0], 0), HEAD).config

    router, prefill, decode = config("router"), config("prefill-3"), config("decode-2")
    assert (router.mode, router.policy.name, router.decider) == (
        "adaptive", "own:Policy", "own:Decider",
    )  # fmt: skip
    assert router.metrics == ("own:Metric", "own:B")
    assert (router.slo_ttft_s, router.slo_itl_s) == (1.5, 0.05)
    assert (prefill.order, prefill.slo_ttft) == ("own:Order", 1.5)
    assert prefill.kv_transport == decode.kv_transport == "own:Way"
    assert decode.step_seconds == router.step_time_s == pytest.approx(0.04)
    folders = {one.extensions for one in (router, prefill, decode)}
    assert folders == {str(tmp_path)}
