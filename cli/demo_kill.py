"""The last part of ``baton demo``: kill the decode worker that generates an answer.

The same request runs twice, first without a kill. The demo succeeds only if both answers have the
same tokens.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..client import Client
from ..deploy.report import HandoffRecord
from ..proto.errors import InternalError
from ..proto.sampling import SamplingParamsInput
from .cluster import parsed

QUESTION = "Tell me a story about a fox."
TOKENS = 1200
"""Long enough for a kill in mid-stream at 2,000 tokens/s, and within the model's 2,048 tokens."""
KILL_AFTER = 200
SAMPLING = SamplingParamsInput(temperature=0.8, seed=7, max_new_tokens=TOKENS, ignore_eos=True)
SHOWN_CHARS = 72

WaitHandoff = Callable[[Client, int], HandoffRecord]


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


def show_kill(client: Client, wait_handoff: WaitHandoff) -> None:
    """Print the answer without and with a kill. Raises InternalError if they differ."""
    print(
        f"\n> {QUESTION}\n  ({TOKENS} tokens, sampled with a seed; sent twice, and the second "
        "time the decode worker is killed)",
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
    for output in client.chat([{"role": "user", "content": QUESTION}], SAMPLING):
        now = time.monotonic()
        answer.gap = max(answer.gap, now - last if last else 0.0)
        last = now
        answer.tokens += output.tokens
        answer.text += output.text or ""
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
