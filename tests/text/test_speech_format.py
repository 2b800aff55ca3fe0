"""speech.json, and the prompts made from it."""

import json

import pytest

from baton.proto.errors import CheckpointError, InputError
from baton.text.speech_format import parse_speech_format


def parse(**fields):
    return parse_speech_format(json.dumps({"first_token": 16} | fields).encode(), "there")


def test_the_default_voice_is_the_first():
    speech = parse(voices=["ada", "bob"])
    assert speech.prompt_text("Hello.") == "ada: Hello."
    assert speech.prompt_text("Hello.", "bob") == "bob: Hello."


def test_the_text_is_not_a_template():
    speech = parse(voices=["ada"], prompt="<{voice}> {text} </{voice}>")
    assert speech.prompt_text("{voice} {text}") == "<ada> {voice} {text} </ada>"


@pytest.mark.parametrize(("text", "voice"), [("", None), (" \n", None), ("Hello.", "eve")])
def test_a_request_that_cannot_be_spoken_is_refused(text, voice):
    with pytest.raises(InputError):
        parse(voices=["ada"]).prompt_text(text, voice)


def test_a_model_without_voices_takes_none():
    assert parse(prompt="{text}").prompt_text("Hello.") == "Hello."
    with pytest.raises(InputError, match="no named voices, so leave it out"):
        parse().prompt_text("Hello.", "ada")


@pytest.mark.parametrize(
    "fields",
    [
        {"first_token": -1},
        {"first_token": "16"},
        {"prompt": "no place for the text"},
        {"prompt": "{text} twice {text}"},
        {"codec": "../elsewhere"},
        {"codec": ".."},
        {"codec": ""},
        {"voices": [""]},
        {"stop_tokens": [1 << 40]},
        {"unknown": 1},
    ],
)
def test_a_file_that_is_not_valid_is_refused(fields):
    with pytest.raises(CheckpointError, match=r"there: speech\.json"):
        parse(**fields)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_object_is_refused(content):
    with pytest.raises(CheckpointError, match=r"there: speech\.json"):
        parse_speech_format(content, "there")
