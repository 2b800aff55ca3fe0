import math
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from baton.deploy.config import LISTS, ServeSettings, check
from baton.deploy.local import banner
from baton.deploy.plan import prepare
from baton.deploy.plan.addresses import client_addresses
from baton.deploy.plan.bounds import Bounds
from baton.deploy.plan.plan import (
    GpuBook,
    describe_plan,
    ipc_addresses,
    process_of,
    resolve_plan,
    router_names,
    split_gpus,
    tcp_addresses,
)
from baton.deploy.plan.revisions import Revisions
from baton.deploy.report import ClusterReport
from baton.engine.kernels.backend import Gpu
from baton.engine.loading.loader import device_bytes
from baton.engine.loading.own_family import use_family
from baton.proto.errors import ConfigError

from ..engine.granite_folders import granite_folder

KEY = "ab" * 32


def plan_for(**kwargs):
    settings = ServeSettings(**{"model": "/models/m", "gateways": 0, **kwargs})
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


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"metric": "own:Metric"}, "metric needs metrics_port"),
        (
            {"mode": "colocated", "prefill_order": "own:Order"},
            "prefill_order needs prefill workers",
        ),
        ({"mode": "colocated", "kv_transport": "own:Way"}, "kv_transport needs prefill workers"),
    ],
)
def test_a_class_that_would_never_be_called_is_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        check(ServeSettings(**settings))


def test_addresses_are_distinct_and_workers_know_the_router():
    plan = plan_for(prefill=2, decode=2)
    router, *workers = (msgspec.to_builtins(spec.config) for spec in plan.processes)
    assert router["client_address"] == "ipc:///run/x.sock"
    assert {w["routers"]["router"] for w in workers} == {router["worker_address"]}
    bound = [w["endpoint"] for w in workers] + [w.get("data_endpoint") for w in workers[2:]]
    assert len({*bound, router["worker_address"]}) == 7


def test_every_socket_over_tcp_has_a_port_of_its_own():
    settings = ServeSettings(prefill=2, decode=3, gateways=0, transport="tcp")
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
    assert msgspec.structs.replace(prefill.runner, vision=False) == decode.runner
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


@pytest.mark.parametrize(
    ("settings", "prefill", "decode"),
    [
        ({}, (0, 2, 0), (0, 2, 0)),
        ({"prefill_max": 3, "decode": 2}, (0, 5, 0), (0, 5, 0)),
        ({"threads": 3, "decode": 2}, (3, 0, 9), (3, 0, 9)),
        ({"prefill_threads": 4, "prefill": 2}, (4, 1, 8), (0, 1, 8)),
        ({"threads": 4, "decode_threads": 1}, (4, 0, 5), (1, 0, 5)),
        ({"device": "cuda", "threads": 4}, (1, 0, 8), (1, 0, 8)),
    ],
)
def test_threads_per_pool_and_those_who_share_the_rest(settings, prefill, decode):
    _, *specs = plan_for(**settings).processes
    workers = [spec.config.runner for spec in specs]
    found = {(r.vision, (r.threads, r.thread_sharers, r.threads_taken)) for r in workers}
    assert found == {(True, prefill), (False, decode)}


@pytest.mark.parametrize("name", ["threads", "prefill_threads", "decode_threads"])
def test_impossible_numbers_of_threads_are_refused(name):
    for value in (-1, 257):
        with pytest.raises(ConfigError, match=f"^{name} must"):
            check(ServeSettings(**{name: value}))


def test_the_banner_shows_a_model_family_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = granite_folder(tmp_path / "granite")
    name = "granite_family:Granite"
    examples = Path(__file__).parents[2] / "examples" / "extend"
    try:
        plan = plan_for(model=str(folder), model_family=name, extensions=str(examples))
        facts = banner.facts(plan, hint=False)
    finally:
        use_family("", "")
    line = "  family     granite_family:Granite (config.json: GraniteForCausalLM)"
    assert line in banner.startup(facts, ClusterReport())
    assert banner.facts(plan_for(), hint=False).family == ""


def test_the_default_memory_is_for_those_the_settings_say_nothing_of():
    settings = ServeSettings(model="/models/m", gateways=0, prefill_kv_memory="3MiB")
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
    few = plan_for(**settings).processes[1].config.runner
    many = plan_for(**settings, decode_max=8).processes[1].config.runner
    assert (few.device_sharers, many.device_sharers) == (2, 9)


