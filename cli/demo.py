"""``baton demo``: start a whole cluster, answer prompts, survive a killed worker, and stop.

One answer comes over HTTP.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..client import Client
from ..deploy.config import ServeSettings
from ..deploy.local.cluster import LocalCluster, check_model
from ..deploy.local.terminal import terminal
from ..deploy.messages import mebibytes
from ..deploy.report import HandoffRecord
from ..proto.errors import BatonError, InternalError
from ..proto.sampling import SamplingParamsInput
from .cluster import parsed
from .serve import run_cluster

QUESTIONS = (
    "What is Baton?",
    "What is the KV cache?",
    "Tell me a story about a fox.",
    "What is 7 plus 8?",
)

REPORT_TIMEOUT = 5.0
HTTP_QUESTION = "Who are you?"
HTTP_TIMEOUT = 60.0
KILL_QUESTION = "Tell me a story about a fox."
KILL_TOKENS = 1200
"""Long enough for a kill in mid-stream at 2,000 tokens/s, and within the model's 2,048 tokens."""
KILL_AFTER = 200
KILL_SAMPLING = SamplingParamsInput(
    temperature=0.8, seed=7, max_new_tokens=KILL_TOKENS, ignore_eos=True
)
SHOWN_CHARS = 72


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("demo", help="start a cluster, answer prompts, kill a worker, stop")
    parser.add_argument("--address", default="", help="client address [a private socket file]")
    parser.add_argument("questions", metavar="QUESTION", nargs="*", help="prompts [examples]")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the supervisor in the main thread, and ask the questions from another thread."""
    settings = ServeSettings(
        prefill=1,
        decode=2,
        http_port=0,
        address=arguments.address,
        kv_memory="64MiB",
        stats_interval=0,
    )
    check_model(settings)
    print("starting a gateway, a router, one prefill worker and two decode workers ...", flush=True)
    cluster = LocalCluster(settings, terminal, private=not arguments.address)
    asker = _Asker(cluster, tuple(arguments.questions) or QUESTIONS)
    cluster.on_ready(asker.start)
    code = run_cluster(cluster)
    if cluster.interrupted and not asker.done:
        raise KeyboardInterrupt  # also if the cluster failed: the user pressed Ctrl-C
    code = code or asker.outcome()
    if code == 0:
        print("demo finished: the cluster is stopped and its files are removed", flush=True)
    return code


class _Asker(threading.Thread):
    """Thread that asks the questions and then stops the cluster."""

    def __init__(self, cluster: LocalCluster, questions: tuple[str, ...]) -> None:
        super().__init__(name="demo", daemon=True)
        self._cluster = cluster
        self._questions = questions
        self.done = False  # every question is answered
        self._problem: BatonError | OSError | None = None

    def run(self) -> None:
        try:
            with Client(self._cluster.plan.address) as client:
                for question in self._questions:
                    show(client, question)
                show_http(self._cluster.plan.http_url, HTTP_QUESTION)
                show_kill(client)
            self.done = True
        except (BatonError, OSError) as problem:  # OSError: the reader closed the output pipe
            self._problem = problem
        finally:
            self._cluster.interrupt()

    def outcome(self) -> int:
        """Return 0 if every question was answered, else 1. Raises the error that occurred."""
        if self._problem is not None:
            raise self._problem
        return 0 if self.done else 1


@dataclass(slots=True)
class Timing:
    """Times of a request's start, first token and last token; seconds of one monotonic clock."""

    began: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def count(self, tokens: int, now: float) -> None:
        """Record the arrival of ``tokens`` tokens."""
        if tokens:
            self.first = self.first or now
            self.last = now
            self.tokens += tokens

    def line(self) -> str:
        """TTFT, and the token rate over the whole answer."""
        took = self.last - self.began
        first = (self.first - self.began) * 1000
        rate = self.tokens / took if took else 0.0
        return f"TTFT {first:.1f} ms, {self.tokens} tokens, {rate:.0f} tokens/s over {took:.2f} s"


def show(client: Client, question: str) -> None:
    """Stream one answer, then print which workers produced it and its timing."""
    print(f"\n> {question}\n  ", end="", flush=True)
    handoffs = parsed(client.status(handoffs=0)).handoffs.count
    timing = Timing(time.monotonic())
    message = {"role": "user", "content": question}
    output = None
    for output in client.chat([message], SamplingParamsInput(temperature=0.0, max_new_tokens=200)):
        timing.count(len(output.tokens), time.monotonic())
        print(output.text, end="", flush=True)
    if output is None:
        raise InternalError("the answer had no output")
    if timing.tokens > 1:
        said = describe(output.prefill, output.decode, wait_handoff(client, handoffs))
    else:  # the first token ended the answer: no handoff
        said = f"{output.prefill} read the prompt and ended the answer"
    print(f"\n  [{said}]\n  [{timing.line()}]", flush=True)


