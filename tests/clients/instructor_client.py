"""instructor against a gateway: ``python instructor_client.py URL MODEL``."""

import sys
from importlib.metadata import version
from typing import Literal

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Are you ready?"}]
# The modes that send the schema in a form that constrains the answer. Others only ask for it.
MODES = {Mode.TOOLS: 400, Mode.TOOLS_STRICT: 400, Mode.JSON_SCHEMA: 200}


class Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo model would go on with names of its own


class Part(Exact):
    name: Literal["wheel", "door"]
    works: bool


class State(Exact):
    ready: bool
    mood: Literal["good", "bad"]
    parts: list[Part] = Field(min_length=2, max_length=2)


def main() -> None:
    client = OpenAI(base_url=URL, api_key="k", max_retries=0)
    fixed = {
        "model": MODEL, "messages": MESSAGES, "response_model": State, "max_retries": 0,
        "temperature": 1, "seed": 7,
    }  # fmt: skip
    for mode, tokens in MODES.items():
        asking = instructor.from_openai(client, mode=mode)
        found, raw = asking.chat.completions.create_with_completion(**fixed, max_tokens=tokens)
        assert isinstance(found, State) and found.parts[1].name in ("wheel", "door"), mode
        assert raw.usage.completion_tokens < tokens, mode
        *_, last = asking.chat.completions.create_partial(**fixed, max_tokens=tokens)
        assert State.model_validate(last.model_dump()).parts, mode
    asking = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS)
    found = asking.responses.create(
        model=MODEL, input="Are you ready?", response_model=State, max_retries=0,
        max_output_tokens=400, temperature=1,
    )  # fmt: skip
    assert isinstance(found, State)
    print(f"instructor {version('instructor')}: ok")


main()
