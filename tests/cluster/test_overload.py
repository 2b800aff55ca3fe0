"""Ten times the possible load: refusals at once, bounded memory, and no other request suffers."""

import asyncio
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq

from baton.client import AsyncClient
from baton.proto.errors import CapacityError
from baton.proto.sampling import SamplingParams
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import (
    FinalAck,
    Message,
    Ping,
    Pong,
    RouterToClient,
    Submit,
    Submitted,
    Terminal,
    Tokens,
)
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens

from ..processes import wait_until
from .http import Gateway
from .streams import Job, Stream, begun, follow, jobs, new_salt, run, tokens

pytestmark = pytest.mark.cluster

CAPACITY = 16  # eight requests for each slot of the one decode worker
WORK = jobs(CAPACITY, prompt=60, new=300, seed=8)
MIB = 1 << 20
TRIES = 3  # a busy machine may spoil a comparison of times, but not three


@pytest.fixture(scope="module")
def small(shared_cluster):
    return shared_cluster(prefill=1, decode=1, max_num_seqs=CAPACITY // 8)


@pytest.fixture(scope="module")
def undisturbed(small):
    return tokens(run(small.address, WORK))


@pytest.fixture(autouse=True)
def nothing_kept(small):
    """Whatever a test did, the router keeps nothing of it."""
    yield
    wait_until(lambda: router_state(small)["context_bytes"] == 0, what="the router to forget")


def router_state(cluster) -> dict:
    with cluster.client() as client:
        return client.status()["router"]


def memory(cluster) -> int:
    """Resident bytes of the router."""
    status = Path(f"/proc/{cluster.pids()['router']}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line) * 1024


def span(streams: list[Stream]) -> float:
    """Seconds from the first start to the last end."""
    return max(s.ended for s in streams) - min(s.started for s in streams)


class RawClient:
    """A client that sends on command, and reads only then."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(address)
        self._encoder = EnvelopeEncoder()
        self._decoder = EnvelopeDecoder[Message](RouterToClient)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._context.destroy(linger=0)

    def submit(self, name: str, job: Job, log_probabilities: int = 0) -> None:
        sampling = WireSampling(
            **{key: getattr(job.params, key) for key in WireSampling.__struct_fields__}
        )
        context = WireContext(
            tokens=WireTokens(np.array(job.prompt, np.int32)),
            max_length=2048,
            sampling=sampling,
            ignore_eos=True,
            log_probabilities=log_probabilities,
        )
        self.say(Submit(request_id=name, context=context))

    def say(self, message: Message) -> None:
        self.socket.send_multipart(self._encoder.encode([message]))

    def hear(self) -> list[Message]:
        return self._decoder.decode(self.socket.recv_multipart(copy=False))


def beside_a_flood(small, undisturbed) -> bool:
    """More than ten times the capacity, spread over the time that a full load takes.

    Returns whether refusals came at once and the admitted took no more than twice their time.
    """
    alone = run(small.address, WORK)
    pause = span(alone) / CAPACITY / 20
    refusals: list[Stream] = []

    async def flood(streams: list[Stream]) -> None:
        await begun(streams, 2)
        async with AsyncClient(small.address) as client, asyncio.TaskGroup() as group:
            await client.describe()
            while not all(stream.ended for stream in streams):
                refusals.append(Stream())
                group.create_task(follow(client, WORK[0], refusals[-1], new_salt()))
                await asyncio.sleep(pause)

    admitted = run(small.address, WORK, flood)
    assert tokens(admitted) == undisturbed
    usual_wait = check_refusals(refusals, undisturbed[0])
    print(f"the admitted took {span(admitted):.2f} s, alone {span(alone):.2f} s")
    return usual_wait <= 0.05 and span(admitted) <= 2 * span(alone)


def test_what_does_not_fit_is_refused_and_the_others_end_as_ever(small, undisturbed):
    beside_a_flood(small, undisturbed)


@pytest.mark.long
def test_what_does_not_fit_is_refused_at_once_and_the_others_are_not_slower(small, undisturbed):
    assert any(beside_a_flood(small, undisturbed) for _ in range(TRIES))


def check_refusals(offered: list[Stream], answer: list[int]) -> float:
    """Most were refused; the others took the place of ended requests.

    Returns the median of the seconds a refusal took.
    """
    refused = [s for s in offered if s.error is not None]
    assert len(refused) > CAPACITY
    assert all(isinstance(s.error, CapacityError) and s.error.retry_after for s in refused)
    assert all(s.tokens == answer for s in offered if s.error is None)
    waits = sorted(s.ended - s.started for s in refused)
    p50, longest = statistics.median(waits), waits[-1]
    print(f"{len(refused)} of {len(offered)} refused, p50 {p50:.4f} s, longest {longest:.4f} s")
    return p50


def test_a_burst_of_long_prompts_leaves_no_memory_behind(small, undisturbed):
    long = jobs(1, prompt=3800, new=100)[0]
    prompt = (long.prompt * 2)[:1900]
    burst = Job(prompt, long.params)
    before = memory(small)

    async def attack(streams: list[Stream]) -> None:
        await begun(streams, len(streams))  # all are admitted
        await asyncio.to_thread(submit_all)

    def submit_all() -> None:
        with RawClient(small.address) as client:
            for number in range(1000):
                client.submit(f"burst-{number}", burst)
            kept.append(router_state(small)["context_bytes"])
            ends: list[Terminal] = []
            while len(ends) < 1000:
                ends += [m for m in client.hear() if isinstance(m, Terminal)]
            refused = [end for end in ends if end.code == CapacityError.code]
            assert len(refused) >= 900  # some take the place of an ended request
            assert all(end.retry_after for end in refused)
            client.say(FinalAck(requests=[end.request for end in ends if not end.code]))
            client.say(Ping())
            while not any(isinstance(m, Pong) for m in client.hear()):
                pass

    kept: list[int] = []
    streams = run(small.address, WORK, attack)
    assert tokens(streams) == undisturbed
    grown = memory(small) - before
    print(f"router: {before / MIB:.1f} MiB, {grown / MIB:+.1f} MiB; contexts {kept[0]} bytes")
    assert kept[0] < 1 * MIB
    assert grown < 32 * MIB


def beside_a_slow_reader(small, undisturbed) -> float:
    """Half of the load belongs to a client that reads a message now and then.

    Returns how many times as long the others took as beside a fast reader.
    """
    fast, slow = WORK[::2], WORK[1::2]

    async def quick_reader(_streams: list[Stream]) -> None:
        others = [Stream() for _ in slow]
        async with AsyncClient(small.address) as client:
            pairs = zip(slow, others, strict=True)
            await asyncio.gather(*(follow(client, job, s, new_salt()) for job, s in pairs))

    both = run(small.address, fast, quick_reader)
    before, hurry = memory(small), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_slowly, small.address, slow, hurry)
        beside = run(small.address, fast)
        wait_until(lambda: not router_state(small)["requests"]["in_flight"], what="the end")
        grown = (memory(small) - before) / MIB
        hurry.set()
        heard = reading.result(30)
    print(f"beside a slow reader {span(beside):.2f} s, a quick one {span(both):.2f} s")
    print(f"router {grown:+.1f} MiB")
    assert tokens(beside) == undisturbed[::2]
    assert heard == undisturbed[1::2]
    assert grown < 32
    return span(beside) / span(both)


def test_a_client_that_reads_slowly_loses_nothing_and_holds_no_memory(small, undisturbed):
    beside_a_slow_reader(small, undisturbed)


@pytest.mark.long
def test_a_client_that_reads_slowly_holds_nobody_up(small, undisturbed):
    assert any(beside_a_slow_reader(small, undisturbed) <= 2 for _ in range(TRIES))


def read_slowly(address: str, work: list[Job], hurry: threading.Event) -> list[list[int]]:
    """Submit all and read 20 messages a second, until it is time to hurry."""
    names = [f"slow-{index}" for index in range(len(work))]
    heard: dict[bytes, list[int]] = {}
    prompts: dict[bytes, int] = {}
    keys: dict[str, bytes] = {}
    ended: set[str] = set()
    with RawClient(address) as client:
        for name, job in zip(names, work, strict=True):
            client.submit(name, job, log_probabilities=20)
        while len(ended) < len(work):
            if not hurry.is_set():
                time.sleep(0.05)
            for message in client.hear():
                if isinstance(message, Submitted):
                    keys[message.request_id] = message.request
                    prompts[message.request] = len(work[names.index(message.request_id)].prompt)
                elif isinstance(message, Tokens):
                    for part in message.runs:
                        got = heard.setdefault(part.request, [])
                        known = prompts[part.request] + len(got) - part.position
                        assert known >= 0, "tokens are missing"
                        got += part.tokens[known:]
                elif isinstance(message, Terminal):
                    assert message.status == "maximum_length"
                    ended.add(message.request_id)
                    client.say(FinalAck(requests=[message.request]))
    return [heard[keys[name]] for name in names]


def test_three_hundred_prompts_in_one_call_or_in_tasks_with_retries(small):
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    prompts = [[5, 6, 7 + number] for number in range(300)]

    async def tasks():
        async with AsyncClient(small.address) as client:
            calls = [client.complete(prompt, params, max_retries=100) for prompt in prompts]
            return await asyncio.gather(*calls)

    with small.client() as client:
        batch = client.complete(prompts, params)
    assert [one.token_ids for one in asyncio.run(tasks())] == [one.token_ids for one in batch]
    assert {len(one.token_ids) for one in batch} == {2}


def test_a_body_with_more_answers_than_fit_at_once_gets_them_all(small, tmp_path):
    """More than the router takes at a time; its answer was 429 on an idle cluster, each time."""
    web = Gateway(small, tmp_path)
    try:
        web.wait_ready()
        asked = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
        prompts = [[5, 6, 7 + number] for number in range(CAPACITY)]
        alone = [web.post("/v1/completions", prompt=one, **asked) for one in prompts]
        texts = [one["choices"][0]["text"] for one in alone for _ in range(3)]
        whole = web.post("/v1/completions", prompt=prompts, n=3, **asked)
        assert [choice["text"] for choice in whole["choices"]] == texts
        parts = [""] * len(texts)
        for event in web.stream("/v1/completions", prompt=prompts, n=3, **asked):
            for choice in event["choices"]:
                parts[choice["index"]] += choice["text"]
        assert parts == texts
    finally:
        web.end()
