"""When requests are sent, what becomes of them, and the HTTP target against a scripted server."""

import asyncio
import contextlib
import json
import math

import pytest

from baton.loadgen.http import MAX_EVENT_BYTES, HttpTarget, Server
from baton.loadgen.plan import Job, Lengths, Shape, random_jobs
from baton.loadgen.run import LOST_S, Runner, until
from baton.loadgen.statistics import CANCELLED, FAILED, OK, REFUSED, Record
from baton.proto.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    ConnectionLost,
    RequestFailed,
)


def jobs(*times, cancel_after=None, texts=0):
    shape = Shape(Lengths(3, 3), Lengths(2, 2), texts=texts)
    found = random_jobs(shape, times, 1)
    return [Job(job.at, job.prompt, job.output, cancel_after, texts) for job in found]


class Fake:
    """A target whose ``answer`` coroutine stands for the server."""

    def __init__(self, answer):
        self.answer = answer
        self.running = self.most = self.sent = 0

    async def send(self, job, record):
        self.sent += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.answer(job, record)
        finally:
            self.running -= 1

    async def close(self): ...


def test_an_open_loop_sends_whatever_has_become_of_the_others():
    async def main():
        all_sent = asyncio.Event()

        async def answer(job, record):
            if fake.running == 50:
                all_sent.set()
            await all_sent.wait()

        fake = Fake(answer)
        return await Runner(fake).open_loop(jobs(*[0.0] * 50))

    assert [one.outcome for one in asyncio.run(main())] == [OK] * 50


def test_latency_counts_from_the_scheduled_time(monkeypatch):
    """A stall of server or generator delays what comes later, and shows in its latency."""
    now = [100.0]

    async def sleep(seconds):
        now[0] += seconds

    async def answer(job, record):
        now[0] += 5.0  # stalls everything, the generator as well
        record.stamp(now[0], 1)

    async def main():
        runner = Runner(Fake(answer), clock=lambda: now[0])
        records = []
        for job in jobs(0.0, 1.0, 2.0):  # one after the other: each finds the last one's stall
            records.append(await runner._send(job, 100.0 + job.at))
        return records

    monkeypatch.setattr("baton.loadgen.run.asyncio.sleep", sleep)
    records = asyncio.run(main())
    assert [one.arrived for one in records] == [100.0, 101.0, 102.0]
    assert [one.ttft for one in records] == [5.0, 9.0, 13.0]
    assert [one.sent - one.arrived for one in records] == [0.0, 4.0, 8.0]


def test_a_closed_loop_keeps_so_many_running():
    async def main():
        async def answer(job, record):
            await asyncio.sleep(0)

        fake = Fake(answer)
        records = await Runner(fake).closed_loop(jobs(*[None] * 20), 4)
        return fake, records

    fake, records = asyncio.run(main())
    assert (fake.most, fake.sent, len(records)) == (4, 20, 20)


def test_duration_bounds_the_jobs():
    assert [job.at for job in until(jobs(0.0, 1.0, 2.0), 1.5)] == [0.0, 1.0]
    assert len(list(until(jobs(0.0, 1.0), None))) == 2

    async def main():
        now = [0.0]

        async def answer(job, record):
            now[0] += 1.0

        return await Runner(Fake(answer), clock=lambda: now[0]).closed_loop(
            random_jobs(Shape(Lengths(3, 3), Lengths(2, 2)), [None] * 99, 1), 1, duration=4.5
        )

    assert len(asyncio.run(main())) == 5


def test_outcomes():
    async def main(error=None, cancel_after=None, limit=60.0):
        async def answer(job, record):
            if error is not None:
                raise error
            await asyncio.Event().wait()

        runner = Runner(Fake(answer), limit=limit)
        return (await runner.open_loop(jobs(0.0, cancel_after=cancel_after)))[0]

    def outcome(**options):
        record = asyncio.run(main(**options))
        return record.outcome, record.error

    full = CapacityError("full; retry in 1 s", retry_after=1.0)
    assert outcome(error=full) == (REFUSED, "full")
    assert outcome(error=RequestFailed("broken")) == (FAILED, "broken")
    assert outcome(error=ConnectionResetError("gone")) == (FAILED, "gone")
    assert outcome(cancel_after=0.01) == (CANCELLED, "")
    assert outcome(limit=0.01) == (FAILED, "no end within 0.01 s")
    with pytest.raises(ZeroDivisionError):  # a fault of ours
        outcome(error=ZeroDivisionError())


# --------------------------------------------------------------------------- a lost server


