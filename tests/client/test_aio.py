"""The asyncio client through a real router to scripted workers."""

from __future__ import annotations

import asyncio
import gc
import secrets

import numpy as np
import pytest
import uvloop

from baton.client import AsyncClient
from baton.client.model import QUICK_CHARS
from baton.proto import (
    ConnectionLost,
    GenerationStatus,
    InputError,
    RequestID,
    SamplingParams,
    TextContext,
)
from baton.proto.errors import PromptTooLong

pytestmark = pytest.mark.integration


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine on a new loop of asyncio or uvloop."""
    make = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run(coroutine):
        with asyncio.Runner(loop_factory=make) as runner:
            return runner.run(asyncio.wait_for(coroutine, 60))

    return run


def greedy(n, **kwargs):
    return SamplingParams(temperature=0, max_new_tokens=n, **kwargs)


def expect(start, n):
    return [10 + p % 1000 for p in range(start, start + n)]


async def tokens_of(generation):
    return [token async for output in generation for token in output.tokens]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def test_many_streams_at_once(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            streams = [client.generate([1] * (n + 1), greedy(30)) for n in range(16)]
            return await asyncio.gather(*(tokens_of(stream) for stream in streams))

    assert run(main()) == [expect(n + 1, 30) for n in range(16)]


def test_text_chat_and_stop(cluster, run, tokenizer, say):
    messages = [{"role": "user", "content": "Hello"}]

    async def text_of(generation):
        outputs = [output async for output in generation]
        return "".join(o.text for o in outputs), outputs[-1].final_status

    async def main():
        async with AsyncClient(cluster.address) as client:
            cluster.prefill.answer = say("a b STOP c", len(tokenizer.encode("Hi")))
            stopped = await text_of(client.generate("Hi", greedy(50, stop=["STOP"])))
            cluster.prefill.answer = say("Good day!", len(tokenizer.encode_chat(messages)))
            return stopped, await text_of(client.chat(messages, greedy(50)))

    end = GenerationStatus.END_OF_SEQUENCE
    assert run(main()) == (("a b ", end), ("Good day!", end))


def test_a_context_keeps_its_id(cluster, run):
    context = TextContext(tokens=np.array([4]), max_length=6, request_id=RequestID("mine"))

    async def main():
        async with AsyncClient(cluster.address) as client:
            generation = client.generate(context)
            return generation.request_id, await tokens_of(generation)

    assert run(main()) == ("mine", expect(1, 5))


def test_aclose_dropping_and_breaking_cancel(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            closed = client.generate([1], greedy(2000))
            await anext(closed)
            await closed.aclose()
            await until(lambda: len(cluster.prefill.aborted) == 1)
            assert [o async for o in closed] == []

            dropped = client.generate([1], greedy(2000))
            await anext(dropped)
            del dropped
            gc.collect()
            await until(lambda: len(cluster.prefill.aborted) == 2)

            async for _ in client.generate([1], greedy(2000)):
                break
            gc.collect()
            await until(lambda: len(cluster.prefill.aborted) == 3)

            async with client.generate([1], greedy(2000)) as left:
                await anext(left)
            await until(lambda: len(cluster.prefill.aborted) == 4)

    run(main())


def test_a_reader_that_times_out_can_go_on(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            cluster.prefill.paused = True
            generation = client.generate([1], greedy(5))
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(generation), 0.03)
            cluster.prefill.paused = False
            return await tokens_of(generation)

    assert run(main()) == expect(1, 5)


def test_errors_come_out_of_the_iterator(cluster, run, tmp_path):
    async def main():
        async with AsyncClient(cluster.address) as client:
            generation = client.generate(np.empty(0, np.int32))
            with pytest.raises(InputError, match="empty"):
                await anext(generation)
            assert [o async for o in generation] == []
            dropped = client.generate(np.empty(0, np.int32))
            await asyncio.sleep(0.02)
            del dropped
        with pytest.raises(ConnectionLost, match="closed"):
            client.generate([1])
        async with AsyncClient(f"ipc://{tmp_path}/none", connect_timeout=0.2) as lonely:
            with pytest.raises(ConnectionLost, match="baton serve"):
                await lonely.status()

    run(main())


class Taken:
    """What a generation delivers."""

    def __init__(self, generation, **options):
        self.outputs, self.errors = [], []
        self.over = asyncio.Event()
        self.generation = generation
        generation.deliver(self.take, self.fail, **options)

    def take(self, output):
        self.outputs.append(output)
        if output.is_done:
            self.over.set()

    def fail(self, error):
        self.errors.append(error)
        self.over.set()

    @property
    def tokens(self):
        return [token for output in self.outputs for token in output.tokens]


def test_outputs_are_delivered_as_the_iterator_has_them(cluster, run, tokenizer, say):
    async def main():
        async with AsyncClient(cluster.address) as client:
            for _ in range(2):  # the first request waits for the model, the second starts at once
                taken = [Taken(client.generate([1] * (n + 1), greedy(30))) for n in range(8)]
                for one in taken:
                    await one.over.wait()
                assert [one.tokens for one in taken] == [expect(n + 1, 30) for n in range(8)]
                assert [one.errors for one in taken] == [[]] * 8
            cluster.prefill.answer = say("a b STOP c", len(tokenizer.encode("Hi")))
            stopped = Taken(client.generate("Hi", greedy(50, stop=["STOP"])))
            await stopped.over.wait()
            text = "".join(output.text for output in stopped.outputs)
            return text, stopped.outputs[-1].final_status

    assert run(main()) == ("a b ", GenerationStatus.END_OF_SEQUENCE)


def test_a_whole_answer_is_delivered_as_one_output(cluster, run, tokenizer, say):
    async def main():
        async with AsyncClient(cluster.address) as client:
            for count in (1, 5, 150):
                one = Taken(client.generate([1], greedy(count), show_text=True), whole=True)
                await one.over.wait()
                assert one.tokens == expect(1, count)
                (output,) = one.outputs
                assert output.is_done
                assert output.position == 1
                assert output.text
            long = client.generate([1], greedy(2000))
            cancelled = Taken(long, whole=True)
            await until(lambda: long._held)
            cancelled.generation.cancel()  # delivers the held tokens, so that they are counted
            assert len(cancelled.outputs) == 1
            assert cancelled.tokens == expect(1, len(cancelled.tokens))
            cluster.prefill.answer = say("a b STOP c", len(tokenizer.encode("Hi")))
            params = greedy(50, stop=["STOP"])
            stopped = Taken(client.generate("Hi", params), whole=True)
            await stopped.over.wait()
            return "".join(output.text for output in stopped.outputs)

    assert run(main()) == "a b "


class Batch:
    def begin(self):
        pass

    def end(self):
        pass


def test_a_client_with_a_batch_acknowledges_ends_with_its_next_message_or_soon(cluster, run):
    async def main():
        async with AsyncClient(cluster.address, batch=Batch()) as client:
            await client.model()
            connection = client._connected()
            for _ in range(5):
                await tokens_of(client.generate([1], greedy(3), whole=True))
            before = connection._outbox.envelopes
            running = [client.generate([1], greedy(3), whole=True) for _ in range(8)]
            for one in running:
                await tokens_of(one)
            assert connection._outbox.envelopes - before < 16  # 8 with a request, 8 with its end
            await until(lambda: not cluster.router.shell.core.kept)

    run(main())


def test_a_request_begins_with_checked_options(cluster, run, tokenizer):
    async def begun(client, prompt):
        options = {"request_id": secrets.token_hex(8), "show_text": True}
        taken = Taken(client.begin(prompt, greedy(4), options))
        await taken.over.wait()
        return taken

    async def main():
        async with AsyncClient(cluster.address) as client:
            for _ in range(2):  # the first waits for the model and the tokenizer
                taken = await begun(client, "Hi")
                assert taken.tokens == expect(len(tokenizer.encode("Hi")), 4)
                assert "".join(output.text for output in taken.outputs)
            assert (await begun(client, np.array([1, 2], np.int32))).tokens == expect(2, 4)
            for prompt, kind in ((np.array([1 << 20]), InputError), ("Hi " * 3000, PromptTooLong)):
                assert len(prompt) == 1 or len(prompt) > QUICK_CHARS
                assert [type(error) for error in (await begun(client, prompt)).errors] == [kind]

    run(main())


def test_outputs_that_have_arrived_before_are_delivered_first(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            generation = client.generate([1], greedy(30))
            first = (await anext(generation)).tokens
            await asyncio.sleep(0.02)
            taken = Taken(generation)
            await taken.over.wait()
            return first + taken.tokens

    assert run(main()) == expect(1, 30)


def test_a_wrong_prompt_is_delivered_as_an_error(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            for _ in range(2):
                taken = Taken(client.generate([1 << 20]))
                await taken.over.wait()
                assert [type(error) for error in taken.errors] == [InputError]
                assert taken.outputs == []
            taken.generation.cancel()
            return await tokens_of(taken.generation)

    assert run(main()) == []


def test_an_exception_of_the_receiver_ends_its_request_alone(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            await client.model()
            bad, errors = client.generate([1], greedy(2000)), []

            def take(output):
                raise ValueError(output.tokens[0])

            taken = Taken(client.generate([1], greedy(60)))
            bad.deliver(take, errors.append)
            await until(lambda: len(cluster.prefill.aborted) == 1)
            await taken.over.wait()
            assert [str(error) for error in errors] == [str(expect(1, 1)[0])]
            return taken.tokens

    assert run(main()) == expect(1, 60)


@pytest.mark.parametrize("known", [True, False], ids=["model known", "model unknown"])
def test_nothing_is_delivered_after_a_cancel(cluster, run, known):
    async def main():
        async with AsyncClient(cluster.address) as client:
            if known:
                await client.model()
            early = Taken(client.generate([1], greedy(2000)))
            early.generation.cancel()
            late = Taken(client.generate([1], greedy(2000)))
            await until(lambda: late.outputs)
            late.generation.cancel()
            seen = len(late.outputs)
            await until(lambda: len(cluster.prefill.aborted) >= 1)
            other = Taken(client.generate([1], greedy(20)))
            await other.over.wait()
            assert not early.outputs
            assert len(late.outputs) == seen
            return early.errors + late.errors

    assert run(main()) == []


def test_streams_outlast_the_router(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            stream = client.generate([1], greedy(300))
            first = (await anext(stream)).tokens
            await asyncio.to_thread(cluster.kill_router)
            await asyncio.to_thread(cluster.restart_router)
            return first + await tokens_of(stream)

    assert run(main()) == expect(1, 300)


def test_questions(cluster, run):
    async def main():
        async with AsyncClient(cluster.address) as client:
            description, status = await asyncio.gather(client.describe(), client.status())
            return (
                description.card.name,
                len(status["workers"]),
                await client.drain("decode-0", force=True),
            )

    assert run(main()) == ("demo", 2, "draining")
