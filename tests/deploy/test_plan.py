import msgspec
import pytest

from baton.deploy.config import ServeSettings, check
from baton.deploy.local import banner
from baton.deploy.plan.addresses import client_addresses
from baton.deploy.plan.plan import (
    describe_plan,
    ipc_addresses,
    resolve_plan,
    router_names,
    tcp_addresses,
)
from baton.deploy.report import ClusterReport
from baton.proto.errors import ConfigError

KEY = "ab" * 32


def plan_for(**kwargs):
    settings = ServeSettings(model="/models/m", **kwargs)
    clients = client_addresses("ipc:///run/x.sock", router_names(settings), claim=False)
    return resolve_plan(settings, ipc_addresses(clients, "/run/folder"), KEY)


def test_one_router_then_the_pools():
    plan = plan_for(prefill=2, decode=3)
    assert [spec.name for spec in plan.processes] == [
        "router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2",
    ]  # fmt: skip
    assert plan.worker_names[0] == "prefill-0"


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 0.0),
        ({"slo_ttft": 1.5}, 0.0),
        ({"prefill_order": "edf", "slo_ttft": 1.5}, 1.5),
        ({"autoscale": "on", "prefill_max": 2, "decode_max": 2, "slo_ttft": 3.0}, 3.0),
        (
            {"autoscale": "on", "prefill_max": 2, "decode_max": 2, "prefill_order": "fcfs"},
            0.0,
        ),
    ],
)
def test_prompts_are_ordered_by_the_time_to_keep_where_one_is_kept(settings, limit):
    _, prefill, _ = (msgspec.to_builtins(spec.config) for spec in plan_for(**settings).processes)
    assert prefill["slo_ttft"] == limit


def test_an_unknown_order_of_prompts_is_refused():
    with pytest.raises(ConfigError, match="prefill_order must be one of auto, fcfs, edf"):
        check(ServeSettings(prefill_order="random"))


def test_addresses_are_distinct_and_workers_know_the_router():
    plan = plan_for(prefill=2, decode=2)
    router, *workers = (msgspec.to_builtins(spec.config) for spec in plan.processes)
    assert router["client_address"] == "ipc:///run/x.sock"
    assert {w["routers"]["router"] for w in workers} == {router["worker_address"]}
    bound = [w["endpoint"] for w in workers] + [w.get("data_endpoint") for w in workers[2:]]
    assert len({*bound, router["worker_address"]}) == 7


def test_every_socket_over_tcp_has_a_port_of_its_own():
    settings = ServeSettings(prefill=2, decode=3, transport="tcp")
    book = tcp_addresses({"router": "ipc:///run/x.sock"}, iter(range(1000, 2000)).__next__)
    plan = resolve_plan(settings, book, KEY)
    _, *workers = (msgspec.to_builtins(spec.config) for spec in plan.processes)
    used = [book.workers["router"], *(w["endpoint"] for w in workers)]
    used += [w["data_endpoint"] for w in workers if "data_endpoint" in w]
    assert sorted(used) == [f"tcp://127.0.0.1:{port}" for port in range(1000, 1009)]


def test_a_worker_that_ended_may_listen_elsewhere():
    book = tcp_addresses({"router": "ipc:///run/x.sock"}, iter(range(1000, 2000)).__next__)
    first = book.control("decode-0")
    assert book.control("decode-0") == first
    book.release("decode-0")
    assert book.control("decode-0") != first


def test_several_routers_have_names_and_addresses_and_every_worker_knows_all():
    plan = plan_for(routers=3)
    assert plan.address == "ipc:///run/x.sock,ipc:///run/x.sock.1,ipc:///run/x.sock.2"
    routers = [spec.config for spec in plan.processes[:3]]
    assert [router.name for router in routers] == ["router-0", "router-1", "router-2"]
    known = {router.name: router.worker_address for router in routers}
    assert all(spec.config.routers == known for spec in plan.processes[3:])
    assert len(set(known.values())) == 3


