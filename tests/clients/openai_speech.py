"""openai-python speaks with its defaults: ``python openai_speech.py URL MODEL``."""

import sys

import openai
from openai import OpenAI

URL, MODEL = sys.argv[1:]
TEXT = "Once upon a time there was a fox."


def main() -> None:
    client = OpenAI(base_url=URL, api_key="k", max_retries=0)
    fixed = {"extra_body": {"ignore_eos": True, "max_tokens": 300, "seed": 1}}
    whole = client.audio.speech.create(model=MODEL, voice="alloy", input=TEXT, **fixed)
    assert whole.content.startswith(b"RIFF")
    assert "voice is ignored" in whole.response.headers["x-warnings"]
    asked = {"model": MODEL, "voice": "alloy", "input": TEXT, "response_format": "pcm"}
    with client.audio.speech.with_streaming_response.create(**asked, **fixed) as stream:
        parts = list(stream.iter_bytes())
    samples = b"".join(parts)
    assert samples == client.audio.speech.create(**asked, **fixed).content
    assert samples
    try:
        client.audio.speech.create(**asked, speed=2)
    except openai.BadRequestError as error:
        assert error.param == "speed"
    else:
        raise AssertionError("speed=2 was accepted")
    print(f"openai-python {openai.__version__}: ok")


main()
