"""The router alone: a real router process between synthetic clients and workers over ipc.

The clients and workers here speak the protocol but compute nothing, and only the router's
own CPU time is counted (``/proc/PID/stat``, its I/O thread included). Beside it ``zmq.proxy``
passes the same bytes on without decoding them: the floor of any router on ZeroMQ.

    python -m baton.benchmarks.router [--seconds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq

from ..proto.arrays import Frame
from ..proto.codec import EnvelopeDecoder, EnvelopeEncoder
from ..proto.layout import KVLayout, ModelCard
from ..proto.limits import PROTOCOL_VERSION
from ..proto.messages import (
    Accepted,
    Assign,
    FinalAck,
    HandoffReport,
    Heartbeat,
    Hello,
    Message,
    RouterToClient,
    RouterToWorker,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)
from ..proto.wire import WireContext, WireSampling
from ..router.config import AdmissionConfig, RouterConfig
from ..runtime.config import dump
from .scratch import scratch_folder

BARS = {"requests/CPU-s": 25_000, "tokens/CPU-s, 16 runs": 400_000, "added p50 us": 300}
PROMPT = 32
CLIENTS, WINDOW = 4, 64
STREAMS = 16
CARD = ModelCard(
    name="none",
    architecture="none",
    fingerprint="none",
    numerics="none",
    vocab_size=32_000,
    max_length=1 << 20,
    eos_token_ids=[2],
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16),
)
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Link:
    """One connection of a synthetic peer."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: object, name: str
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._decoder = EnvelopeDecoder[Message](union)
        self._encoder = EnvelopeEncoder()
        self.out: list[Message] = []

    def read(self) -> list[Message]:
        """All messages that have arrived."""
        messages: list[Message] = []
        while True:
            try:
                messages += self._decoder.decode(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def read_one(self) -> list[Message]:
        """Messages of the next envelope."""
        return self._decoder.decode(self.socket.recv_multipart())

    def flush(self) -> None:
        """Send what is to be said as one envelope."""
        if self.out:
            self.socket.send_multipart(self._encoder.encode(self.out))
            self.out = []


class Cluster:
    """Synthetic clients, two prefill and two decode workers around one router."""

    def __init__(self, clients_at: str, workers_at: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients = [
            Link(self.context, clients_at, RouterToClient, f"client-{i}") for i in range(CLIENTS)
        ]
        self.prefills = [self._worker(workers_at, "prefill", i) for i in range(2)]
        self.decodes = {f"ipc:///decode-{i}": self._worker(workers_at, "decode", i) for i in (0, 1)}
        self.poller = zmq.Poller()
        for link in self.links:
            self.poller.register(link.socket, zmq.POLLIN)
        self._beat_at = 0.0
        self.flush()

    @property
    def links(self) -> list[Link]:
        """Every connection of the synthetic peers."""
        return [*self.clients, *self.prefills, *self.decodes.values()]

    def flush(self) -> None:
        """Send what everyone has to say."""
        for link in self.links:
            link.flush()

    def beat(self) -> None:
        """Heartbeats of all workers when they are due."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + 0.2
        for number, link in enumerate([*self.prefills, *self.decodes.values()]):
            link.out.append(Heartbeat(incarnation=number + 1, progress=0))
            link.flush()

    def turn(self, timeout_ms: int = 100) -> None:
        """Wait for something to read."""
        self.beat()
        self.poller.poll(timeout_ms)

    def close(self) -> None:
        """Disconnect everyone."""
        for link in self.links:
            link.socket.close()
        self.context.term()

    def _worker(self, address: str, role: str, number: int) -> Link:
        link = Link(self.context, address, RouterToWorker, f"{role}-{number}")
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=f"{role}-{number}",
            role=role,
            incarnation=number + 1 + 2 * (role == "decode"),
            pid=os.getpid(),
            endpoint=f"ipc:///{role}-{number}",
            model=CARD,
        )
        link.out.append(hello)
        return link


def new_submit(number: int, new: int) -> Submit:
    tokens = np.arange(number, number + PROMPT, dtype=np.int32) % CARD.vocab_size
    sampling = WireSampling(temperature=0.8, top_p=0.95, max_new_tokens=new, seed=number)
    context = WireContext(
        tokens=tokens, max_length=PROMPT + new, sampling=sampling, eos_token_ids=[2]
    )
    return Submit(request_id=str(number), context=context)


# ---------------------------------------------------------------------------------- requests


def answer_assign(cluster: Cluster, prefill: Link, assign: Assign) -> None:
    """A whole handoff in no time: first token, report, second token and the end."""
    key = assign.request
    first = TokenRun(key, assign.attempt, PROMPT, [11])
    prefill.out += [
        Accepted(request=key, attempt=assign.attempt),
        Tokens(runs=[first]),
        HandoffReport(
            request=key, attempt=assign.attempt, prefill="p", decode="d", transport="zmq",
            bytes_sent=1, bytes_received=1, blocks=2, cached_tokens=0,
        ),
    ]  # fmt: skip
    decode = cluster.decodes[assign.decode]
    runs = [first, TokenRun(key, assign.attempt, PROMPT + 1, [12])]
    end = Terminal(
        request=key, attempt=assign.attempt, position=PROMPT + 2, status="maximum_length"
    )
    decode.out += [Tokens(runs=runs), end]


def pump_requests(cluster: Cluster, next_submit: Callable[[], Submit]) -> int:
    """One turn: answer everything that came; returns how many requests ended."""
    ended = 0
    cluster.turn()
    for prefill in cluster.prefills:
        for message in prefill.read():
            if type(message) is Assign:
                answer_assign(cluster, prefill, message)
    for decode in cluster.decodes.values():
        decode.read()
    for client in cluster.clients:
        done = [m.request for m in client.read() if type(m) is Terminal]
        if done:
            ended += len(done)
            client.out.append(FinalAck(requests=done))
            client.out += [next_submit() for _ in done]
    # First what prefill says, as in a real handoff.
    cluster.flush()
    return ended


def measure_requests(cluster: Cluster, pid: int, seconds: float) -> float:
    """Requests per CPU-second of the router, over whole lives from Submit to FinalAck."""
    numbers = iter(range(10_000_000))
    submits = [new_submit(i, 2) for i in range(20_000)]

    def next_submit() -> Submit:
        number = next(numbers)
        context = submits[number % len(submits)].context
        return Submit(request_id=str(number), context=context)

    for client in cluster.clients:
        client.out += [next_submit() for _ in range(WINDOW)]
    cluster.flush()
    warm = time.monotonic() + 0.5
    while time.monotonic() < warm:
        pump_requests(cluster, next_submit)
    ended, cpu, end = 0, cpu_seconds(pid), time.monotonic() + seconds
    while time.monotonic() < end:
        ended += pump_requests(cluster, next_submit)
    rate = ended / (cpu_seconds(pid) - cpu)
    settle(cluster)
    return rate


def settle(cluster: Cluster) -> None:
    """Let every request end."""
    idle = 0
    while idle < 5:
        cluster.turn(50)
        idle += 1
        for prefill in cluster.prefills:
            for message in prefill.read():
                if type(message) is Assign:
                    answer_assign(cluster, prefill, message)
                    idle = 0
        for link in cluster.decodes.values():
            link.read()
        for client in cluster.clients:
            done = [m.request for m in client.read() if type(m) is Terminal]
            if done:
                client.out.append(FinalAck(requests=done))
                idle = 0
        cluster.flush()


# ---------------------------------------------------------------------------------- tokens


def open_streams(cluster: Cluster, tag: str) -> tuple[Link, Link, list[bytes]]:
    """Requests of one client that all decode on one worker."""
    client = cluster.clients[0]
    target, decode = next(iter(cluster.decodes.items()))
    for i in range(STREAMS):
        submit = new_submit(i, 900_000)
        context = WireContext(
            tokens=submit.context.tokens,
            max_length=CARD.max_length,
            eos_token_ids=[2],
            target_endpoint=target,
        )
        client.out.append(Submit(request_id=f"{tag}{i}", context=context))
    cluster.flush()
    keys: list[bytes] = []
    while len(keys) < STREAMS:
        cluster.turn()
        keys += [m.request for m in client.read() if type(m) is Submitted]
        for prefill in cluster.prefills:
            for message in prefill.read():
                if type(message) is Assign:
                    prefill.out.append(Accepted(request=message.request, attempt=message.attempt))
        cluster.flush()
    return client, decode, keys


def measure_tokens(cluster: Cluster, pid: int, seconds: float, runs_per_message: int) -> float:
    """Relayed tokens per CPU-second; each step of the decode worker is one message."""
    client, decode, keys = open_streams(cluster, f"t{runs_per_message}-")
    positions = dict.fromkeys(keys, PROMPT)
    turn = sent = received = 0
    cpu, start, began = cpu_seconds(pid), 0, time.monotonic()
    end = began + seconds + 0.3
    while time.monotonic() < end:
        if not start and time.monotonic() > began + 0.3:
            cpu, start = cpu_seconds(pid), received
        while sent - received < 64 * runs_per_message:
            runs = []
            for _ in range(runs_per_message):
                key = keys[turn % STREAMS]
                runs.append(TokenRun(key, 1, positions[key], [turn % 30_000]))
                positions[key] += 1
                turn += 1
            decode.out.append(Tokens(runs=runs))
            decode.flush()
            sent += runs_per_message
        cluster.turn(10)
        received += sum(len(m.runs) for m in client.read() if type(m) is Tokens)
        for link in (*cluster.prefills, *cluster.decodes.values()):
            link.read()
    rate = (received - start) / (cpu_seconds(pid) - cpu)
    for key in keys:
        decode.out.append(
            Terminal(request=key, attempt=1, position=positions[key], status="maximum_length")
        )
    decode.flush()
    settle(cluster)
    return rate


# ---------------------------------------------------------------------------------- latency


def measure_latency(cluster: Cluster, rounds: int) -> list[float]:
    """Seconds from Submit to Terminal of a lone request that the prefill worker ends at once."""
    client = cluster.clients[0]
    links = {link.socket: link for link in (client, *cluster.prefills)}
    poller = zmq.Poller()
    for socket in links:
        poller.register(socket, zmq.POLLIN)
    times = []
    for i in range(rounds):
        cluster.beat()
        submit = Submit(request_id=f"l{i}", context=new_submit(i, 1).context)
        start = time.perf_counter()
        client.out.append(submit)
        client.flush()
        key = None
        while key is None:
            for socket, _ in poller.poll():
                key = _answer_lone(links[socket], client) or key
        times.append(time.perf_counter() - start)
        client.out.append(FinalAck(requests=[key]))
        client.flush()
    return times


def _answer_lone(link: Link, client: Link) -> bytes | None:
    """Play the peer that has a message; the key of the request when it ended."""
    for message in link.read_one():
        if type(message) is Assign:
            link.out += _short_life(message.request, message.attempt)
            link.flush()
        elif link is client and type(message) is Terminal:
            return message.request
    return None


def _short_life(key: bytes, attempt: int) -> list[Message]:
    """What a prefill worker says of a request that its first token ends."""
    return [
        Accepted(request=key, attempt=attempt),
        Tokens(runs=[TokenRun(key, attempt, PROMPT, [2])]),
        Terminal(request=key, attempt=attempt, position=PROMPT + 1, status="end_of_sequence"),
    ]


def measure_direct(address: str, context: zmq.Context[zmq.Socket[bytes]], rounds: int) -> float:
    """Median seconds of the same exchange with nothing between, or only a proxy."""
    encoder = EnvelopeEncoder()
    client = Link(context, f"{address}-front", RouterToClient, "direct-client")
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.LINGER, 0)
    worker.connect(f"{address}-back")
    poller = zmq.Poller()
    poller.register(client.socket, zmq.POLLIN)
    poller.register(worker, zmq.POLLIN)
    decoder = EnvelopeDecoder[Message](Submit)
    times = []
    for i in range(rounds):
        start = time.perf_counter()
        client.out.append(new_submit(i, 1))
        client.flush()
        ended = False
        while not ended:
            for socket, _ in poller.poll():
                if socket is worker:
                    identity, *frames = worker.recv_multipart()
                    decoder.decode(frames)
                    life = _short_life(bytes(16), 1)[1:]
                    worker.send_multipart([identity, *encoder.encode(life)])
                else:
                    ended = any(type(m) is Terminal for m in client.read())
        times.append(time.perf_counter() - start)
    client.socket.close()
    worker.close()
    return statistics.median(times)


# ---------------------------------------------------------------------------------- proxy


def serve_proxy(address: str) -> None:
    """``zmq.proxy`` between ``address-front`` (ROUTER) and ``address-back`` (DEALER)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    front.bind(f"{address}-front")
    back.bind(f"{address}-back")
    zmq.proxy(front, back)


def measure_proxy(address: str, pid: int, seconds: float, up: Frame, down: Frame) -> float:
    """Exchanges per CPU-second of the proxy: one message up, one down, many in flight."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client, worker = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for socket, end in ((client, "front"), (worker, "back")):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"{address}-{end}")
    poller = zmq.Poller()
    poller.register(client, zmq.POLLIN)
    poller.register(worker, zmq.POLLIN)
    for _ in range(256):
        client.send(up)
    done, cpu, end_at = 0, cpu_seconds(pid), time.monotonic() + seconds
    while time.monotonic() < end_at:
        for socket, _ in poller.poll(100):
            try:
                for _ in range(64):
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                    if socket is worker:
                        worker.send_multipart([frames[0], down])
                    else:
                        done += 1
                        client.send(up)
            except zmq.Again:
                continue
    rate = done / (cpu_seconds(pid) - cpu)
    client.close()
    worker.close()
    context.term()
    return rate


# ---------------------------------------------------------------------------------- main


@contextmanager
def child(arguments: list[str]) -> Iterator[int]:
    """A process of this interpreter; yields its pid, ends it."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def report(name: str, value: float, peer: float | None = None, bar: float | None = None) -> None:
    line = f"{name:<28}{value:>12,.0f}"
    line += f"   proxy {peer:>12,.0f}" if peer is not None else " " * 22
    print(line + (f"   bar {bar:>9,.0f}" if bar is not None else ""))


def proxy_figures(folder: str, seconds: float, rounds: int) -> dict[str, float]:
    """The peer's figures for the same bytes."""
    encode = EnvelopeEncoder().encode
    address = f"ipc://{folder}/proxy"
    key = bytes(16)
    submit = encode([new_submit(1, 2)])[0]
    runs = [TokenRun(key, 1, PROMPT, [11]) for _ in range(STREAMS)]
    one, many = encode([Tokens(runs=runs[:1])])[0], encode([Tokens(runs=runs)])[0]
    with child(["baton.benchmarks.router", "--proxy", address]) as pid:
        time.sleep(0.5)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        p50 = measure_direct(address, context, rounds)
        context.term()
        # A token message goes one way; its exchange here has a tiny message the other way.
        return {
            "p50": p50,
            "requests": measure_proxy(address, pid, seconds, submit, one),
            "one": measure_proxy(address, pid, seconds, b"", one),
            "many": STREAMS * measure_proxy(address, pid, seconds, b"", many),
        }


def direct_p50(folder: str, rounds: int) -> float:
    """The same lone exchange over one ipc connection: what a router adds to."""
    address = f"ipc://{folder}/direct"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = Link(context, address, RouterToClient, "direct-client")
    worker = context.socket(zmq.ROUTER)
    worker.setsockopt(zmq.LINGER, 0)
    worker.bind(address)
    encoder, decoder = EnvelopeEncoder(), EnvelopeDecoder[Message](Submit)
    times = []
    for i in range(rounds):
        start = time.perf_counter()
        client.out.append(new_submit(i, 1))
        client.flush()
        identity, *frames = worker.recv_multipart()
        decoder.decode(frames)
        worker.send_multipart([identity, *encoder.encode(_short_life(bytes(16), 1)[1:])])
        client.socket.poll()
        client.read()
        times.append(time.perf_counter() - start)
    client.socket.close()
    worker.close()
    context.term()
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--proxy", default="")
    options = parser.parse_args(arguments)
    if options.proxy:
        serve_proxy(options.proxy)
        return
    rounds = int(500 * options.seconds)
    with scratch_folder() as folder:
        config = RouterConfig(
            client_address=f"ipc://{folder}/clients",
            worker_address=f"ipc://{folder}/workers",
            cluster_key="ab" * 32,
            admission=AdmissionConfig(max_context_bytes=4 << 30),
        )
        path = folder / "router.json"
        path.write_text(dump(config))
        with child(["baton.router", "--config", str(path)]) as pid:
            cluster = Cluster(config.client_address, config.worker_address)
            requests = measure_requests(cluster, pid, options.seconds)
            one = measure_tokens(cluster, pid, options.seconds, 1)
            many = measure_tokens(cluster, pid, options.seconds, STREAMS)
            p50 = statistics.median(measure_latency(cluster, rounds))
            cluster.close()
        direct = direct_p50(str(folder), rounds)
        proxy = proxy_figures(str(folder), options.seconds / 2, rounds)
    report("requests/CPU-s", requests, proxy["requests"], BARS["requests/CPU-s"])
    report("tokens/CPU-s, 1 run", one, proxy["one"])
    report("tokens/CPU-s, 16 runs", many, proxy["many"], BARS["tokens/CPU-s, 16 runs"])
    report("lone request, p50 us", p50 * 1e6, proxy["p50"] * 1e6)
    report(
        "added p50 us", (p50 - direct) * 1e6, (proxy["p50"] - direct) * 1e6, BARS["added p50 us"]
    )


if __name__ == "__main__":
    main()