def test_a_cluster_takes_its_share_of_a_gpu():
    """Two clusters on one GPU divide it by this setting."""
    settings = {"device": "cuda", "prefill": 1, "decode": 1}
    whole = plan_for(**settings).processes[1].config.runner
    half = plan_for(**settings, gpu_memory_utilization=0.45).processes[1].config.runner
    backend = SimpleNamespace(memory_bytes=lambda: 1000)
    assert [device_bytes(runner, backend) for runner in (whole, half)] == [450, 225]
    for share in (0.0, 1.01, math.nan):
        with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0"):
            check(ServeSettings(gpu_memory_utilization=share))


def runners_on(gpus, **kwargs):
    """The model settings of each worker, by name."""
    settings = ServeSettings(model="/models/m", gateways=0, device="cuda", **kwargs)
    book = ipc_addresses({"router": "ipc:///run/x.sock"}, "/run/folder")
    book.gpus = GpuBook(gpus)
    plan = resolve_plan(settings, book, KEY)
    return {spec.name: spec.config.runner for spec in plan.processes if spec.role != "router"}


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode", "placed"),
    [
        ((0,), 1, 1, [0, 0]),
        ((0, 1), 1, 1, [0, 1]),
        ((0, 1), 2, 3, [0, 1, 0, 1, 0]),
        ((0, 2, 3), 1, 3, [0, 2, 3, 0]),
        (tuple(range(8)), 2, 6, list(range(8))),
    ],
)
def test_each_worker_has_a_gpu_as_far_as_there_are_enough(gpus, prefill, decode, placed):
    runners = list(runners_on(gpus, prefill=prefill, decode=decode).values())
    assert [runner.ordinal for runner in runners] == placed
    together = max(placed.count(gpu) for gpu in gpus)
    assert {runner.device_sharers for runner in runners} == {together}


def test_workers_on_the_cpu_take_no_gpu():
    plan = plan_for(prefill=2)
    assert "prefill-1" not in plan.book.gpus
    assert {spec.config.runner.ordinal for spec in plan.processes[1:]} == {0}


def test_a_worker_keeps_its_gpu_until_it_is_released():
    book = GpuBook((4, 7))
    assert [book.take(name) for name in ("a", "b", "c")] == [4, 7, 4]
    assert [book.take(name) for name in ("c", "b", "a")] == [4, 7, 4]
    book.release("a")
    assert book.take("d") == 4
    book.release("b")
    assert [book.take("e"), book.take("f")] == [7, 7]


def test_no_gpu_has_more_workers_than_its_memory_is_shared_by():
    rng = np.random.default_rng(5)
    for gpus, workers in ((2, 5), (3, 4), (4, 4), (8, 20)):
        book, held = GpuBook(range(gpus)), {}
        for step in range(300):
            if len(held) == workers or (held and rng.random() < 0.4):
                name = sorted(held)[rng.integers(len(held))]
                book.release(name)
                del held[name]
            else:
                held[f"w{step:03}"] = book.take(f"w{step:03}")
            counts = [list(held.values()).count(gpu) for gpu in range(gpus)]
            assert max(counts) <= book.most(workers)


def test_a_quarter_of_the_gpus_prefills():
    assert [split_gpus(n) for n in (1, 2, 3, 4, 8, 16)] == [
        (1, 1), (1, 1), (1, 2), (1, 3), (2, 6), (4, 12),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "given", "counts"),
    [
        ({"device": "cuda"}, (), (2, 6)),
        ({"device": "cuda", "device_ids": "1,3,5"}, (), (1, 2)),
        ({"device": "cuda", "decode": 2}, ("decode",), (1, 2)),
        ({"device": "cuda", "prefill": 1}, ("prefill",), (1, 1)),
        ({"device": "cuda", "decode_max": 4, "prefill_min": 3}, (), (3, 4)),
        ({}, (), (1, 1)),
    ],
)
def test_there_is_a_worker_per_gpu_unless_a_number_is_given(monkeypatch, settings, given, counts):
    gpus = tuple(Gpu(n, f"GPU-{n}", "a card") for n in range(8))
    monkeypatch.setattr(prepare, "visible_gpus_of_children", lambda: gpus)
    found = prepare.with_worker_per_gpu(ServeSettings(**settings), given)
    assert (found.prefill, found.decode) == counts


