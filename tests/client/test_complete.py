"""Whole answers: text, finish reason, usage, several answers, texts of log-probabilities."""

import asyncio

import pytest

from baton import AsyncClient, Client, InputError, SamplingParams
from baton.proto.errors import CapacityError
from baton.proto.wire.messages import Terminal

pytestmark = pytest.mark.integration


def greedy(n, **fields):
    return SamplingParams(temperature=0, max_new_tokens=n, **fields)


@pytest.fixture
def client(cluster):
    with Client(cluster.address) as client:
        yield client


def test_a_whole_answer(cluster, client, tokenizer, say):
    prompt = "Once upon a time"
    length = len(tokenizer.encode(prompt))
    cluster.prefill.answer = say("there was a café. 🎈", length)
    result = client.complete(prompt, greedy(100))
    assert (result.text, result.finish_reason) == ("there was a café. 🎈", "stop")
    assert tokenizer.decode(result.token_ids) == "there was a café. 🎈"
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (length, len(result.token_ids))
    assert (usage.cached_tokens, usage.total_tokens) == (3, length + len(result.token_ids))
    assert (result.outputs[0].prefill, result.outputs[0].decode) == ("prefill-0", "decode-0")
    assert result.logprobs is None and result.outputs[0].cumulative_logprob is None
    assert client.complete(prompt, greedy(2)).finish_reason == "length"
    chat = client.complete_chat([{"role": "user", "content": prompt}], greedy(3))
    assert len(chat.token_ids) == 3 and chat.text


def test_token_ids_get_a_text_too(client):
    assert client.complete([1, 2, 3], greedy(4)).text
    assert client.complete([1, 2, 3], greedy(4), show_text=False).text == ""
    assert client.generate([1, 2, 3], greedy(4)).result().text == ""


def test_several_answers_have_seeds_of_their_own(cluster, client):
    results = client.complete([[1], [1, 1]], greedy(2, seed=7), n=3)
    assert [[one.index for one in result.outputs] for result in results] == [[0, 1, 2]] * 2
    assert [result.usage.prompt_tokens for result in results] == [1, 2]
    assert [result.usage.completion_tokens for result in results] == [6, 6]
    seeds = [assign.context.sampling.seed for assign in cluster.prefill.assigned]
    assert sorted(seeds) == [7, 7, 8, 8, 9, 9]
    for wrong in (0, 1.5, "2", True, 129):
        with pytest.raises(InputError, match=r"^n must be"):
            client.complete("x", n=wrong)
    with pytest.raises(InputError, match="request_id names one request, but the call has 2"):
        client.complete("x", n=2, request_id="mine")


def test_log_probabilities_have_the_texts_of_their_tokens(client, tokenizer):
    result = client.complete("Hi", greedy(3), log_probabilities=1)
    assert [one.token_id for one in result.logprobs] == result.token_ids
    for one in result.logprobs:
        assert one.bytes == tokenizer.token_bytes(one.token_id)
        assert one.text == one.bytes.decode("utf-8", "replace")
        assert [(top.token_id, top.logprob) for top in one.top] == [(one.token_id, -0.5)]
    assert result.outputs[0].cumulative_logprob == -1.5


def test_the_first_error_names_the_prompt_and_ends_the_call(cluster, client):
    cluster.prefill.refusal = Terminal(request=b"", code="failed", message="no")
    with pytest.raises(Exception, match=r"^prompts\[0\]: no"):
        client.complete([[1], [2]], greedy(3))
    assert client.status()["router"]["requests"]["in_flight"] == 0


def test_asyncio(cluster, tokenizer):
    async def main():
        async with AsyncClient(cluster.address) as client:
            one = await client.complete("Hi", greedy(3))
            many = await client.complete([[1]] * 40, greedy(3), n=2)
            chats = [[{"role": "user", "content": "Hi"}]] * 2
            chat = await client.complete_chat(chats, greedy(3))
            with pytest.raises(InputError, match=r"^prompts\[1\]: token id"):
                await client.complete([[1], [9999]], greedy(3))
            return one, many, chat

    one, many, chat = asyncio.run(main())
    assert len(one.token_ids) == 3 and one.text
    assert [len(result.outputs) for result in many] == [2] * 40 and len(chat) == 2


def test_more_than_the_cluster_admits_in_one_call_and_in_many(cluster):
    """The workers of the tests have 64 batch slots, so the router admits 512 requests."""
    count, most = 600, 512

    async def main(**options):
        cluster.prefill.paused = True
        async with AsyncClient(cluster.address) as client:
            before = (await client.status())["router"]["requests"]["refused"]
            calls = [client.complete([1, 2], greedy(2), **options) for _ in range(count)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            refused = before
            while refused < before + count - most:
                refused = (await client.status())["router"]["requests"]["refused"]
            cluster.prefill.paused = False
            return await asyncio.gather(*tasks, return_exceptions=True)

    refused = [one for one in asyncio.run(main()) if isinstance(one, CapacityError)]
    assert len(refused) == count - most
    assert "limit 512 = 8 x 64 batch slots (--max-num-seqs" in str(refused[0])
    assert "; retry in" in str(refused[0])
    answers = asyncio.run(main(max_retries=50))
    assert [one.finish_reason for one in answers] == ["length"] * count
    with Client(cluster.address) as client:
        answers = client.complete([[1, 2]] * count, greedy(2))
    assert [one.finish_reason for one in answers] == ["length"] * count
