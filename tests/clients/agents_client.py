"""OpenAI's Agents SDK against a gateway: ``python agents_client.py URL MODEL``."""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

URL, MODEL = sys.argv[1:]
cities: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    cities.append(city)
    return "18 degrees"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, api_key="k", max_retries=0)
    settings = {
        "temperature": 0, "max_tokens": 400, "store": True, "verbosity": "low",
        "reasoning": Reasoning(effort="low", summary="auto"), "metadata": {"run": "1"},
        "parallel_tool_calls": False, "tool_choice": "required",
    }  # fmt: skip
    responses = {
        "response_include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 2, "truncation": "auto",
    }  # fmt: skip
    for model, own in (
        (OpenAIResponsesModel(model=MODEL, openai_client=client), responses),
        (OpenAIChatCompletionsModel(model=MODEL, openai_client=client), {}),
    ):
        agent = Agent(
            name="guide", instructions="You are brief.", model=model, tools=[weather],
            model_settings=ModelSettings(**settings, **own),
        )  # fmt: skip
        cities.clear()
        # The model calls the function, and answers with its result in a second turn.
        whole = await Runner.run(agent, "What is the weather in Paris?")
        assert len(cities) == 1 and cities[0] in ("Paris", "Rome"), cities
        assert whole.final_output
        assert len(whole.raw_responses) == 2
        streamed = Runner.run_streamed(agent, "What is the weather in Paris?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
        assert streamed.final_output == whole.final_output
        assert cities == cities[:1] * 2
    print(f"openai-agents {version('openai-agents')}: ok")


asyncio.run(main())
