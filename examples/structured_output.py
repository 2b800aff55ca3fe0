"""Get an answer that is an instance of a JSON schema."""

import json

from baton import Client, SamplingParams

schema = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "hen"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}

with Client() as client:
    result = client.complete_chat(
        [{"role": "user", "content": "Describe an animal."}],
        SamplingParams(temperature=0.0, max_new_tokens=800),
        json_schema=schema,
    )
    print(json.loads(result.text), result.finish_reason)