class Dying:
    """A server that is away from ``dies`` to ``back``; ``now``: the time, which answers take."""

    def __init__(self, dies, back=math.inf):
        self.now, self.dies, self.back = 0.0, dies, back
        self.runner = Runner(Fake(self.answer), clock=lambda: self.now)

    async def answer(self, job, record):
        if self.dies <= self.now < self.back:
            self.now += 4.0
            raise ConnectionLost("no answer")
        self.now += 1.0

    def outcomes(self, number):
        records = asyncio.run(self.runner.closed_loop(jobs(*[None] * number), 1))
        return [one.outcome for one in records]


def test_a_lost_server_ends_the_run():
    server = Dying(3.0)
    assert server.outcomes(4000) == [OK] * 3 + [FAILED] * 4
    assert server.runner.is_lost


def test_a_server_that_comes_back_in_time_is_not_lost():
    server = Dying(3.0, back=3.0 + LOST_S - 2.5)
    assert server.outcomes(8) == [OK] * 3 + [FAILED] * 2 + [OK] * 3
    server.dies, server.back = server.now, server.now + LOST_S - 2.5
    assert server.outcomes(5) == [FAILED] * 2 + [OK] * 3
    server.now += 1000.0  # without a request: an outage begins with the first that fails
    server.dies = server.now
    server.back = server.now + 4.0
    assert server.outcomes(3) == [FAILED] + [OK] * 2
    assert not server.runner.is_lost


def test_a_server_that_streams_is_not_lost_by_connections_that_fail():
    """As one does whose queue of connections is full."""

    async def main():
        now, streams = [0.0], []

        async def answer(job, record):
            if not streams:
                streams.append(record)
                await asyncio.Event().wait()
            now[0] += 4.0
            streams[0].stamp(now[0], 1)
            raise ConnectionLost("no answer")

        runner = Runner(Fake(answer), clock=lambda: now[0], limit=0.5)
        return runner, await runner.open_loop(jobs(*[0.0] * 20))

    runner, records = asyncio.run(main())
    assert not runner.is_lost and len(records) == 20
    assert (records[0].tokens, records[0].error) == (19, "no end within 0.5 s")


def test_a_lost_server_ends_what_runs_and_an_open_loop():
    async def main():
        now = [0.0]

        async def answer(job, record):
            record.stamp(now[0], 1)
            if fake.sent > 1:
                now[0] += LOST_S
                raise OSError("refused")
            await asyncio.Event().wait()

        fake = Fake(answer)
        runner = Runner(fake, clock=lambda: now[0])
        return runner, await runner.open_loop(jobs(0.0, 0.0, 0.0, 1e6))

    runner, (first, second, third) = asyncio.run(main())
    assert runner.is_lost
    assert (first.outcome, first.tokens, first.error) == (FAILED, 1, "the server was lost")
    assert [(one.outcome, one.error) for one in (second, third)] == [(FAILED, "refused")] * 2


def test_a_server_is_not_lost_because_a_long_request_failed():
    """A gateway that restarts ends requests which may have waited for their first token."""
    now = [0.0]

    async def answer(job, record):
        now[0] += 2 * LOST_S if fake.sent == 1 else 0.5
        if fake.sent < 3:
            raise OSError("refused")

    fake = Fake(answer)
    runner = Runner(fake, clock=lambda: now[0])
    records = asyncio.run(runner.closed_loop(jobs(*[None] * 4), 1))
    assert [one.outcome for one in records] == [FAILED] * 2 + [OK] * 2
    assert not runner.is_lost


def test_a_connection_that_times_out_is_not_the_time_limit():
    """Both are a TimeoutError."""
    now = [0.0]

    async def answer(job, record):
        now[0] += LOST_S
        raise TimeoutError(110, "Connection timed out")

    runner = Runner(Fake(answer), clock=lambda: now[0])
    records = asyncio.run(runner.closed_loop(jobs(*[None] * 9, cancel_after=5.0), 1))
    assert [one.outcome for one in records] == [FAILED] * 2
    assert "Connection timed out" in records[0].error and runner.is_lost


# --------------------------------------------------------------------------- HTTP


