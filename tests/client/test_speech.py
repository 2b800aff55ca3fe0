"""The prompt of a speech model, from what a router describes."""

from __future__ import annotations

import pytest

from baton.client.description import Description
from baton.client.model import ServedModel
from baton.client.speech import speech_format
from baton.proto.errors import CheckpointError, TaskMismatch
from baton.proto.layout import AudioCard, KVLayout, ModelCard

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=8)


def served(files, *kinds):
    card = ModelCard(
        name="speaker",
        architecture="LlamaForCausalLM",
        fingerprint="",
        numerics="",
        vocab_size=256,
        max_length=64,
        eos_token_ids=[2],
        layout=LAYOUT,
        kinds=["TextContext", *kinds],
        audio=AudioCard(sample_rate=8000, frame_samples=96, frame_tokens=7) if kinds else None,
    )
    return ServedModel(Description(card, "/models/speaker", files))


def test_the_format_is_the_routers():
    model = served({"speech.json": b'{"first_token": 16, "voices": ["ada"]}'}, "TTSContext")
    assert speech_format(model).voices == ("ada",)


def test_a_text_model_does_not_speak():
    with pytest.raises(TaskMismatch, match="'speaker' is no speech model"):
        speech_format(served({"speech.json": b"{}"}))
    with pytest.raises(TaskMismatch, match=r"the router has no speech\.json of 'speaker'"):
        speech_format(served({}, "TTSContext"))


def test_a_format_that_is_not_valid_names_the_model():
    with pytest.raises(CheckpointError, match=r"/models/speaker: speech\.json"):
        speech_format(served({"speech.json": b"{}"}, "TTSContext"))
