"""Embeddings of the committed checkpoints equal those of transformers, in any batch."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.embedding_config import EmbeddingSettings, load_embedding_settings
from baton.engine.loading.loader import load_embedder, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.models.contexts import CONTEXTS, Contexts, read_context
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.errors import CheckpointError, ConfigError, InputError
from baton.proto.ids import RequestID
from baton.proto.wire.context_maps import request_map
from baton.proto.wire.wire_context import WireContext, WireTokens

DATA = Path(__file__).resolve().parents[2] / "data"
EMBEDDERS = ("bert", "qwen3")


def load(name="bert", backend="numpy", **settings):
    folder = DATA / "embedders" / name if isinstance(name, str) else name
    return load_embedder(RunnerConfig(model=str(folder), backend=backend, **settings))


def context(tokens, name="x"):
    buffer = TokenBuffer(np.asarray(tokens, np.int64))
    return TextContext(max_length=10_000, tokens=buffer, request_id=RequestID(name))


def encode(pipeline, texts):
    batch = {RequestID(str(i)): context(text, str(i)) for i, text in enumerate(texts)}
    found = pipeline.encode(batch)
    assert list(found) == list(batch)
    return np.stack([output.embeddings for output in found.values()])


def reference(name):
    with np.load(DATA / "embedders" / name / "reference.npz") as file:
        data = dict(file)
    return [data[f"tokens_{i}"] for i in range(len(data) - 1)], data["vectors"]


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_equal_transformers(name, backend):
    if backend == "cpu":
        pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    texts, expected = reference(name)
    found = encode(load(name, backend).pipeline, texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_a_text_has_the_same_bits_in_any_batch(name):
    pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")
    texts, _ = reference(name)
    alone = [encode(load(name, "cpu").pipeline, [text])[0] for text in texts]
    pipeline = load(name, "cpu", block_size=8).pipeline
    for order in (range(len(texts)), reversed(range(len(texts)))):
        order = list(order)
        for index, vector in zip(order, encode(pipeline, [texts[i] for i in order]), strict=True):
            assert np.array_equal(vector, alone[index])


def test_the_card_says_what_is_served():
    card = load().card
    assert (card.task, card.embedding_size, card.max_length) == ("embed", 32, 100)
    assert card.numerics.endswith("/embed-mean-unit")
    assert load("qwen3").card.numerics.endswith("/embed-last-unit")
    assert load(max_length=128).card.max_length == 128


def test_progress_counts_layers():
    pipeline = load().pipeline
    encode(pipeline, [[5, 6, 7]])
    assert pipeline.layers_done == 2


def test_what_cannot_be_embedded_is_left_out_and_the_others_are_not():
    pipeline = load().pipeline
    texts = {"good": [5, 6], "id": [5, 96], "negative": [-1], "long": [5] * 101}
    batch = {RequestID(n): context(t, n) for n, t in texts.items()}
    image = np.zeros((3, 2, 2), np.float32)
    seen = TextAndVisionContext(max_length=9, tokens=[5, 6], pixel_values=(image,))
    found = pipeline.encode(batch | {RequestID("image"): seen})
    assert [request_id.value for request_id in found] == ["good"]
    assert pipeline.encode({}) == {}


def test_values_that_are_no_numbers_are_left_out():
    pipeline = load().pipeline
    pipeline.model._words = pipeline.model._words.copy()
    pipeline.model._words[7] = np.nan
    found = pipeline.encode({RequestID(str(t)): context([5, t], str(t)) for t in (6, 7, 8)})
    assert [request_id.value for request_id in found] == ["6", "8"]


# ------------------------------------------------------------------------------ which task


def copy(tmp_path, name, folder="embedders"):
    target = tmp_path / name
    shutil.copytree(DATA / folder / name, target)
    return target


def test_a_text_model_embeds_when_it_is_told_to_and_not_by_itself(tmp_path):
    folder = DATA / "checkpoints" / "qwen3"
    with pytest.raises(ConfigError, match="task=embed"):
        load(folder)
    runner = load(folder, task="embed")
    assert runner.card.numerics.endswith("/embed-last-unit")
    assert np.linalg.norm(encode(runner.pipeline, [[5, 6, 7]])) == pytest.approx(1, abs=1e-6)


def test_an_embedder_generates_no_text():
    for name in EMBEDDERS:
        with pytest.raises(ConfigError, match="embedding model"):
            load_runner(RunnerConfig(model=str(DATA / "embedders" / name), num_blocks=4))


def test_an_encoder_can_do_nothing_else():
    with pytest.raises(ConfigError, match="cannot generate"):
        load(task="generate")
    with pytest.raises(ConfigError, match="task must be one of"):
        load(task="sing")


def test_a_bert_that_does_not_say_is_pooled_over_its_mean(tmp_path):
    folder = copy(tmp_path, "bert")
    (folder / "modules.json").unlink()
    assert load(folder).card.numerics.endswith("/embed-mean")


def set_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_is_as_its_folder_says(tmp_path, modes, pooling):
    folder = copy(tmp_path, "bert")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert load_embedding_settings(folder) == EmbeddingSettings(pooling, True, 100)


MODALITIES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def saved_again(tmp_path):
    """Qwen3-Embedding as sentence-transformers 6 saves it."""
    folder = copy(tmp_path, "qwen3")
    set_json(folder / "config.json", architectures=["Qwen3Model"])
    (folder / "sentence_bert_config.json").write_text(
        json.dumps(
            {
                "transformer_task": "feature-extraction",
                "modality_config": MODALITIES,
                "module_output_name": "token_embeddings",
            }
        )
    )
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    return folder


def test_a_body_saved_by_sentence_transformers_gives_the_same_vectors(tmp_path):
    runner = load(saved_again(tmp_path))
    texts, expected = reference("qwen3")
    np.testing.assert_allclose(encode(runner.pipeline, texts), expected, atol=1e-5, rtol=1e-5)
    assert (runner.card.task, runner.card.max_length) == ("embed", 100)
    with pytest.raises(ConfigError, match="embedding model"):
        load_runner(RunnerConfig(model=str(tmp_path / "qwen3"), num_blocks=4))


@pytest.mark.parametrize(
    "changes",
    [
        {"modality_config": {"text": {**MODALITIES["text"], "method_output_name": "logits"}}},
        {"modality_config": {"text": {**MODALITIES["text"], "method": "get_text_features"}}},
        {"modality_config": {**MODALITIES, "message": MODALITIES["text"]}},
        {"module_output_name": "sentence_embedding"},
        {"transformer_task": "fill-mask"},
    ],
)
def test_another_output_than_the_last_states_of_a_text_is_refused(tmp_path, changes):
    folder = saved_again(tmp_path)
    set_json(folder / "sentence_bert_config.json", **changes)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        load(folder)


@pytest.mark.parametrize(
    "modes",
    [
        {},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "max"},
    ],
)
def test_pooling_that_cannot_be_done_is_refused(tmp_path, modes):
    folder = copy(tmp_path, "bert")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    with pytest.raises(CheckpointError, match="exactly one of"):
        load(folder)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ('[{"type": "m.Transformer"}, {"type": "m.Pooling"}, {"type": "m.Dense"}]', "stage Dense"),
        ('[{"type": "m.Transformer"}]', "without pooling"),
        ("{}", "modules.json"),
        ("[", "modules.json"),
    ],
)
def test_stages_that_cannot_be_run_are_refused(tmp_path, modules, message):
    folder = copy(tmp_path, "bert")
    (folder / "modules.json").write_text(modules)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "absolute positions"),
        ({"is_decoder": True}, "encoders"),
        ({"num_attention_heads": 5}, "heads"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "unsupported quant_method"),
        ({"intermediate_size": 61}, "shape"),
        ({"num_hidden_layers": 1}, "is not used"),
    ],
)
def test_berts_that_would_give_wrong_vectors_are_refused(tmp_path, changes, message):
    folder = copy(tmp_path, "bert")
    set_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


# ------------------------------------------------------------------------------ contexts


def test_an_architecture_has_a_context_and_checks(monkeypatch):
    class Own(TextContext):
        pass

    def refuse(context):
        raise InputError("no thanks")

    wire = WireContext(tokens=WireTokens(np.array([1, 2], np.int32)), max_length=9)
    name = RequestID("r")
    monkeypatch.setitem(CONTEXTS, "Own", Contexts(context=Own))
    assert type(read_context("Own", wire, name)) is Own
    assert type(read_context("LlamaForCausalLM", wire, name)) is TextContext
    monkeypatch.setitem(CONTEXTS, "Own", Contexts(validators=(refuse,)))
    with pytest.raises(InputError, match="no thanks"):
        read_context("Own", wire, name)


@pytest.mark.parametrize("emitted", [(), (5,)])
def test_a_worker_refuses_a_request_of_another_kind(emitted):
    seen = TextAndVisionContext(
        max_length=9, tokens=[1, 2], pixel_values=(np.zeros((3, 2, 2), np.float32),)
    )
    with pytest.raises(InputError, match="only TextContext"):
        read_context("LlamaForCausalLM", request_map(seen), RequestID("r"), emitted)
