"""LiteLLM against a gateway: ``python litellm_client.py URL MODEL``."""

import sys
from importlib.metadata import version

import litellm

URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Who are you?"}]


def main() -> None:
    litellm.telemetry = False
    fixed = {
        "model": f"openai/{MODEL}", "api_base": URL, "api_key": "k", "messages": MESSAGES,
        "temperature": 0, "max_tokens": 24, "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(**fixed)
    text = whole.choices[0].message.content
    assert text
    events = list(litellm.completion(**fixed, stream=True, stream_options={"include_usage": True}))
    # The event with the usage has no choices; earlier versions of LiteLLM gave it one.
    parts = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(parts) == text
    assert [event.usage.total_tokens for event in events if getattr(event, "usage", None)] == [
        whole.usage.total_tokens
    ]
    hosted = litellm.completion(**{**fixed, "model": f"hosted_vllm/{MODEL}"})
    assert hosted.choices[0].message.content == text
    asked = {**fixed, "allowed_openai_params": ["reasoning_effort"]}  # it does not name the model
    for model in ("openai", "hosted_vllm"):
        effort = litellm.completion(
            **{**asked, "model": f"{model}/{MODEL}"}, reasoning_effort="low"
        )
        assert effort.choices[0].message.content == text
    old = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=URL, api_key="k", prompt="Once",
        max_tokens=4,
    )  # fmt: skip
    assert old.choices[0].text
    try:
        litellm.completion(**{**fixed, "model": "openai/other"})
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("another model was accepted")
    try:
        litellm.completion(**fixed, top_p=2)
    except litellm.BadRequestError as error:
        assert "top_p" in str(error)
    else:
        raise AssertionError("top_p=2 was accepted")
    print(f"LiteLLM {version('litellm')}: ok")


main()
