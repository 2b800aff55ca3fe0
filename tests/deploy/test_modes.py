"""Processes and checks of the modes of ``baton serve``."""

from __future__ import annotations

import msgspec
import pytest

from baton.deploy.config import ServeSettings, check, demo_flux_folder
from baton.deploy.local import banner
from baton.deploy.plan.plan import all_worker_names
from baton.deploy.plan.prepare import check_model, with_task, with_workers_on
from baton.proto.errors import ConfigError

from .test_task import plan_of

QWEN = "checkpoints/qwen3"


def configs(plan, role: str) -> list[dict]:
    return [msgspec.to_builtins(spec.config) for spec in plan.processes if spec.role == role]


@pytest.mark.parametrize(
    ("settings", "workers"),
    [({}, 2), ({"workers": 3}, 3), ({"prefill": 2, "decode": 3}, 5), ({"workers": 1}, 1)],
)
def test_colocated_workers_are_decode_workers_that_compute_all_prompts(settings, workers):
    plan = plan_of(QWEN, mode="colocated", **settings)
    assert plan.worker_names == tuple(f"decode-{number}" for number in range(workers))
    for config in configs(plan, "decode"):
        assert config["token_budget"] == ServeSettings().max_num_batched_tokens
        assert config["runner"]["vision"]
    assert "prefill worker" not in banner.facts(plan, hint=True).kv_memory
    assert configs(plan, "router")[0]["mode"] == "colocated"


def test_colocated_embeddings_have_prefill_workers():
    plan = plan_of("embedders/bert", mode="colocated", workers=3)
    assert plan.worker_names == ("prefill-0", "prefill-1", "prefill-2")


def test_the_settings_of_a_running_cluster_stay_as_they_are():
    settings = with_task(ServeSettings(mode="colocated", workers=3))
    assert with_task(settings) == settings  # as under Ray, where both sides adapt them
    assert len(all_worker_names(settings)) == 3


def test_every_gpu_gets_a_colocated_worker():
    settings = with_workers_on(ServeSettings(mode="colocated", device="cuda"), 4)
    assert with_task(settings).decode == 4
    given = with_workers_on(ServeSettings(mode="colocated", device="cuda", workers=2), 4)
    assert with_task(given).decode == 2


def test_an_adaptive_cluster_has_both_pools_and_its_router_the_limits():
    plan = plan_of(QWEN, mode="adaptive", slo_ttft=3.0, slo_itl=0.2, step_time=0.03)
    assert plan.worker_names == ("prefill-0", "decode-0")
    (router,) = configs(plan, "router")
    assert (router["mode"], router["slo_ttft_s"], router["step_time_s"]) == ("adaptive", 3.0, 0.03)
    assert configs(plan, "decode")[0]["runner"]["vision"]
    assert configs(plan, "prefill")[0]["slo_ttft"] == 3.0  # late prompts are begun last
    assert configs(plan, "decode")[0]["slo_ttft"] == 3.0
    arrival = plan_of(QWEN, mode="adaptive", slo_ttft=3.0, prefill_order="fcfs")
    assert configs(arrival, "decode")[0]["slo_ttft"] == 0.0


def test_an_adaptive_cluster_may_begin_without_prefill_workers():
    plan = plan_of(QWEN, mode="adaptive", prefill=0, decode=2)
    assert plan.worker_names == ("decode-0", "decode-1")
    for settings in ({"mode": "adaptive", "task": "embed"}, {}):
        with pytest.raises(ConfigError, match="prefill must be at least 1"):
            check(ServeSettings(prefill=0, **settings))


@pytest.mark.parametrize(
    ("mode", "step_time", "target"),
    [
        ("adaptive", 0.05, 0.05),
        ("adaptive", 0.3, 0.16),  # streams must keep 0.2 s beside such a step
        ("adaptive", 0.0, 0.16),
        ("colocated", 0.3, 0.16),
        ("disaggregated", 0.3, 0.3),
    ],
)
def test_steps_with_prompts_keep_the_itl_limit_where_decode_workers_compute_prompts(
    mode, step_time, target
):
    plan = plan_of(QWEN, mode=mode, slo_itl=0.2, step_time=step_time)
    steps = [configs(plan, role)[0] for role in ("router", "decode")]
    assert steps[0]["step_time_s"] == pytest.approx(target)
    assert steps[1]["step_seconds"] == pytest.approx(target)


@pytest.mark.parametrize(("mode", "most"), [("disaggregated", 20), ("adaptive", 100)])
def test_a_decode_worker_that_computes_whole_prompts_has_the_budget_for_it(mode, most):
    plan = plan_of(QWEN, mode=mode, max_num_batched_tokens=100, decode_max_num_batched_tokens=20)
    assert configs(plan, "decode")[0]["token_budget"] == most


def test_disaggregation_can_be_enforced():
    (router,) = configs(plan_of(QWEN, enforce_disaggregation="on"), "router")
    assert (router["mode"], router["enforce_disaggregation"]) == ("disaggregated", True)
    assert not configs(plan_of(QWEN), "decode")[0]["runner"]["vision"]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"mode": "mixed"}, "mode must be one of disaggregated, colocated, adaptive"),
        ({"workers": 2}, "workers needs mode colocated"),
        ({"mode": "adaptive", "workers": 2}, "workers needs mode colocated"),
        ({"mode": "colocated", "workers": 5000}, "workers must be at most 1024"),
        (
            {"mode": "colocated", "enforce_disaggregation": "on"},
            "enforce_disaggregation needs mode disaggregated",
        ),
        (
            {"mode": "adaptive", "enforce_disaggregation": "on"},
            "enforce_disaggregation needs mode disaggregated",
        ),
        (
            {"mode": "colocated", "autoscale": "on", "prefill_max": 2, "decode_max": 2},
            "autoscale cannot be on in mode colocated",
        ),
    ],
)
def test_settings_that_contradict_the_mode_are_refused(settings, rule):
    with pytest.raises(ConfigError, match=rule):
        check(ServeSettings(**settings))


def test_a_picture_model_needs_both_pools():
    with pytest.raises(ConfigError, match="cannot serve a picture model"):
        check_model(ServeSettings(model=str(demo_flux_folder()), mode="colocated"))
