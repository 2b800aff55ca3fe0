"""Lists of prompts: one generation for each, a bounded number of them running."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from baton.client import AsyncClient, Client
from baton.client.events import RequestSpec
from baton.client.window import LARGEST, ROUNDS, WINDOW, Window, overdue_end, size_for
from baton.proto import InputError, SamplingParams, TextContext
from baton.proto.errors import ConnectionLost, DeadlineExceeded
from baton.proto.wire.wire_context import WireContext, WireTokens

from ..processes import wait_until


def spec(name, deadline=None):
    context = WireContext(tokens=WireTokens(np.array([1], np.int32)), max_length=9)
    return RequestSpec(request_id=name, context=context, deadline=deadline)


def names(admitted):
    return [spec.request_id for spec, _ in admitted]


def test_a_window_starts_requests_as_others_end():
    window = Window(2)
    sinks = {name: object() for name in "abcd"}
    for name, sink in sinks.items():
        window.enter(spec(name), sink, 0.0)
    assert names(window.admit(0.0)) == ["a", "b"]
    assert names(window.admit(0.0)) == []
    assert window.waits("c", sinks["c"]) and not window.waits("a", sinks["a"])
    window.leave("c")  # not wanted any more
    window.leave("a")
    assert names(window.admit(0.0)) == ["d"]
    window.enter(spec("e"), sinks["a"], 0.0)
    assert window.close() == {"e": sinks["a"]}
    window.leave("b")
    assert names(window.admit(0.0)) == []


def test_a_deadline_begins_with_the_call():
    window = Window(1)
    window.enter(spec("a", 5.0), print, 100.0)
    window.enter(spec("b", 5.0), print, 100.0)
    window.enter(spec("c", 5.0), print, 100.0)
    ((first, _),) = window.admit(100.0)
    window.leave("a")
    ((second, _),) = window.admit(103.0)
    window.leave("b")
    ((third, _),) = window.admit(105.0)
    assert (first.deadline, second.deadline) == (5.0, 2.0)
    assert overdue_end(first) is overdue_end(second) is None
    assert isinstance(overdue_end(third).error, DeadlineExceeded)


def greedy(n, **fields):
    return SamplingParams(temperature=0, max_new_tokens=n, **fields)


def tokens_of(generation):
    return [token for output in generation for token in output.tokens]


def expect(start, n):
    return list(range(10 + start, 10 + start + n))


@pytest.fixture
def client(cluster):
    with Client(cluster.address) as client:
        yield client


@pytest.mark.integration
def test_a_list_of_prompts_gives_a_generation_for_each_in_order(client):
    prompts = [[1] * (n + 1) for n in range(3 * WINDOW)]
    generations = client.generate(prompts, greedy(5))
    assert [tokens_of(one) for one in generations] == [expect(n + 1, 5) for n in range(3 * WINDOW)]


@pytest.mark.integration
def test_texts_contexts_and_chats_come_in_lists_too(cluster, client, tokenizer):
    texts = ["Hi", "Hello there"]
    lengths = [len(tokenizer.encode(text)) for text in texts]
    assert [tokens_of(one) for one in client.generate(texts, greedy(3))] == [
        expect(length, 3) for length in lengths
    ]
    contexts = [TextContext(tokens=np.array([4] * n), max_length=n + 2) for n in (1, 2)]
    generations = client.generate(contexts)
    assert [one.request_id for one in generations] == [str(c.request_id) for c in contexts]
    assert [tokens_of(one) for one in generations] == [expect(1, 2), expect(2, 2)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    lengths = [len(tokenizer.encode_chat(chat)) for chat in chats]
    assert [tokens_of(one) for one in client.chat(chats, greedy(3))] == [
        expect(length, 3) for length in lengths
    ]


SIZE = ROUNDS * 64  # the workers of the tests have 64 batch slots


def test_the_window_has_the_clusters_size():
    def report(slots, limit):
        return {"router": {"batch_slots": slots, "requests": {"limit": limit}}}

    assert size_for(report(4, 32)) == WINDOW
    assert size_for(report(2, 16)) == 16
    assert size_for(report(64, 512)) == 128
    assert size_for(report(1 << 20, 1 << 23)) == LARGEST
    assert size_for(report(0, 4096)) == size_for({}) == WINDOW


@pytest.mark.integration
def test_only_a_window_of_a_call_runs_and_what_is_dropped_makes_room(cluster, client):
    cluster.prefill.paused = True
    generations = client.generate([[1]] * (SIZE + 3), greedy(4))
    wait_until(lambda: len(cluster.prefill.assigned) == SIZE)
    client.status()
    assert len(cluster.prefill.assigned) == SIZE
    generations[SIZE].close()  # it waits, and never starts
    generations[0].close()
    wait_until(lambda: len(cluster.prefill.assigned) == SIZE + 1)
    cluster.prefill.paused = False
    assert [tokens_of(one) for one in generations[1:SIZE]] == [expect(1, 4)] * (SIZE - 1)
    assert tokens_of(generations[SIZE + 2]) == expect(1, 4)
    assert len(cluster.prefill.assigned) == SIZE + 2


@pytest.mark.integration
def test_closing_the_client_ends_the_waiting_ones(cluster, client):
    cluster.prefill.paused = True
    generations = client.generate([[1]] * (WINDOW + 1), greedy(4))
    client.close()
    for generation in generations:
        with pytest.raises(ConnectionLost, match="closed"):
            list(generation)


@pytest.mark.integration
def test_parameters_for_all_or_for_each(cluster, client):
    for one in client.generate([[1], [1, 1]], [greedy(2), greedy(3)]):
        list(one)
    drawn = SamplingParams(max_new_tokens=1)
    for one in [*client.generate([[1]] * 3, drawn), *client.generate([[1]] * 2, greedy(1, seed=7))]:
        list(one)
    sampling = [assign.context.sampling for assign in cluster.prefill.assigned]
    assert [s.max_new_tokens for s in sampling[:2]] == [2, 3]
    assert (
        drawn.seed in {s.seed for s in sampling[2:5]} and len({s.seed for s in sampling[2:5]}) == 3
    )
    assert [s.seed for s in sampling[5:]] == [7, 7]


WRONG = [
    ({"prompt": ["Hi", 5]}, r"^prompts\[1\]: a prompt must be"),
    ({"prompt": [[1], [1], [5000]]}, r"^prompts\[2\]: token id 5000"),
    ({"prompt": [[1], [1]], "sampling_params": [greedy(1)]}, "1 sampling_params for 2 prompts"),
    ({"prompt": [[1], [1]], "sampling_params": [greedy(1), 5]}, "must be SamplingParams"),
    ({"prompt": [[1], [1]], "request_id": "same"}, "request_id names one request"),
    ({"prompt": [TextContext(tokens=np.array([4]), max_length=6)] * 2}, "two prompts"),
]


@pytest.mark.integration
@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_list_is_refused_and_starts_nothing(cluster, client, arguments, message):
    with pytest.raises(InputError, match=message):
        client.generate(**arguments)
    client.status()
    assert not cluster.prefill.assigned


@pytest.mark.integration
def test_the_asyncio_client_takes_lists(cluster):
    async def tokens(generation):
        return [token async for output in generation for token in output.tokens]

    async def main():
        async with AsyncClient(cluster.address) as client:
            many = client.generate([[1] * (n + 1) for n in range(WINDOW + 9)], greedy(3))
            answers = await asyncio.gather(*map(tokens, many))
            assert answers == [expect(n + 1, 3) for n in range(WINDOW + 9)]
            good, bad = client.generate([[1], [5000]], greedy(3))
            with pytest.raises(InputError, match=r"^prompts\[1\]: token id 5000"):
                await tokens(bad)
            assert await tokens(good) == expect(1, 3)
            cluster.prefill.paused = True
            before = len(cluster.prefill.assigned)
            many = client.generate([[1]] * (WINDOW + 2), greedy(3))
            while len(cluster.prefill.assigned) < before + WINDOW:
                await asyncio.sleep(0.002)
            await many[0].aclose()
            await many[WINDOW].aclose()
            last = many[-1]
            del many
            gc.collect()
            cluster.prefill.paused = False
            return await asyncio.wait_for(tokens(last), 30)

    assert asyncio.run(main()) == expect(1, 3)