def event(**content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunked(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {
    "prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2},
}  # fmt: skip
STREAM = (
    event(choices=[{"text": "", "index": 0}])  # of the role: no token yet
    + event(choices=[{"text": "a"}])
    + event(choices=[{"delta": {"content": "b"}}])
    + event(choices=[{"delta": {"reasoning_content": "c"}}])
    + event(choices=[], usage=USAGE)
    + b"data: [DONE]\n\n"
)


def answers(*responses, endpoint="completions", texts=0):
    """Serve these responses, one per request; returns (records, requests, connections)."""

    async def main():
        requests, connections = [], []

        async def serve(reader, writer):
            connections.append(writer)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while responses_left:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    requests.append((head, await reader.readexactly(length)))
                    for part in responses_left.pop(0):
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0)
                    if b"connection: close" in head.lower():
                        break
            writer.close()

        responses_left = list(responses)
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server_url = Server.parse(f"http://127.0.0.1:{port}/v1", "secret")
        target = HttpTarget(server_url, endpoint=endpoint, model="m")
        runner = Runner(target, limit=30.0)
        found = [(await runner.open_loop(jobs(0.0, texts=texts)))[0] for _ in responses]
        await target.close()
        server.close()
        return found, requests, connections

    return asyncio.run(main())


def test_a_stream_in_odd_pieces_over_one_connection():
    whole = HEAD + chunked(STREAM[:30], STREAM[30:101], STREAM[101:])
    pieces = [whole[at : at + 17] for at in range(0, len(whole), 17)]
    records, requests, connections = answers([whole], pieces)
    for record in records:
        assert (record.outcome, record.error) == (OK, "")
        assert (len(record.stamps), record.tokens) == (3, 5)
        assert (record.prompt_tokens, record.cached_tokens) == (7, 2)
    assert len(connections) == 1
    head, body = requests[0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in head
    sent = json.loads(body)
    assert (sent["model"], sent["stream"], sent["max_tokens"], sent["ignore_eos"]) == (
        "m", True, 2, True,
    )  # fmt: skip
    assert len(sent["prompt"]) == 3


@pytest.mark.parametrize(
    ("response", "outcome", "error"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nfull", REFUSED, "status 429: full"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", REFUSED, "status 503: "),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno", FAILED, "status 400: no"),
        (b"nonsense\r\n\r\n", FAILED, "the answer is not HTTP"),
        (HEAD + chunked(event(error={"message": "broken"})), FAILED, '{"message":"broken"}'),
        (HEAD + chunked(b"data: {\n\n"), FAILED, "an event is no JSON"),
        (HEAD + chunked(b"data: [DONE]\n\n"), FAILED, "the stream had no token"),
    ],
)
def test_refusals_and_faults_of_a_server(response, outcome, error):
    ((record,), _, _) = answers([response])
    assert record.outcome == outcome and record.error.startswith(error)


def test_embeddings_over_one_connection_are_whole_answers():
    entry = {"embedding": "A" * 100_000, "index": 0, "object": "embedding"}

    def response(count):
        body = json.dumps({"data": [entry] * count, "usage": {"prompt_tokens": 7}}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
    whole = response(60)  # longer than any event of a stream
    pieces = [whole[at : at + 100_001] for at in range(0, len(whole), 100_001)]
    records, requests, connections = answers(
        pieces, [response(60)], [response(59)], [broken], endpoint="embeddings", texts=60
    )
    assert [(one.outcome, one.error) for one in records] == [
        (OK, ""),
        (OK, ""),
        (FAILED, "the answer has 59 embeddings of 60 texts"),
        (FAILED, records[3].error),
    ]
    assert records[3].error.startswith("the answer is no JSON of embeddings")
    first = records[0]
    assert (first.texts, first.prompt_tokens, first.tokens, len(first.stamps)) == (60, 7, 0, 1)
    assert len(connections) == 2  # a faulty answer ends its connection
    head, body = requests[0]
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\n")
    sent = json.loads(body)
    assert set(sent) == {"model", "input", "encoding_format"}
    assert [len(text) for text in sent["input"]] == [3] * 60


def test_an_answer_of_any_status_is_kept_up_to_a_limit():
    size = MAX_EVENT_BYTES + (1 << 20)
    head = b"HTTP/1.1 500 Broken\r\nContent-Length: %d\r\n\r\n" % size
    ((record,), _, _) = answers([head, *[b"x" * (1 << 16)] * (size >> 16)])
    assert (record.outcome, record.error) == (FAILED, "the answer is too long")


def test_chat_sends_words():
    target = HttpTarget(Server.parse("http://h"), endpoint="chat", model="m", ignore_eos=False)
    route, body = target._request(jobs(0.0)[0])
    sent = json.loads(body)
    assert route == "/chat/completions" and "ignore_eos" not in sent
    assert len(sent["messages"][0]["content"].split()) == 3
    assert sent["max_completion_tokens"] == 2


def test_urls():
    assert Server.parse("http://h:81/x/v1/") == Server("h", 81, "/x/v1", tls=False)
    assert Server.parse("https://h") == Server("h", 443, "/v1", tls=True)
    for wrong in ("ftp://h", "http://", "http://h:x", "http://h:99999"):
        with pytest.raises(ConfigError):
            Server.parse(wrong)


def test_nobody_listens():
    async def main():
        target = HttpTarget(Server("127.0.0.1", 1, "/v1", tls=False), model="m")
        await target.send(jobs(0.0)[0], Record(0.0))

    with pytest.raises(BatonError, match="cannot connect to 127"):
        asyncio.run(main())
