"""The HTTP gateway: CPU time per request and per streamed token, time to the first token, memory.

A real router and workers that compute nothing answer, a token per request and step of 2 ms. CPU
time is the time of all threads of the gateway and of the router (``schedstat``), in the cheapest of
several rounds. The helper processes that render the template and tokenize are counted separately.
Requests without tokenization are completions of token ids.

``--peer-python PATH`` adds the routers of vLLM and SGLang if that Python has them, in front of a
server of events that computes nothing. The load comes from the same client. These routers pass on
the server's events without tokenizing or making JSON, so their CPU time per chunk is the cost of
passing on. Dynamo's frontend, which tokenizes, is measured with the workers of ``dynamo.mocker``,
and only with whole answers: few of their random tokens have text, and it sends no event without.

With ``--beside FOLDER`` the gateway and router of another checkout take turns with these, round by
round, since the load of a shared machine changes faster than a whole measurement takes.

    python -m baton.benchmarks.gateway [--seconds 4] [--peer-python PATH]
        [--beside FOLDER [--only 'token, 64']]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

from baton.client import Client
from baton.deploy.config import demo_model_folder
from baton.proto.sampling import SamplingParams

from .scratch import scratch_folder
from .synthetic import child, environment_of, router_in

BARS = {"request": 150.0, "token": 12.0, "first": 600.0, "memory": 129.0}
"""µs of CPU per short request, per streamed token, µs added to the first token, MB resident."""
PROMPT = list(range(300, 332))
MESSAGES = [{"role": "user", "content": "Who are you?"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
ROUNDS = 300
COST_ROUNDS = 4
"""Parts of a measurement, the cheapest of which counts."""
STEP_S = 0.002
"""Seconds between two events that the peers pass on."""
WHOLE_S = 3 * STEP_S
"""Seconds until a whole answer of the peers' server."""
CHUNKS = 1000
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
_TEXT = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" of","logprobs":null,"finish_reason":null}]}'  # noqa: E501
_EVENT = b"data: " + _TEXT + b"\n\n"
PEER_MODULES = {
    "sglang-router": "sglang_router.launch_router",
    "vllm-router": "vllm_router.launch_router",
    "Dynamo": "dynamo.frontend",
}


# --------------------------------------------------------------------------- load over HTTP


@dataclass(slots=True)
class Load:
    """Number of whole answers and of events with a token, and their seconds."""

    requests: int = 0
    events: int = 0
    seconds: float = 0.0


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """Return a request with a JSON body."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class _Asker(asyncio.Protocol):
    """One connection. An answer ends with its chunk of length 0, or with its content length."""

    def __init__(self, request: bytes, load: Load, until: float) -> None:
        self._request = request
        self._load = load
        self._until = until
        self._tail = b""
        self._left = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count events; send the next request after the end of an answer."""
        content = self._tail + data
        if self._left:
            self._left -= len(data)
            if self._left <= 0:
                self._next()
            return
        if content.startswith(b"HTTP/1.1"):
            head, found, body = content.partition(b"\r\n\r\n")
            if not found:
                self._tail = content
                return
            if not head.startswith(b"HTTP/1.1 200"):
                if not self.ended.done():
                    self.ended.set_exception(RuntimeError(repr(content[:500])))
                self._transport.close()
                return
            length = head.lower().partition(b"content-length: ")[2]
            if length:
                self._left = int(length.partition(b"\r\n")[0]) - len(body)
                self._tail = b""
                if self._left <= 0:
                    self._next()
                return
            content = b"\r\n" + body
        # The next part may complete a mark that begins in these bytes.
        self._load.events += content.count(b"\ndata: {")
        if content.endswith(b"\r\n0\r\n\r\n"):
            self._next()
            return
        self._tail = content[-8:]
        self._load.events -= self._tail.count(b"\ndata: {")

    def _next(self) -> None:
        self._tail, self._left = b"", 0
        self._load.requests += 1
        if time.monotonic() < self._until:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, with an error if the server has closed the connection early."""
        if not self.ended.done():
            self.ended.set_result(None)


def run_load(port: int, request: bytes, at_once: int, seconds: float) -> Load:
    """Keep ``at_once`` requests running for some seconds, then finish them."""
    load = Load()

    async def run() -> None:
        loop, until = asyncio.get_running_loop(), time.monotonic() + seconds
        made = [
            await loop.create_connection(lambda: _Asker(request, load, until), "127.0.0.1", port)
            for _ in range(at_once)
        ]
        await asyncio.gather(*(asker.ended for _, asker in made))

    begun = time.monotonic()
    uvloop.run(run())
    load.seconds = time.monotonic() - begun
    return load


# --------------------------------------------------------------------------- processes


def thread_seconds(pid: int) -> float:
    """User and system time of the threads that a process has now, to the nanosecond."""
    total = 0
    for each in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            total += int((each / "schedstat").read_text().split()[0])
    return total / 1e9


def children_of(pid: int) -> list[int]:
    """Pids of a process's children, whichever thread has started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for each in lists for one in each.read_text().split()]


