"""openai-python draws pictures: ``python openai_pictures.py URL MODEL``."""

import asyncio
import base64
import struct
import sys

import openai
from openai import AsyncOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
PROMPT = "a red house by the sea"


def main() -> None:
    client = OpenAI(base_url=URL, api_key="k", max_retries=0)
    answer = client.images.generate(
        model=MODEL,
        prompt=PROMPT,
        n=2,
        size="64x32",
        response_format="b64_json",
        quality="standard",
        user="somebody",
        extra_body={"seed": 7, "steps": 2},
    )
    pictures = [base64.b64decode(one.b64_json) for one in answer.data]
    for picture in pictures:
        assert struct.unpack(">II", picture[16:24]) == (64, 32)
    assert pictures[0] != pictures[1]
    assert answer.created > 0
    assert answer.usage.output_tokens == 2 * 4 * 2
    assert answer.usage.input_tokens_details.text_tokens == answer.usage.input_tokens > 0
    assert (answer.size, answer.output_format, answer.background) == ("64x32", "png", "opaque")
    streamed(client)
    plain = client.images.generate(prompt=PROMPT)
    assert base64.b64decode(plain.data[0].b64_json).startswith(b"\x89PNG")
    linked = client.images.generate(prompt=PROMPT, response_format="url")
    assert linked.data[0].url.startswith("data:image/png;base64,")
    refused = [{"size": "1000x1000"}, {"n": 2, "stream": True}]
    for fields in refused:
        try:
            client.images.generate(prompt=PROMPT, **fields)
        except openai.BadRequestError as error:
            assert error.param == next(iter(fields)), error
        else:
            raise AssertionError(fields)
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    except openai.BadRequestError as error:
        assert error.code == "task_mismatch"
    else:
        raise AssertionError("a picture model answered")
    asyncio.run(at_once())
    print(f"openai-python {openai.__version__}: ok")


def streamed(client: OpenAI) -> None:
    """Previews come before the picture, which is the one of the same seed without a stream."""
    same = {"prompt": PROMPT, "size": "64x32", "extra_body": {"seed": 7, "steps": 3}}
    *previews, last = client.images.generate(**same, stream=True, partial_images=2)
    assert [one.type for one in previews] == 2 * ["image_generation.partial_image"]
    assert [one.partial_image_index for one in previews] == [0, 1]
    assert last.type == "image_generation.completed"
    assert last.b64_json == client.images.generate(**same).data[0].b64_json
    assert last.usage.output_tokens == 4 * 2


async def at_once() -> None:
    async with AsyncOpenAI(base_url=URL, api_key="k", max_retries=0) as client:

        async def draw(seed: int) -> str:
            own = {"seed": seed, "steps": 2}
            found = await client.images.generate(prompt=PROMPT, size="32x32", extra_body=own)
            return found.data[0].b64_json

        found = await asyncio.gather(*(draw(at % 4) for at in range(8)))
    assert found[:4] == found[4:]
    assert len(set(found)) == 4


main()