def show_http(url: str, question: str) -> None:
    """Ask over HTTP, as ``curl`` would, and print the command with the answer.

    Raises InternalError for a refused request.
    """
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    print(f"\n$ curl {url}/chat/completions -d '{json.dumps(body)}'", flush=True)
    parts = urlsplit(url)
    gateway = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HTTP_TIMEOUT)
    try:
        gateway.request("POST", f"{parts.path}/chat/completions", json.dumps(body))
        response = gateway.getresponse()
        content = response.read().decode("utf-8", "replace")
    except http.client.HTTPException as problem:
        raise InternalError(f"the gateway's answer is damaged: {problem!r}") from problem
    finally:
        gateway.close()
    if response.status != 200:
        raise InternalError(f"the gateway answered {response.status}: {content[:200]}")
    answer = json.loads(content)
    usage = answer["usage"]
    print(
        f"  {answer['choices'][0]['message']['content']}\n"
        f"  [HTTP 200, {usage['prompt_tokens']} + {usage['completion_tokens']} tokens]",
        flush=True,
    )


def wait_handoff(client: Client, before: int) -> HandoffRecord:
    """Wait for a handoff after the first ``before`` handoffs, and return the newest.

    The report of a handoff may reach the router shortly after the answer.
    """
    until = time.monotonic() + REPORT_TIMEOUT
    while time.monotonic() < until:
        handoffs = parsed(client.status(handoffs=1)).handoffs
        if handoffs.count > before:
            return handoffs.last[-1]
        time.sleep(0.01)
    raise InternalError("the router has no record of the handoff")


def describe(prefill: str, decode: str, handoff: HandoffRecord) -> str:
    """One sentence about both workers' parts and the KV cache sent between the workers."""
    return (
        f"{prefill} read the prompt, handed {mebibytes(handoff.bytes_received)} of KV cache "
        f"({handoff.blocks} blocks, {handoff.milliseconds:.1f} ms, {handoff.transport}) "
        f"to {decode}, which wrote the answer"
    )


# --------------------------------------------------------------------------- the killed worker


@dataclass(slots=True)
class Answer:
    """Tokens and text of one answer.

    ``decode``: the decode worker of the last tokens. ``gap``: longest gap between two outputs in
    seconds, after the kill.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    decode: str = ""
    gap: float = 0.0


def show_kill(client: Client) -> None:
    """Print the answers to one request without and with a kill of the decode worker.

    Raises InternalError if their tokens differ.
    """
    print(
        f"\n> {KILL_QUESTION}\n  ({KILL_TOKENS} tokens, sampled with a seed; sent twice, and the "
        "second time the decode worker is killed)",
        flush=True,
    )
    expected = _answer(client)
    print(
        f"  undisturbed  {len(expected.tokens)} tokens from {expected.decode}: "
        f'"{expected.text[:SHOWN_CHARS]}..."',
        flush=True,
    )
    victims: list[str] = []
    handoffs = parsed(client.status(handoffs=0)).handoffs.count

    def kill(received: int) -> None:
        victim = wait_handoff(client, handoffs).decode
        pid = _pid(client, victim)
        os.kill(pid, signal.SIGKILL)
        victims.append(victim)
        print(f"  {received} tokens  SIGKILL to {victim}, pid {pid}", flush=True)

    actual = _answer(client, kill)
    if victims == [actual.decode]:
        raise InternalError("the answer ended before its decode worker was killed")
    print(
        f"  {len(actual.tokens)} tokens  completed by {actual.decode}; "
        f"longest pause {actual.gap * 1000:.0f} ms\n"
        f"  {compare(expected.tokens, actual.tokens)}",
        flush=True,
    )


def _answer(client: Client, kill: Callable[[int], None] | None = None) -> Answer:
    """Send the request and return its answer.

    ``kill(received)`` is called once, after :data:`KILL_AFTER` tokens.
    """
    answer = Answer()
    last = 0.0
    for output in client.chat([{"role": "user", "content": KILL_QUESTION}], KILL_SAMPLING):
        now = time.monotonic()
        answer.gap = max(answer.gap, now - last if last else 0.0)
        last = now
        answer.tokens += output.tokens
        answer.text += output.text
        answer.decode = output.decode
        if kill is not None and len(answer.tokens) >= KILL_AFTER:
            kill(len(answer.tokens))
            kill, answer.gap, last = None, 0.0, time.monotonic()
    return answer


def _pid(client: Client, worker: str) -> int:
    """Return the worker's pid. Raises InternalError without one: kill(0) would hit this process."""
    for report in parsed(client.status(handoffs=0)).workers:
        if report.id == worker and report.pid > 0:
            return report.pid
    raise InternalError(f"the router reports no process id for {worker}")


def compare(expected: list[int], actual: list[int]) -> str:
    """Return a sentence for equal answers. Raises InternalError for different answers."""
    if expected == actual:
        return f"all {len(actual)} tokens equal those of the undisturbed answer"
    pairs = zip(expected, actual, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
    raise InternalError(
        f"the answer differs from the undisturbed one after {same} tokens: "
        f"{len(actual)} tokens instead of {len(expected)}"
    )
