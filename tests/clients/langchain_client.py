"""langchain-openai against a gateway: ``python langchain_client.py URL MODEL``."""

import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]


def main() -> None:
    model = ChatOpenAI(
        base_url=URL, api_key="k", model=MODEL, temperature=0, max_tokens=24, max_retries=0
    )
    whole = model.invoke([("system", "You are brief."), ("user", "Who are you?")])
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    parts = list(model.stream([("system", "You are brief."), ("user", "Who are you?")]))
    assert "".join(part.content for part in parts) == whole.content
    assert len({one.content for one in model.batch(["Who are you?"] * 4)}) == 1
    schema = {
        "title": "Ready",
        "type": "object",
        "properties": {"ready": {"type": "boolean"}},
        "required": ["ready"],
        "additionalProperties": False,
    }
    model = model.model_copy(update={"temperature": 1, "seed": 7, "max_tokens": 200})
    formed = model.with_structured_output(schema, method="json_schema").invoke("Are you ready?")
    assert isinstance(formed["ready"], bool)
    old = OpenAI(base_url=URL, api_key="k", model=MODEL, max_tokens=4, max_retries=0)
    assert old.invoke("Once upon a time")
    print(f"langchain-openai {version('langchain-openai')}: ok")


main()
