"""A peer that sends what no worker can use must not fill the log."""

import pytest

from ..processes import wait_until
from .driver import Job, ask, greedy
from .raw import PREFIX, RawPeer
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
MESSAGES = 300
"""Fewer than answers that may wait for a peer."""


@pytest.mark.parametrize(
    ("socket", "event"),
    [
        ("prefill-0", "endpoint.malformed"),
        ("decode-0", "peer.malformed"),
        ("decode-0.data", "data.malformed"),
    ],
)
def test_unusable_messages_cause_few_lines(shared, socket, event):
    (path,) = shared.folder.glob(f"baton-run-*/{socket}.sock")
    with RawPeer(f"ipc://{path}") as peer:
        for _ in range(MESSAGES):
            peer.send(PREFIX + b"\xc1")
        if not socket.endswith("data"):
            peer.answers()
        with shared.client() as client:
            case = cases_of(MODEL)[4]
            assert ask(client, Job(case.prompt, greedy(16))).tokens == case.greedy[:16]

        def lines() -> int:
            return sum(event in line for line in shared.text().splitlines())

        wait_until(lines, what="the first warning")
        assert lines() < 20


@pytest.fixture(scope="module")
def shared(shared_cluster):
    return shared_cluster(model=DATA / MODEL, prefill=1, decode=1)
