"""The steps of ``baton demo``: ask a question, ask over HTTP, kill a worker under an answer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from baton.client import Client, Output
from baton.deploy.messages import counted
from baton.deploy.report import HandoffRecord, WorkerReport
from baton.proto.errors import InternalError
from baton.proto.sampling import SamplingParamsInput
from baton.runtime.process.memory import size_text

from .cluster import parsed

REPORT_TIMEOUT = 5.0
HTTP_TIMEOUT = 60.0
KILL_TOKENS = 1200
"""Long enough for a kill in mid-stream at 2,000 tokens/s, and within the model's 2,048 tokens."""
KILL_AFTER = 200
SHOWN_CHARS = 72


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


@dataclass(slots=True, frozen=True)
class Question:
    """A question, with a picture or without.

    ``picture``: uint8 ``[height, width, 3]``. ``sampling``: of the answer.
    """

    text: str
    picture: npt.NDArray[np.uint8] | None = None
    sampling: SamplingParamsInput = field(
        default_factory=lambda: SamplingParamsInput(temperature=0.0, max_new_tokens=200)
    )

    def ask(self, client: Client) -> Iterator[Output]:
        """Send the question, and yield the parts of its answer."""
        images = [] if self.picture is None else [self.picture]
        messages = [{"role": "user", "content": self.text}]
        return iter(client.chat(messages, self.sampling, images=images))


def show(client: Client, question: Question) -> None:
    """Stream one answer, then print which workers produced it and its timing."""
    print(f"\n> {question.text}\n  ", end="", flush=True)
    handoffs = parsed(client.status(handoffs=0)).handoffs.count
    timing = Timing(time.monotonic())
    output = None
    for output in question.ask(client):
        timing.count(len(output.tokens), time.monotonic())
        print(output.text, end="", flush=True)
    if output is None:
        raise InternalError("the answer had no output")
    if timing.tokens > 1:
        said = describe(output.prefill, output.decode, wait_handoff(client, handoffs))
    else:  # the first token ended the answer: no handoff
        said = f"{output.prefill} read the prompt and ended the answer"
    print(f"\n  [{said}]\n  [{timing.line()}]", flush=True)


def show_http(url: str, body: dict[str, Any], shown: str = "") -> None:
    """Ask over HTTP, as ``curl`` would, and print the command with the answer.

    ``shown``: the argument of ``-d``, by default the body. Raises InternalError for a refused
    request.
    """
    data = shown or f"'{json.dumps(body)}'"
    print(f"\n$ curl {url}/chat/completions -d {data}", flush=True)
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
        f"{prefill} read the prompt, handed {size_text(handoff.bytes_received)} of KV cache "
        f"({counted(handoff.blocks, 'block')}, {handoff.milliseconds:.1f} ms, {handoff.transport}) "
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


def show_kill(client: Client, question: Question, how: str) -> None:
    """Print the answers to one request without and with a kill of the decode worker.

    ``how``: words for the sampling. Raises InternalError if the tokens of both answers differ.
    """
    print(
        f"\n> {question.text}\n  ({KILL_TOKENS} tokens, {how}; sent twice, and the "
        "second time the decode worker is killed)",
        flush=True,
    )
    expected = _answer(client, question)
    print(
        f"  undisturbed  {len(expected.tokens)} tokens from {expected.decode}: "
        f'"{expected.text[:SHOWN_CHARS]}..."',
        flush=True,
    )
    victims: list[str] = []
    handoffs = parsed(client.status(handoffs=0)).handoffs.count

    def kill(received: int) -> None:
        victims.append(kill_decode_worker(client, handoffs, f"{received} tokens  ").id)

    actual = _answer(client, question, kill)
    if victims == [actual.decode]:
        raise InternalError("the answer ended before its decode worker was killed")
    print(
        f"  {len(actual.tokens)} tokens  completed by {actual.decode}; "
        f"longest pause {actual.gap * 1000:.0f} ms\n"
        f"  {compare(expected.tokens, actual.tokens)}",
        flush=True,
    )


def _answer(
    client: Client, question: Question, kill: Callable[[int], None] | None = None
) -> Answer:
    """Send the request and return its answer.

    ``kill(received)`` is called once, after :data:`KILL_AFTER` tokens.
    """
    answer = Answer()
    last = 0.0
    for output in question.ask(client):
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


def kill_decode_worker(client: Client, before: int, moment: str = "") -> WorkerReport:
    """Kill the decode worker of the newest handoff after the first ``before``, and return it.

    ``moment``: printed before the worker's name. Raises InternalError if the router does not report
    the handoff or the worker's process id.
    """
    victim = wait_handoff(client, before).decode
    for worker in parsed(client.status(handoffs=0)).workers:
        if worker.id == victim and worker.pid > 0:  # kill(0) would hit this process
            os.kill(worker.pid, signal.SIGKILL)
            print(f"  {moment}SIGKILL to {victim}, pid {worker.pid}", flush=True)
            return worker
    raise InternalError(f"the router reports no process id for {victim}")


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