def test_a_gpu_that_does_not_exist_is_refused_before_any_process_starts(monkeypatch):
    gpus = tuple(Gpu(n, f"GPU-{n}", "a card") for n in range(2))
    monkeypatch.setattr(prepare, "visible_gpus_of_children", lambda: gpus)
    settings = ServeSettings(device="cuda", device_ids="0,3", address="ipc:///tmp/x.sock")
    words = "^device 3 does not exist, this machine has 2$"
    with pytest.raises(ConfigError, match=words):
        prepare.check_start(settings)
    with pytest.raises(ConfigError, match=words):
        prepare.make_plan(settings, None)


@pytest.mark.parametrize("text", ["1,1", "x", "-1", "0;1", "1.5", ",", "0,,1", " "])
def test_numbers_of_gpus_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError, match=r"^device_ids is .* not different numbers of GPUs"):
        check(ServeSettings(device="cuda", device_ids=text))
    with pytest.raises(ConfigError, match=r"^device_ids needs device cuda"):
        check(ServeSettings(device_ids=text))


@pytest.mark.parametrize("kinds", [("bfloat16", ""), ("auto", "bfloat16"), ("int8", "int8")])
def test_auto_is_the_same_type_of_keys_and_values_on_gpus_as_bfloat16(kinds):
    prefill, decode = kinds
    check(ServeSettings(device="cuda", prefill_kv_type=prefill, decode_kv_type=decode))


def test_all_gateways_use_the_same_ports_for_metrics_also_in_a_rollout():
    settings = ServeSettings(model="/models/m", gateways=2, routers=2, metrics_port=9464)
    plan = plan_for(gateways=2, routers=2, metrics_port=9464)
    ports = [
        process_of(name, settings, plan.book, "ab", 0).config.metrics_ports
        for name in ("gateway-0", "gateway-1", "gateway-2")
    ]
    assert ports == [(9466, 9467), (9467, 9466), (9466, 9467)]
    routers = [spec.config.metrics_port for spec in plan.processes if spec.role == "router"]
    assert routers == [9464, 9465]
    assert plan_for(gateways=1).processes[-1].config.metrics_ports == ()


def test_a_gateway_that_is_added_has_a_further_port_for_its_metrics():
    revisions = Revisions(plan_for(gateways=2, routers=2, metrics_port=9464))
    spec = revisions.spec("gateway-2", "gateway", 0, gateways=3)
    assert spec.process.config.metrics_ports == (9468, 9466, 9467)
    settings = ServeSettings(gateways=2, routers=2, metrics_port=65530)
    assert Bounds.of(settings).most("gateway") == 4


def test_gateways_share_a_port_and_know_every_router(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "from-the-environment")
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    given = {"api_key_file": str(file), "http_host": "0.0.0.0", "served_model_name": "a, b",
             "tool_call_parser": "hermes", "reasoning_parser": "off"}  # fmt: skip
    plan = plan_for(gateways=2, routers=2, http_port=9000, grace=7.0, **given)
    plan.book.http_port = 9001  # the reserved one
    first, second = (spec.config for spec in plan.processes if spec.role == "gateway")
    assert (first.name, second.name) == ("gateway-0", "gateway-1")
    assert first.routers == ("ipc:///run/x.sock", "ipc:///run/x.sock.1")
    assert (first.share_port, first.model_names, first.grace_s) == (True, ("a", "b"), 7.0)
    assert (first.tool_call_parser, first.reasoning_parser) == ("hermes", "off")
    assert first.api_keys == second.api_keys
    assert len(first.api_keys) == 3
    assert plan.http_url == "http://0.0.0.0:9001/v1"
    assert "one" not in str(describe_plan(plan)["processes"])
    assert "http://0.0.0.0:9001/v1 (model a, 2 gateways, with an API key)" in str(
        banner.facts(plan, hint=True)
    )
    assert plan_for().http_url == ""
    hub = "/c/models--org--name/snapshots/0123456789abcdef0123456789abcdef01234567"
    served = msgspec.structs.replace(plan_for(gateways=1), model=hub)
    assert "(model org/name, " in banner.facts(served, hint=False).http


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (",,", "has an empty name: ',,'"), ("a,,b", "has an empty name"),
        (" ", "has an empty name"),
        ("a,", "has an empty name"), ("a, b,a", "has 'a' twice"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", LISTS)
def test_empty_and_repeated_names_are_refused(name, text, problem):
    with pytest.raises(ConfigError, match=f"^{name} {problem}"):
        check(ServeSettings(**{name: text}))


def test_gateways_for_other_hosts_need_a_key(monkeypatch):
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="reachable from other machines: give an API key"):
        plan_for(gateways=1, http_host="0.0.0.0")