@contextmanager
def gateway_of(
    address: str, scratch: Path, *, own: bool, source: Path | None = None
) -> Iterator[tuple[int, int]]:
    """Run a gateway; yields its pid and port.

    ``own``: it trusts the model's folder. ``source``: folder of the packages, if not this one's.
    """
    port, settings = free_port(), scratch / "gateway.json"
    folder = str(demo_model_folder())
    settings.write_text(
        json.dumps({"routers": [address], "port": port, "model_folder": folder if own else ""})
    )
    command = [sys.executable, "-P", "-m", "baton.gateway", "--config", str(settings)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment_of(source))
    try:
        assert process.stderr is not None
        process.stderr.readline()  # it listens
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def mocked(
    scratch: Path, source: Path | None = None, workers: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Run a router with workers that compute nothing; yields its address and pid.

    ``workers``: their further arguments.
    """
    config, command = router_in(scratch, str(demo_model_folder()))
    arguments = ["baton.benchmarks.mock_workers", "--address", config.worker_address, *workers]
    with child(command, source) as router, child(arguments):
        with Client(config.client_address, connect_timeout=60.0) as client:
            while len(client.status()["workers"]) < 2:
                time.sleep(0.05)
        yield config.client_address, router


@dataclass(frozen=True)
class Setup:
    """The gateway and the router that are measured."""

    name: str
    gateway: int
    port: int
    router: int


@contextmanager
def setup_of(name: str, source: Path | None) -> Iterator[Setup]:
    """Run a router with its workers and a gateway, from the packages in ``source``."""
    with (
        scratch_folder() as scratch,
        mocked(scratch, source) as (address, router),
        gateway_of(address, scratch, own=True, source=source) as (pid, port),
    ):
        yield Setup(name, pid, port, router)


class Costs:
    """CPU time of the gateway, the router and the gateway's helpers since the last look."""

    def __init__(self, gateway: int, router: int) -> None:
        self._pids = {"gateway": gateway, "router": router}
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        now = {name: thread_seconds(pid) for name, pid in self._pids.items()}
        helpers = children_of(self._pids["gateway"])
        return {**now, "helpers": sum(map(thread_seconds, helpers))}

    def since(self) -> dict[str, float]:
        """Return seconds by process since the last call, or the beginning."""
        before, self._before = self._before, self._now()
        return {name: now - before[name] for name, now in self._before.items()}


def show(name: str, costs: dict[str, float], load: Load, per: int, bar: float | None) -> None:
    """Print the costs of ``per`` requests or tokens."""
    each = {part: seconds / per * 1e6 for part, seconds in costs.items()}
    both = each["gateway"] + each["router"]
    aim = "" if bar is None else f"{bar:>8.0f}"
    parts = "".join(f"{each[part]:>10.1f}" for part in ("gateway", "router", "helpers"))
    print(
        f"{name:<42}{parts}{both:>10.1f}{aim:>8}{load.requests / load.seconds:>12.0f}"
        f"{load.events / load.seconds:>12.0f}",
        flush=True,
    )


def chat_request() -> bytes:
    """A short chat, which is rendered and tokenized."""
    body = {"messages": MESSAGES, **GREEDY, "max_tokens": 4}
    return request_bytes("/v1/chat/completions", body)


def measure(
    setups: Sequence[Setup], request: bytes, at_once: int, seconds: float
) -> tuple[list[tuple[dict[str, float], Load]], dict[str, float]]:
    """Return CPU seconds by process and the answered load of each setup's cheapest round.

    Other processes make rounds dearer, never cheaper. The setups take turns. The last value has
    for each process the median over the turns of the first setup's cost by the last one's.
    """
    turns = COST_ROUNDS if len(setups) == 1 else 3 * COST_ROUNDS
    found: list[list[tuple[dict[str, float], Load]]] = [[] for _ in setups]
    for setup in setups:
        run_load(setup.port, request, at_once, 0.5)
    for _ in range(turns):
        for setup, rounds in zip(setups, found, strict=True):
            costs = Costs(setup.gateway, setup.router)
            load = run_load(setup.port, request, at_once, seconds / turns)
            rounds.append((costs.since(), load))
    each = [[_each(*one) for one in rounds] for rounds in found]
    ratios = {
        name: statistics.median(
            one[name] / last[name] for one, last in zip(each[0], each[-1], strict=True)
        )
        for name in ("gateway", "router", "both")
    }
    return [min(rounds, key=_cost) for rounds in found], ratios


def _cost(measured: tuple[dict[str, float], Load]) -> float:
    return _each(*measured)["both"]


def _each(costs: dict[str, float], load: Load) -> dict[str, float]:
    """Return CPU seconds per request or event, by process and in all of them."""
    work = max(load.requests, load.events)
    return {name: cpu / work for name, cpu in {**costs, "both": sum(costs.values())}.items()}


def kinds_of_load() -> Iterator[tuple[str, bytes, int, bool]]:
    """Yield a name, a request, the number at once, and whether to count tokens."""
    ids = {"prompt": PROMPT, **GREEDY}
    short = {**ids, "max_tokens": 4}
    for at_once in (1, 16, 64):
        yield f"request of ids, {at_once} at a time", _completion(short), at_once, False
    yield "whole answer of 100, 16 at a time", _completion({**ids, "max_tokens": 100}), 16, False
    streamed = {**short, "stream": True}
    yield "stream of ids, 16 at a time", _completion(streamed), 16, False
    for streams in (1, 16, 64):
        body = {**ids, "max_tokens": 1000, "stream": True}
        yield f"streamed token, {streams} streams", _completion(body), streams, True
    yield "chat, 16 at a time", chat_request(), 16, False


def _completion(body: dict[str, Any]) -> bytes:
    return request_bytes("/v1/completions", body)


def measure_costs(setups: Sequence[Setup], seconds: float, only: str = "") -> None:
    """Print the CPU time of short requests and of long streams, of kinds with ``only`` in them."""
    print(f"{'µs of CPU':<42}{'gateway':>10}{'router':>10}{'helpers':>10}{'sum':>10}"
          f"{'bar':>8}{'requests/s':>12}{'events/s':>12}")  # fmt: skip
    for name, request, at_once, tokens in kinds_of_load():
        if only not in name:
            continue
        measured, ratios = measure(setups, request, at_once, seconds)
        for setup, (costs, load) in zip(setups, measured, strict=True):
            bar = BARS["token"] if tokens else BARS["request"]
            shown = f"{name} ({setup.name})" if len(setups) > 1 else name
            show(shown, costs, load, load.events if tokens else load.requests,
                 None if name.startswith("chat") else bar)  # fmt: skip
        if len(setups) > 1:
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"  cost by the other checkout's, median of the turns: {shown}", flush=True)


