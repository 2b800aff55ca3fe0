"""What users of vLLM and OpenAI write: their names, empty batches, batches with a bad prompt."""

import asyncio

import pytest

from baton import AsyncClient, Client, InputError, SamplingParams
from baton.proto.errors import PromptTooLong

pytestmark = pytest.mark.integration
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


@pytest.fixture
def client(cluster):
    with Client(cluster.address) as client:
        yield client


def test_max_tokens_is_a_name_of_max_new_tokens(cluster, client):
    assert len(client.complete([1, 2], SamplingParams(max_tokens=3, temperature=0)).token_ids) == 3
    assert len(client.complete([1, 2], max_tokens=4, temperature=0, seed=9).token_ids) == 4
    sampling = cluster.prefill.assigned[-1].context.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.seed) == (4, 0.0, 9)
    assert len(client.generate([1, 2], max_new_tokens=5).result().token_ids) == 5
    with pytest.raises(InputError, match="temperature is given beside sampling_params"):
        client.complete([1], SamplingParams(), temperature=1.0)
    with pytest.raises(InputError, match="two names of one parameter"):
        client.complete([1], max_tokens=2, max_new_tokens=3)


def test_tools_are_an_option_of_chats(cluster, client, tokenizer):
    messages = [{"role": "user", "content": "What time is it?"}]
    client.complete_chat(messages, max_tokens=1, variables={"tools": TOOLS})
    client.complete_chat(messages, max_tokens=1, tools=TOOLS)
    first, second = [one.context.tokens.array.tolist() for one in cluster.prefill.assigned[-2:]]
    assert first == second
    with pytest.raises(InputError, match="tools are given twice"):
        client.complete_chat(messages, variables={"tools": TOOLS}, tools=TOOLS)
    with pytest.raises(InputError, match="the call has no 'tools'"):
        client.complete([1], tools=TOOLS)


def test_an_empty_batch_has_no_results(cluster, client):
    assert client.complete([]) == client.complete_chat([]) == client.generate([]) == []

    async def main():
        async with AsyncClient(cluster.address) as client:
            assert await client.complete([]) == await client.complete_chat([]) == []
            assert client.generate([]) == client.chat([]) == []

    asyncio.run(main())


def check(results):
    good, bad, also = results
    assert len(good.token_ids) == len(also.token_ids) == 2
    assert good.error is None and bad.outputs == []
    assert isinstance(bad.error, PromptTooLong) and str(bad.error).startswith("prompts[1]: ")
    for read in (lambda: bad.text, lambda: bad.usage, lambda: bad.finish_reason):
        with pytest.raises(PromptTooLong):
            read()


def test_a_bad_prompt_need_not_fail_the_whole_batch(cluster, client):
    prompts = [[1, 2], [1] * 3000, [3]]
    with pytest.raises(PromptTooLong, match=r"prompts\[1\]"):
        client.complete(prompts, max_tokens=2)
    check(client.complete(prompts, max_tokens=2, on_error="return"))
    several = client.complete(prompts, max_tokens=2, n=2, on_error="return")
    assert [len(one.outputs) for one in several] == [2, 0, 2]
    with pytest.raises(InputError, match="on_error must be"):
        client.complete(prompts, on_error="ignore")

    async def main():
        async with AsyncClient(cluster.address) as client:
            check(await client.complete(prompts, max_tokens=2, on_error="return"))

    asyncio.run(main())


def test_a_client_shows_its_address_and_end(cluster):
    client = Client(cluster.address)
    assert repr(client) == f"Client({cluster.address!r})"
    client.close()
    assert repr(client) == f"Client({cluster.address!r}, closed)"