def test_settings_reach_every_process():
    plan = plan_for(
        block_size=8,
        kv_memory="1MiB",
        max_num_batched_tokens=0,
        max_num_seqs=3,
        policy="round_robin",
        worker_timeout=7.5,
    )
    router, prefill, decode = (spec.config for spec in plan.processes)
    assert router.policy.name == "round_robin"
    assert router.worker_timeout_s == 7.5
    assert prefill.token_budget == 0
    assert decode.max_batch == 3
    assert prefill.runner == decode.runner
    assert (prefill.max_active, decode.token_budget) == (16, 256)
    assert (prefill.runner.kv_bytes, prefill.runner.block_size) == (1 << 20, 8)


def test_the_pools_are_set_apart():
    plan = plan_for(
        kv_memory="1MiB", prefill_kv_blocks=70, prefill_max_num_seqs=5, max_num_seqs=6,
        decode_max_num_batched_tokens=7, max_num_batched_tokens=8,
    )  # fmt: skip
    _, prefill, decode = (spec.config for spec in plan.processes)
    assert (prefill.runner.num_blocks, decode.runner.num_blocks) == (70, 0)
    assert decode.runner.kv_bytes == 1 << 20
    assert (prefill.max_active, decode.max_batch) == (5, 6)
    assert (prefill.token_budget, decode.token_budget) == (8, 7)


def test_a_pool_s_own_memory_wins_over_the_blocks_for_all():
    _, prefill, decode = (
        spec.config for spec in plan_for(kv_blocks=9, decode_kv_memory="2MiB").processes
    )
    assert (prefill.runner.num_blocks, decode.runner.num_blocks) == (9, 0)
    assert decode.runner.kv_bytes == 2 << 20


def test_the_default_memory_is_for_those_the_settings_say_nothing_of():
    settings = ServeSettings(model="/models/m", prefill_kv_memory="3MiB")
    book = ipc_addresses({"router": "ipc:///run/x.sock"}, "/run/folder")
    plan = resolve_plan(settings, book, KEY, kv_default=5 << 20)
    _, prefill, decode = (spec.config for spec in plan.processes)
    assert (prefill.runner.kv_bytes, decode.runner.kv_bytes) == (3 << 20, 5 << 20)
    facts = banner.facts(plan, hint=False)
    assert facts.kv_memory == (
        "3.0 MiB per prefill worker; 5.0 MiB per decode worker, from free memory"
    )
    assert any("3.0 MiB per prefill" in line for line in banner.startup(facts, ClusterReport()))


def test_every_process_logs_at_the_wanted_level_and_drains_as_long_as_wanted():
    router, prefill, decode = (
        spec.config for spec in plan_for(log_level="error", grace=7.0).processes
    )
    assert {router.log_level, prefill.log_level, decode.log_level} == {"error"}
    assert prefill.drain_grace_s == decode.drain_grace_s == 7.0


def test_config_files_are_read_back_equal():
    for spec in plan_for().processes:
        assert msgspec.json.decode(spec.config_json(), type=type(spec.config)) == spec.config


def test_the_printed_plan_hides_the_key():
    text = msgspec.json.encode(describe_plan(plan_for())).decode()
    assert KEY not in text
    assert "prefill-0" in text


@pytest.mark.parametrize("timeout", [0.2, -1.0, float("inf"), float("nan")])
def test_a_worker_timeout_that_cannot_be_is_refused(timeout):
    with pytest.raises(ConfigError, match=r"worker_timeout must be at least 0\.5 seconds"):
        check(ServeSettings(worker_timeout=timeout))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="must be one of"):
        plan_for(policy="random")


def test_memory_is_shared_out_for_the_most_there_may_be():
    settings = {"device": "cuda", "prefill": 1, "decode": 1}
    few = plan_for(**settings).processes[1].config.runner.device_share
    many = plan_for(**settings, decode_max=8).processes[1].config.runner.device_share
    assert many == pytest.approx(few * 2 / 9)