def first_tokens(address: str, port: int) -> dict[str, list[float]]:
    """Seconds to the first token of lone requests, by the client and by HTTP, taking turns."""
    request = request_bytes(
        "/v1/completions", {"prompt": PROMPT, **GREEDY, "max_tokens": 1, "stream": True}
    )
    params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=1)
    took: dict[str, list[float]] = {"client": [], "gateway": []}

    async def over_http() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(20):
            begun = time.perf_counter()
            writer.write(request)
            await reader.readuntil(b"data: ")
            took["gateway"].append(time.perf_counter() - begun)
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    with Client(address) as client:
        for _ in range(ROUNDS // 20):
            for _ in range(20):
                begun = time.perf_counter()
                outputs = client.generate(PROMPT, params, show_text=True)
                next(outputs)
                took["client"].append(time.perf_counter() - begun)
                for _ in outputs:
                    pass
            uvloop.run(over_http())
    return took


def resident_mb(pid: int) -> float:
    """Memory of one process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6


# --------------------------------------------------------------------------- peers


class _Events(asyncio.Protocol):
    """Answers completions: whole, or ``max_tokens`` events, one per step."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._content = b""

    def data_received(self, data: bytes) -> None:
        self._content += data
        head, found, body = self._content.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or 0):
            return
        self._content = b""
        if b'"stream": true' in body or b'"stream":true' in body:
            self._transport.write(_HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
            self._left = CHUNKS if b"1000" in body else 4
            self._next()
        elif head.startswith(b"POST"):  # as late as from the workers that answer us
            asyncio.get_running_loop().call_later(WHOLE_S, self._answer, _TEXT)
        else:
            self._answer(b'{"data":[{"id":"m"}],"status":"ok"}')

    def _answer(self, content: bytes) -> None:
        if not self._transport.is_closing():
            size = b"content-length: %d" % len(content)
            self._transport.write(_HEAD % (b"application/json", size) + content)

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        if self._left:
            self._left -= 1
            self._transport.write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
            asyncio.get_running_loop().call_later(STEP_S, self._next)
        else:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def _serve_events(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Events, "127.0.0.1", port)
    await server.serve_forever()


@contextmanager
def _router(python: Path, module: str, backend: int) -> Iterator[tuple[int, int]]:
    """Run a peer; yields its pid and port."""
    port = free_port()
    with scratch_folder() as folder, ExitStack() as processes:

        def start(*words: str) -> subprocess.Popen[bytes]:
            quiet = subprocess.DEVNULL
            places = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "kv")}
            process = subprocess.Popen(
                [str(python), "-m", *words], stdout=quiet, stderr=quiet,
                env={**os.environ, **places, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            processes.callback(process.wait)
            processes.callback(process.terminate)
            return process

        if module == "dynamo.frontend":
            process = start(module, "--http-host", "127.0.0.1", "--http-port", str(port))
            model = ("--model-path", str(demo_model_folder()), "--model-name", "m")
            start("dynamo.mocker", *model, "--speedup-ratio", "0")
        else:
            process = start(
                module, "--host", "127.0.0.1", "--port", str(port),
                "--worker-urls", f"http://127.0.0.1:{backend}",
                "--prometheus-port", str(free_port()), "--log-level", "error",
            )  # fmt: skip
        until = time.monotonic() + 60
        while not _has_models(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{module} did not start")
            time.sleep(0.2)
        yield process.pid, port


def _has_models(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            found: bytes = answer.read()
            return found != b'{"object":"list","data":[]}'
    except OSError:
        return False


def _wait_for(port: int) -> None:
    """Return when something listens at a port of this machine."""
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def measured_peers(python: Path, seconds: float) -> Iterator[tuple[str, float, Load, int]]:
    """Yield a name, the peer's CPU seconds, the load, and the number of requests or tokens."""
    # The prompt is text, because some peers refuse token ids. Only Dynamo tokenizes it.
    body = {"model": "m", "prompt": "Once upon a time " * 8, "max_tokens": 4, "ignore_eos": True}
    kinds = (
        ("request, 16 at a time", body, 16),
        ("stream, 16 at a time", {**body, "stream": True}, 16),
        ("streamed token, 64 streams", {**body, "stream": True, "max_tokens": 1000}, 64),
    )
    backend = free_port()
    with child(["baton.benchmarks.gateway", "--serve-events", str(backend)]):
        _wait_for(backend)
        for name, module in PEER_MODULES.items():
            try:
                with _router(python, module, backend) as (pid, port):
                    for kind, content, at_once in kinds[:1] if name == "Dynamo" else kinds:
                        request = request_bytes("/v1/completions", content)
                        run_load(port, request, at_once, 0.5)
                        found = []
                        for _ in range(COST_ROUNDS):
                            before = thread_seconds(pid)
                            load = run_load(port, request, at_once, seconds / COST_ROUNDS)
                            cpu = thread_seconds(pid) - before
                            per = load.events if "token" in kind else load.requests
                            found.append((f"{name}: {kind}", cpu, load, per))
                        yield min(found, key=lambda one: one[1] / one[3])
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)


# --------------------------------------------------------------------------- command line


def figures(seconds: float) -> dict[str, float]:
    """Return whole answers and streamed tokens per CPU-second of gateway and router together."""
    kinds = {name: (request, at_once) for name, request, at_once, _ in kinds_of_load()}
    found: dict[str, float] = {}
    with setup_of("this", None) as setup:
        for name in ("request of ids, 16 at a time", "streamed token, 64 streams"):
            ((costs, load),), _ = measure([setup], *kinds[name], seconds)
            found[f"{name}, per CPU-s"] = 1 / _each(costs, load)["both"]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--peer-python", default="", help="a Python with a router of a peer")
    parser.add_argument("--beside", type=Path, help="another checkout of the project")
    parser.add_argument("--only", default="", help="with --beside: kinds with this in their name")
    parser.add_argument("--serve-events", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve_events:
        uvloop.run(_serve_events(options.serve_events))
        return
    if options.beside:
        with (
            setup_of("this", None) as this,
            setup_of("beside", options.beside.resolve() / "src") as other,
        ):
            measure_costs([this, other], options.seconds, options.only)
            for setup in (this, other):
                print(f"resident ({setup.name}): {resident_mb(setup.gateway):.0f} MB")
        return
    with (
        scratch_folder() as scratch,
        mocked(scratch) as (address, router),
        gateway_of(address, scratch, own=True) as (pid, port),
    ):
        measure_costs([Setup("this", pid, port, router)], options.seconds)
        took = {way: statistics.median(one) for way, one in first_tokens(address, port).items()}
        added = (took["gateway"] - took["client"]) * 1e6
        print(f"first token of a lone request, p50: client {took['client'] * 1e6:.0f} µs, "
              f"gateway {added:+.0f} µs (bar +{BARS['first']:.0f})")  # fmt: skip
        print(f"resident: {resident_mb(pid):.0f} MB (bar {BARS['memory']:.0f})")
        with gateway_of(address, scratch, own=False) as (second, its_port):
            setup = Setup("helper", second, its_port, router)
            ((costs, load),), _ = measure([setup], chat_request(), 16, options.seconds)
            show("chat, template in a helper", costs, load, load.requests, None)
    if options.peer_python:
        for name, cpu, load, per in measured_peers(Path(options.peer_python), options.seconds):
            rate = load.events / load.seconds
            print(f"{name:<44}{cpu / per * 1e6:>10.1f} µs{rate:>12.0f} events/s", flush=True)


if __name__ == "__main__":
    main()
