"""Processes by the model's task: an embedding model has no decode workers."""

import shutil
from pathlib import Path

import msgspec
import pytest

from baton.deploy.config import ServeSettings, check, demo_model_folder
from baton.deploy.local import banner
from baton.deploy.local.cluster import check_model, make_plan
from baton.deploy.plan import prepare
from baton.deploy.plan.folders import folder_memory
from baton.deploy.plan.memory import LEAST_BYTES, PROCESS_BYTES, picture_share
from baton.engine.loading.checkpoint import load_checkpoint
from baton.proto.errors import ConfigError

DATA = Path(__file__).resolve().parents[1] / "data"


def plan_of(model, **settings):
    return make_plan(ServeSettings(model=str(DATA / model), **settings), folder=None)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_an_embedding_model_has_no_decode_workers(transport):
    plan = plan_of("embedders/bert", prefill=2, decode=3, transport=transport)
    assert plan.worker_names == ("prefill-0", "prefill-1")
    workers = [spec for spec in plan.processes if spec.name in plan.worker_names]
    assert {spec.config.runner.task for spec in workers} == {"embed"}
    facts = banner.facts(plan, hint=True)
    assert "baton embed --address" in facts.hints[0]
    assert "/v1/embeddings -d " in facts.hints[1]
    assert facts.kv_memory == ""


def test_a_text_model_has_both_pools_unless_it_is_told_to_embed():
    plan = plan_of("checkpoints/qwen3")
    assert plan.worker_names == ("prefill-0", "decode-0")
    assert banner.facts(plan, hint=True).hints[0] == f"baton status --address {plan.address}"
    assert plan_of("checkpoints/qwen3", task="embed").worker_names == ("prefill-0",)


@pytest.mark.parametrize(
    ("without", "verb", "words", "path"),
    [
        ((), "generate", " --chat 'Who are you?'", "chat/completions"),
        (
            ("chat_template.jinja", "tokenizer_config.json"),
            "generate",
            " 'Once upon a time'",
            "completions",
        ),
        (("tokenizer.json",), "status", "", "models"),
    ],
)
def test_the_banner_suggests_what_the_model_can_answer(tmp_path, without, verb, words, path):
    shutil.copytree(demo_model_folder(), tmp_path / "m")
    for name in without:
        (tmp_path / "m" / name).unlink()
    plan = plan_of(tmp_path / "m")
    native, over_http = banner.facts(plan, hint=True).hints
    assert native == f"baton {verb} --address {plan.address}{words}"
    assert over_http.split()[1] == f"http://127.0.0.1:8000/v1/{path}"
    assert banner.facts(plan, hint=False).hints == ()


def test_tasks_a_model_cannot_do_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="cannot generate"):
        check_model(ServeSettings(model=str(DATA / "embedders/bert"), task="generate"))
    with pytest.raises(ConfigError, match="task must be one of"):
        check(ServeSettings(task="sing"))


@pytest.mark.parametrize("model", ["embedders/bert", "checkpoints/qwen3"])
def test_a_context_longer_than_the_model_s_is_refused_before_anything_starts(model):
    folder = str(DATA / model)
    most = load_checkpoint(folder).config.rope.ceiling()
    check_model(ServeSettings(model=folder, max_model_len=most))
    with pytest.raises(ConfigError, match=f"max_model_len {most + 1} is more than the {most} "):
        check_model(ServeSettings(model=folder, max_model_len=most + 1))
    shown = {given: prepare.served_context(ServeSettings(model=folder, max_model_len=given))
             for given in (0, most - 1, most + 1)}  # fmt: skip
    usual = load_checkpoint(folder).config.rope.default_length()
    assert shown == {0: usual, most - 1: most - 1, most + 1: 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_order", "edf"),
        ("prefill_order", "own:Order"),
        ("decider", "own:Decider"),
        ("kv_transport", "own:Transport"),
    ],
)
def test_settings_without_effect_on_embeddings_are_refused(name, value):
    bert, flux = (ServeSettings(model=str(DATA / each)) for each in ("embedders/bert", FLUX))
    check_model(msgspec.structs.replace(bert, prefill_order="fcfs"))
    with pytest.raises(ConfigError, match=f"{name} has no effect with an embedding model"):
        check_model(msgspec.structs.replace(bert, **{name: value}))
    check_model(msgspec.structs.replace(flux, **{name: value}))  # prompts of pictures have an order


FLUX = "pictures/flux"


def test_a_picture_model_has_both_pools_and_its_own_memory(monkeypatch):
    monkeypatch.setattr(prepare, "free_memory", lambda: 4 << 30)
    plan = plan_of(FLUX, max_num_seqs=4, prefill_max_num_seqs=2)
    assert plan.worker_names == ("prefill-0", "decode-0")
    workers = [spec for spec in plan.processes if spec.name in plan.worker_names]
    assert {spec.config.runner.task for spec in workers} == {"draw"}
    model = folder_memory(str(DATA / FLUX), 0, 16)
    row = 2 * 528 + 1 + 251  # positions of two prompts of 512 tokens, and of the steps
    assert model.context == row * 32 * 4
    assert 0 < model.worker("prefill") == model.weights < model.worker("decode") == model.drawing
    assert plan.kv_default == max(LEAST_BYTES, 2 * 4 * model.context)
    assert prepare.served_context(plan.settings) == row
    pictures = [spec.config.runner.picture_bytes for spec in workers]
    weights = model.weights + model.drawing + 2 * (plan.kv_default + PROCESS_BYTES)
    assert pictures == [0, int(0.8 * (4 << 30)) - weights]
    monkeypatch.setattr(prepare, "total_memory", lambda: pictures[1])
    assert "need" in prepare.memory_refusal(plan.settings, plan.kv_default, {})
    assert picture_share(1 << 20, 0, 2, model) == model.picture  # enough for a usual picture


def test_picture_models_refuse_other_tasks():
    check_model(ServeSettings(model=str(DATA / FLUX)))
    with pytest.raises(ConfigError, match="is a picture model; its task is draw"):
        check_model(ServeSettings(model=str(DATA / FLUX), task="generate"))
    on_gpu = ServeSettings(model=str(DATA / FLUX), device="cuda", task="draw")
    check_model(on_gpu)
    assert prepare.with_picture_memory(on_gpu, 1 << 20) == on_gpu  # the worker knows its GPU
    with pytest.raises(ConfigError, match="cannot draw"):
        check_model(ServeSettings(model=str(DATA / "checkpoints/qwen3"), task="draw"))
    assert prepare.memory_refusal(ServeSettings(model=str(DATA / FLUX)), 1 << 20, {}) == ""
