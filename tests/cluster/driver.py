"""Requests put to a running cluster, a given number at a time, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.client import Client, Generation
from baton.proto.sampling import SamplingParams

from ..processes import wait_until
from .conftest import Cluster

IN_FLIGHT = 16


@dataclass
class Answer:
    """All that a request gave back."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    status: str = ""
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0


@dataclass(frozen=True)
class Job:
    """A request to be put: token ids, parameters and options of ``generate``."""

    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)

    def start(self, client: Client) -> Generation:
        return client.generate(self.prompt, self.params, **self.options)


def collect(outputs: Iterator, into: Answer | None = None) -> Answer:
    """Read a generation to its end."""
    answer = Answer() if into is None else into
    for output in outputs:
        answer.tokens += output.tokens
        for entry in output.log_probabilities or ():
            top = entry.top_log_probabilities[0]
            answer.logprobs.append((entry.token_log_probabilities[0], top))
        if output.is_done:
            answer.status = str(output.final_status.value)
            answer.prefill, answer.decode = output.prefill, output.decode
            answer.cached_tokens = output.cached_tokens
    return answer


def ask(client: Client, job: Job) -> Answer:
    return collect(job.start(client))


def ask_all(client: Client, jobs: Iterable[Job], in_flight: int = IN_FLIGHT) -> list[Answer]:
    """Answers in the order of the jobs, ``in_flight`` of which run at a time."""
    answers: list[Answer] = []
    running: deque[Generation] = deque()
    for job in jobs:
        if len(running) == in_flight:
            answers.append(collect(running.popleft()))
        running.append(job.start(client))
    return answers + [collect(generation) for generation in running]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)


def all_handoffs(client: Client, count: int) -> list[dict]:
    """The ``count`` handoffs so far, the latest last; a report may follow its answer."""
    status = wait_until(
        lambda: (s := client.status(handoffs=256))["handoffs"]["count"] >= count and s,
        what=f"{count} handoffs",
    )
    assert status["handoffs"]["count"] == count
    return status["handoffs"]["last"]


def lost_requests(cluster: Cluster) -> int:
    """How many attempts were lost with a worker and made again."""
    with cluster.client() as client:
        counts = client.status()["router"]["requests"]
    return counts["replayed"] + counts["moved"]


def worker_figures(client: Client, role: str, name: str) -> int:
    """Sum of a figure over the workers of a role; heartbeats bring it every 200 ms."""
    return sum(w[name] for w in client.status()["workers"] if w["role"] == role)
