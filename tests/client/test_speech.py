"""The prompt of a speech model, from what a router describes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.cli.speak import audio_tokens, encoded
from baton.client.description import Description
from baton.client.model import ServedModel
from baton.client.speech import AudioPrompt, speech_context, speech_format
from baton.engine.audio.pcm import wav_header
from baton.proto.errors import CheckpointError, ConfigError, InputError, TaskMismatch
from baton.proto.layout import AudioCard, KVLayout, ModelCard
from baton.proto.sampling import SamplingParams

CODEC = Path(__file__).parents[1] / "data" / "codecs" / "snac"
AUDIO = AudioCard(sample_rate=8000, frame_samples=96, frame_tokens=7, codebook_size=10)
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
        audio=AUDIO if kinds else None,
    )
    return ServedModel(Description(card, "/models/speaker", files))


class Letters:
    """A tokenizer with a token per letter, after a token that begins every text."""

    def encode(self, text, *, add_special_tokens, max_tokens):
        return np.array([1, *text.encode()], np.int32)


def speaker(**fields):
    """A model with 7 audio tokens per frame from 300 on, and codebooks of 10 entries."""
    speech = {"first_token": 300, "voices": ["ada"], "start_tokens": [259], "end_tokens": [9, 8]}
    model = served({"speech.json": json.dumps(speech | fields).encode()}, "TTSContext")
    model._tokenizer = Letters()
    return model


VOICED = {"audio_prompt_end_tokens": [258, 262]}


@pytest.mark.parametrize("text", ["ok", ""])
@pytest.mark.parametrize("kind", [list, np.int16, np.uint64])
def test_a_voice_by_audio_tokens_is_an_earlier_turn_of_the_prompt(text, kind):
    entries = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    ids = [
        303, 311, 324, 331, 345, 359, 362,  # slot i has the ids from 300 + 10 i on
        306, 315, 323, 335, 348, 359, 367,
    ]  # fmt: skip
    given = entries if kind is list else np.array(entries, kind)
    context = speech_context(speaker(**VOICED), "Hi", AudioPrompt(given, text), None)
    said = [1, ord("o"), ord("k")] if text else []
    earlier = [259, *said, 9, 8, *ids, 258, 262]
    # No name of a voice comes before the text.
    assert context.tokens.all.tolist() == [*earlier, 259, 1, ord("H"), ord("i"), 9, 8]


def test_a_model_without_voices_by_audio_says_so():
    prompt = AudioPrompt([0] * 7)
    with pytest.raises(InputError, match="has no audio_prompt_end_tokens"):
        speech_context(speaker(), "Hi", prompt, None)
    with pytest.raises(TaskMismatch, match="is no speech model"):
        speech_context(served({}), "Hi", prompt, None)


class Endless(list):
    """Entries of more than a context; an array of them must never be made."""

    def __len__(self):
        return 65

    def __iter__(self):
        raise AssertionError("the entries are read")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "list of integers"), ([[1] * 7], "list of integers"), ([0.5] * 7, "list of integers"),
        ([1 << 70] * 7, "list of integers"), ([[1], [1, 2]], "list of integers"),
        (np.array(3), "list of integers"), (["1"] * 7, "list of integers"),
        ([0] * 8, "8 entries; a frame has 7"), ([0, 0, -1, 0, 0, 0, 0], r"\[2\] is -1; .* 0 to 9"),
        ([0] * 6 + [10], r"\[6\] is 10"), (Endless(), "65 entries, limit 64"),
    ],
)  # fmt: skip
def test_audio_tokens_that_cannot_be_a_voice_are_refused(given, error):
    with pytest.raises(InputError, match=error):
        speech_context(speaker(**VOICED), "Hi", AudioPrompt(given), None)
    with pytest.raises(InputError, match="text to speak is empty"):
        speech_context(speaker(**VOICED), " ", AudioPrompt([0] * 7), None)


def test_stop_strings_are_refused():
    with pytest.raises(InputError, match="stop has no effect on speech"):
        speech_context(speaker(), "Hi", None, SamplingParams(stop=["x"]))
    assert speech_context(speaker(), "Hi", None, SamplingParams(temperature=0.5)).tokens


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.json", b"{}", "no list of audio tokens"), ("a.npy", b"no", "no list of audio tokens"),
        ("a.mp3", b"ID3", "a voice is a .wav file"), ("a.json", None, "No such file"),
    ],
)  # fmt: skip
def test_a_file_without_audio_tokens_is_one_error(tmp_path, name, content, error):
    path: Path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        audio_tokens(path)


def test_a_wav_file_needs_the_codec_and_its_rate(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav_header(16000, 4) + bytes(4))
    with pytest.raises(ConfigError, match="has no /models/speaker"):
        encoded(path, speaker(**VOICED))
    shutil.copytree(CODEC, tmp_path / "snac")
    (tmp_path / "speech.json").write_text('{"first_token": 300}')
    model = speaker(**VOICED)
    model.description = dataclasses.replace(model.description, folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"1 channels, 16000 Hz; the codec takes .* 8000"):
        encoded(path, model)
    path.write_bytes(b"RIFF")
    with pytest.raises(ConfigError, match="no WAV file of 16-bit samples"):
        encoded(path, model)
    path.write_bytes(wav_header(8000, 200) + bytes(200))
    assert encoded(path, model).shape == (14,)  # 100 samples: two frames of 96


def test_a_huge_file_of_audio_tokens_is_not_read(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"larger than 16\.0 MiB"):
        audio_tokens(path)
    path.write_text("[1, 2]")
    assert audio_tokens(path) == [1, 2]


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
