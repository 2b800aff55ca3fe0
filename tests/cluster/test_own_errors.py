"""A cluster serves right whose processes raise exceptions in every 50th turn of their clocks."""

from __future__ import annotations

import pytest

from baton.proto.errors import InternalError

from ..processes import wait_until
from ..suite.short import some_long
from .driver import Job, ask, ask_all, greedy
from .faulty.planted import HARMED
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

TOKENS = 24


@pytest.fixture(scope="module")
def faulty(start_cluster):
    """All processes of the cluster raise: router, workers, gateway, supervisor, controller."""
    cluster = start_cluster(
        decode=2, model=DATA / "llama", module="tests.cluster.faulty.serve", gateways=1,
        http_port=0,
    )  # fmt: skip
    yield cluster.wait_ready()
    cluster.end()


def errors(cluster) -> int:
    """Exceptions that the workers have counted."""
    return sum(w["dropped"].get("internal_error", 0) for w in cluster.workers().values())


@pytest.mark.parametrize("count", some_long(60, 1000))
def test_every_request_is_right_while_every_fiftieth_turn_raises(faulty, count):
    pids = faulty.pids()
    short = [
        case for case in cases_of("llama") if len(case.prompt) < 200 and len(case.prompt) != HARMED
    ]
    before = errors(faulty)
    wait_until(lambda: errors(faulty) > before, what="exceptions in the workers")
    with faulty.client() as client:
        cases = [short[number % len(short)] for number in range(count)]
        answers = ask_all(client, (Job(case.prompt, greedy(TOKENS)) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        wanted = case.greedy[:TOKENS]
        at = next((i for i in range(TOKENS) if answer.tokens[i] != wanted[i]), None)
        assert at is None or case.margins[at] < 1e-4, (at, len(case.prompt))
    faulty.wait_idle()
    assert faulty.pids() == pids  # and nothing had to be restarted
    wait_until(
        lambda: all(f"Planted: {when}" in faulty.text() for when in ("before", "after")),
        what="exceptions before and after the real work",
    )
    text = faulty.text()
    assert "Traceback (most recent call last)" in text


def test_a_request_that_raises_in_a_worker_ends_alone(faulty):
    prompt = list(range(5, 5 + HARMED))
    other = cases_of("llama")[1]
    with faulty.client() as client:
        running = Job(other.prompt, greedy(TOKENS)).start(client)
        with pytest.raises(InternalError, match=r"^worker prefill-0 failed to handle this request"):
            ask(client, Job(prompt, greedy(TOKENS)))
        tokens = [token for output in running for token in output.tokens]
    assert len(tokens) == TOKENS
    faulty.wait_idle()


def test_it_ends_when_it_is_asked(start_cluster):
    cluster = start_cluster(
        decode=1, model=DATA / "llama", module="tests.cluster.faulty.serve"
    ).wait_ready()
    cluster.end_clean()
