"""The router alone: a real router process between synthetic clients and workers over ipc.

The clients and workers here speak the protocol but compute nothing, and only the router's
own CPU time is counted (``/proc/PID/stat``, its I/O thread included). Beside it ``zmq.proxy``
passes the same bytes on without decoding them: the floor of any router on ZeroMQ. The benchmark
``lone`` measures a single request.

    python -m baton.benchmarks.router [--seconds 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import zmq

from baton.proto.wire.arrays import Frame
from baton.proto.wire.envelope import EnvelopeEncoder
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Assign,
    FinalAck,
    HandoffReport,
    Heartbeat,
    RouterToClient,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)
from baton.proto.wire.wire_context import WireContext

from .scratch import scratch_folder
from .synthetic import (
    CARD,
    PROMPT,
    Link,
    child,
    cpu_seconds,
    new_submit,
    router_in,
    serve_proxy,
    worker_link,
)

BARS = {"requests/CPU-s": 25_000, "220 KB prompts/CPU-s": 1_000, "tokens/CPU-s, 16 runs": 400_000}
CLIENTS, WINDOW = 4, 64
STREAMS = 16
LEAST_REQUESTS = 5_000
"""Requests of a measurement, however long they take beside other processes of the machine."""
LONG_PROMPT = 55_000  # tokens, of four bytes each
NextSubmit = Callable[[], Submit]


class Cluster:
    """Synthetic clients, two prefill and two decode workers around one router."""

    def __init__(self, clients_at: str, workers_at: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients = [
            Link(self.context, clients_at, RouterToClient, f"client-{i}") for i in range(CLIENTS)
        ]
        self.prefills = [worker_link(self.context, workers_at, "prefill", i) for i in range(2)]
        self.decodes = {
            f"ipc:///decode-{i}": worker_link(self.context, workers_at, "decode", i) for i in (0, 1)
        }
        self.poller = zmq.Poller()
        for link in self.links:
            self.poller.register(link.socket, zmq.POLLIN)
        self._beat_at = 0.0
        self.prompt = PROMPT  # tokens of each prompt
        self.flush()

    @property
    def links(self) -> list[Link]:
        """Every connection of the synthetic peers."""
        return [*self.clients, *self.prefills, *self.decodes.values()]

    def flush(self) -> None:
        """Send the pending messages of all workers."""
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


# ---------------------------------------------------------------------------------- requests


def serve_prefills(cluster: Cluster) -> bool:
    """Answer what the prefill workers received; returns whether a request was among it."""
    any_request = False
    for number, prefill in enumerate(cluster.prefills):
        for message in prefill.read():
            if type(message) is Assign:
                answer_assign(cluster, number, message)
                any_request = True
            elif type(message) is Abort:
                prefill.out.append(Aborted(request=message.request, attempt=message.attempt))
    return any_request


def serve_decodes(cluster: Cluster) -> None:
    """Answer what the decode workers received."""
    for decode in cluster.decodes.values():
        for message in decode.read():
            if type(message) is Abort:
                decode.out.append(Aborted(request=message.request, attempt=message.attempt))


def answer_assign(cluster: Cluster, number: int, assign: Assign) -> None:
    """A whole handoff in no time: first token, report, second token and the end."""
    key = assign.request
    first = TokenRun(key, assign.attempt, cluster.prompt, [11])
    cluster.prefills[number].out += [
        Accepted(request=key, attempt=assign.attempt),
        Tokens(runs=[first]),
        HandoffReport(
            request=key, attempt=assign.attempt, prefill=f"prefill-{number}",
            decode=assign.decode.removeprefix("ipc:///"), transport="zmq",
            bytes_sent=1, bytes_received=1, blocks=2, cached_tokens=0,
        ),
    ]  # fmt: skip
    decode = cluster.decodes[assign.decode]
    runs = [first, TokenRun(key, assign.attempt, cluster.prompt + 1, [12])]
    end = Terminal(
        request=key, attempt=assign.attempt, position=cluster.prompt + 2, status="maximum_length"
    )
    decode.out += [Tokens(runs=runs), end]


def pump_requests(cluster: Cluster, next_submit: NextSubmit) -> int:
    """One turn: answer everything that came; returns how many requests ended."""
    ended = 0
    cluster.turn()
    serve_prefills(cluster)
    serve_decodes(cluster)
    for client in cluster.clients:
        done = [m.request for m in client.read() if type(m) is Terminal]
        if done:
            ended += len(done)
            client.out.append(FinalAck(requests=done))
            client.out += [next_submit() for _ in done]
    # First the messages of prefill, as in a real handoff.
    cluster.flush()
    return ended


def measure_requests(
    cluster: Cluster, pid: int, seconds: float, *, prompt: int = PROMPT, least: int = LEAST_REQUESTS
) -> float:
    """Requests per CPU-second of the router, over whole lives from Submit to FinalAck."""
    numbers = iter(range(10_000_000))
    cluster.prompt = prompt
    submits = [new_submit(i, 2, prompt) for i in range(min(20_000, 20_000_000 // prompt))]

    def next_submit() -> Submit:
        number = next(numbers)
        context = submits[number % len(submits)].context
        return Submit(request_id=f"{prompt}-{number}", context=context)

    for client in cluster.clients:
        client.out += [next_submit() for _ in range(WINDOW if prompt == PROMPT else 4)]
    cluster.flush()
    while not pump_requests(cluster, next_submit):
        pass  # on a busy machine the router starts for seconds: that is no time of a request
    warm = time.monotonic() + 0.5
    while time.monotonic() < warm:
        pump_requests(cluster, next_submit)
    ended, cpu, end = 0, cpu_seconds(pid), time.monotonic() + seconds
    while time.monotonic() < end or ended < least:
        ended += pump_requests(cluster, next_submit)
    rate = ended / (cpu_seconds(pid) - cpu)
    settle(cluster)
    cluster.prompt = PROMPT
    return rate


def settle(cluster: Cluster) -> None:
    """Let every request end."""
    idle = 0
    while idle < 5:
        cluster.turn(50)
        idle = 0 if serve_prefills(cluster) else idle + 1
        serve_decodes(cluster)
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


# ---------------------------------------------------------------------------------- proxy


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
    poller.poll(60_000)  # until the proxy runs
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


def figures(seconds: float) -> dict[str, float]:
    """Return requests and tokens per CPU-second of a router."""
    with scratch_folder() as folder:
        config, router = router_in(folder)
        with child(router) as pid:
            cluster = Cluster(config.client_address, config.worker_address)
            found = {
                "requests/CPU-s": measure_requests(cluster, pid, seconds),
                "220 KB prompts/CPU-s": measure_requests(
                    cluster, pid, seconds, prompt=LONG_PROMPT, least=500
                ),
                "tokens/CPU-s, 1 run": measure_tokens(cluster, pid, seconds, 1),
                f"tokens/CPU-s, {STREAMS} runs": measure_tokens(cluster, pid, seconds, STREAMS),
            }
            cluster.close()
    return found


def report(name: str, value: float, peer: float | None, bar: float | None) -> None:
    beside = "-" if peer is None else f"{peer:,.0f}"
    line = f"{name:<28}{value:>12,.0f}   proxy {beside:>12}"
    print(line + (f"   bar {bar:>9,.0f}" if bar is not None else ""))


def proxy_figures(folder: str, seconds: float) -> dict[str, float]:
    """The peer's figures for the same bytes."""
    encode = EnvelopeEncoder().encode
    address = f"ipc://{folder}/proxy"
    key = bytes(16)
    submit = encode([new_submit(1, 2)])[0]
    runs = [TokenRun(key, 1, PROMPT, [11]) for _ in range(STREAMS)]
    one, many = encode([Tokens(runs=runs[:1])])[0], encode([Tokens(runs=runs)])[0]
    with child(["baton.benchmarks.router", "--proxy", address]) as pid:
        time.sleep(0.5)
        # A token message goes one way; its exchange here has a tiny message the other way.
        return {
            "requests/CPU-s": measure_proxy(address, pid, seconds, submit, one),
            "tokens/CPU-s, 1 run": measure_proxy(address, pid, seconds, b"", one),
            f"tokens/CPU-s, {STREAMS} runs": STREAMS
            * measure_proxy(address, pid, seconds, b"", many),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--proxy", default="")
    options = parser.parse_args(arguments)
    if options.proxy:
        serve_proxy(options.proxy)
        return
    found = figures(options.seconds)
    with scratch_folder() as folder:
        proxy = proxy_figures(str(folder), options.seconds / 2)
    for name, value in found.items():
        report(name, value, proxy.get(name), BARS.get(name))


if __name__ == "__main__":
    main()
