"""Hostile clients: cancelled streams, readers that do not read, idle and half-closed connections.

The gateway answers others meanwhile, its memory stays bounded, and no worker keeps a block.
"""

import json
import random
import shutil
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from .conftest import wait_until
from .http import Gateway, resident_bytes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
AT_ONCE = 16


@pytest.fixture(scope="module")
def pools(lasting_cluster):
    return lasting_cluster(prefill=1, decode=2)


@pytest.fixture(autouse=True)
def clean(gateway, pools):
    """Afterwards the gateway serves and no worker holds a block or a request."""
    yield
    assert gateway.post(CHAT, messages=MESSAGES, max_tokens=2)["choices"]
    pools.wait_idle()


def raw(gateway, receive_buffer=0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", gateway.port))
    return connection


def request(path, **body) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        len(content),
        content,
    )


def cancel_some(gateway, seed: int, count: int) -> None:
    """Start requests, read a little of their answers, and close or reset the connections."""
    draw = random.Random(seed)
    kinds = (
        (CHAT, {"messages": MESSAGES, **LONG}),
        (CHAT, {"messages": MESSAGES, **LONG, "n": 3}),
        ("/v1/completions", {"prompt": ["Once upon", "a time"], **LONG}),
        ("/v1/responses", {"input": "Who are you?", "max_output_tokens": 1900, "ignore_eos": True}),
    )
    for _ in range(count):
        path, body = draw.choice(kinds)
        with raw(gateway) as connection:
            content = request(path, **body, stream=draw.random() < 0.8)
            if draw.random() < 0.1:
                content = content[: draw.randrange(len(content))]
            connection.sendall(content)
            connection.settimeout(0.3)
            wanted = draw.choice((0, 0, 1, 500, 5000, 50000))
            try:
                while wanted > 0 and (part := connection.recv(wanted)):
                    wanted -= len(part)
            except TimeoutError:
                pass
            if draw.random() < 0.5:  # a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("count", [64, pytest.param(1000, marks=pytest.mark.long)])
def test_requests_cancelled_at_random_points_are_freed(gateway, count):
    before = resident_bytes(gateway)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        work = [
            threads.submit(cancel_some, gateway, seed, count // AT_ONCE) for seed in range(AT_ONCE)
        ]
        for one in work:
            one.result()
    assert resident_bytes(gateway) - before < 64 << 20


def test_readers_that_do_not_read_hold_up_nobody(gateway):
    before = resident_bytes(gateway)
    body = {"messages": MESSAGES, **LONG, "logprobs": True, "top_logprobs": 20, "stream": True}
    with ExitStack() as stack:
        slow = [stack.enter_context(raw(gateway, receive_buffer=4096)) for _ in range(4)]
        for connection in slow:
            connection.sendall(request(CHAT, **body))
        for connection in slow:
            assert connection.recv(16).startswith(b"HTTP/1.1 200")
        for _ in range(5):
            assert gateway.post(CHAT, messages=MESSAGES, max_tokens=4)["choices"]
        assert resident_bytes(gateway) - before < 128 << 20


def test_half_closed_connections_are_ended(gateway):
    for stream in (True, False):
        with raw(gateway) as connection:
            connection.sendall(request(CHAT, messages=MESSAGES, **LONG, stream=stream))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    with raw(gateway) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        )
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)


def test_a_thousand_idle_connections(gateway):
    before = resident_bytes(gateway)
    with ExitStack() as stack:
        idle = [stack.enter_context(raw(gateway)) for _ in range(1000)]
        for connection in idle[::2]:
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert gateway.post(CHAT, messages=MESSAGES, max_tokens=4)["choices"]
        assert resident_bytes(gateway) - before < 64 << 20


def test_bodies_that_never_end_are_bounded_together(gateway):
    """As many bytes as the limit of all unfinished bodies, and one more."""
    with ExitStack() as stack:
        refused = 0
        for _ in range(48):  # of 6 MiB
            connection = stack.enter_context(raw(gateway))
            head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n"
            connection.sendall(head)
            try:
                connection.sendall(b" " * (6 << 20))
            except (BrokenPipeError, ConnectionResetError):
                refused += 1
                continue
            connection.settimeout(0.05)
            try:
                answer = connection.recv(100)
            except TimeoutError:
                continue
            assert answer.split()[1] == b"429", answer
            refused += 1
        assert refused
    wait_until(
        lambda: gateway.ask("POST", "/tokenize", {"prompt": "x"})[0] == 200,
        what="the bytes to be free",
    )


@pytest.mark.skipif(not shutil.which("prlimit"), reason="prlimit sets the limit on open files")
def test_connections_beyond_the_limit_on_open_files_get_503_and_the_others_are_served(
    pools, tmp_path
):
    few = Gateway(pools, tmp_path, files=64).wait_ready()

    def one(_: int) -> bytes:
        with raw(few) as connection:
            connection.sendall(request(CHAT, messages=MESSAGES, max_tokens=100, ignore_eos=True))
            answer = b""
            while b"\r\n\r\n" not in answer:
                part = connection.recv(1 << 16)
                assert part, "the connection ended without an answer"
                answer += part
            return answer

    with ThreadPoolExecutor(200) as threads:
        answers = list(threads.map(one, range(200)))
    served = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200 ")]
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    others = {answer.split(b"\r\n")[0] for answer in answers} - {
        answer.split(b"\r\n")[0] for answer in (*served, *refused)
    }
    assert not others, few.text()
    assert len(served) >= 8
    assert all(b"\r\nretry-after: 1\r\n" in answer for answer in refused)
    assert "Too many open files" not in few.text()
    assert few.end() == 0, few.text()
