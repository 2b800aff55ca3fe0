"""KV blocks really travel between processes, are counted on both sides, and arrive intact."""

import json
import os
import signal
import time
from collections import Counter

import pytest

from .driver import Job, all_handoffs, ask, ask_all, greedy
from .reference import DATA, cases_of
from .wire_tap import WireTap

pytestmark = pytest.mark.cluster

MODEL = "mistral"
CASES = cases_of(MODEL)
BLOCK_SIZE = 16


def jobs(cases=CASES, **options) -> list[Job]:
    return [Job(case.prompt, greedy(64), options) for case in cases]


def status_json(running) -> dict:
    """What ``baton status --json`` prints."""
    return json.loads(running.command("status", "--json", "--handoffs=256").stdout)


@pytest.mark.parametrize(
    ("transport", "handoff", "named"),
    [
        ("ipc", "auto", "shm"),
        pytest.param("ipc", "zmq", "zmq", marks=pytest.mark.long),
        ("tcp", "auto", "zmq"),
    ],
)
def test_every_handoff_is_reported_and_adds_up(cluster, transport, handoff, named):
    running = cluster(
        model=DATA / MODEL,
        transport=transport,
        handoff=handoff,
        max_num_batched_tokens=0,
        step_time=0,
    )
    began = time.monotonic()
    with running.client() as client:
        answers = ask_all(client, jobs() + jobs())
        all_handoffs(client, len(answers))
        layout = client.describe().card.layout
    seconds = time.monotonic() - began
    status = status_json(running)
    workers = {w["id"]: w for w in status["workers"]}
    assert len({w["pid"] for w in workers.values()} | {os.getpid()}) == 4
    assert {name: w["pid"] for name, w in workers.items()}.items() <= running.pids().items()

    handoffs = status["handoffs"]
    last = handoffs["last"]
    assert handoffs["count"] == len(last) == len(answers)
    by_worker = Counter(h["decode"] for h in last)
    assert by_worker == Counter(a.decode for a in answers)
    assert set(by_worker) == {"decode-0", "decode-1"}
    for h in last:
        assert h["transport"] == named
        assert h["prefill"] == "prefill-0"
        assert h["bytes"] == h["bytes_sent"] == h["bytes_received"]
        assert h["bytes"] == h["blocks"] * layout.num_layers * layout.block_bytes
        assert 0 < h["milliseconds"] < 1000 * seconds
        assert h["cached_tokens"] % BLOCK_SIZE == 0
        assert h["resent_frames"] == 0
    for side in ("bytes_sent", "bytes_received"):
        assert handoffs[side] == sum(h[side] for h in last)
    # The requests of one prompt: all its blocks travel, cached ones excepted.
    whole = sum(layout.blocks_for(len(case.prompt)) for case in CASES)
    cached = sum(h["cached_tokens"] for h in last) // BLOCK_SIZE
    assert sum(h["blocks"] for h in last) == 2 * whole - cached
    assert max(h["frames"] for h in last) > 1, "long prompts are streamed layer by layer"


# ------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module", params=["zmq", "auto"])
def tapped(shared_cluster, request):
    """A cluster of one pair whose KV frames, or the names of their blocks, pass our hands."""
    running = shared_cluster(
        model=DATA / MODEL,
        prefill=1,
        decode=1,
        max_num_batched_tokens=0,
        step_time=0,
        handoff=request.param,
    )
    (path,) = running.folder.rglob("decode-0.data.sock")
    tap = WireTap(path)
    yield running, tap
    tap.close()


class Flip:
    """Flips one bit in one byte of chosen KV payloads; ``which`` counts payloads from 0."""

    def __init__(self, which: range, at: float) -> None:
        self.which, self.at = which, at
        self.seen = self.done = 0

    def __call__(self, body: bytearray, more: bool) -> None:
        if more:  # the header goes first
            return
        if self.seen in self.which:
            body[int(self.at * (len(body) - 1))] ^= 0x10
            self.done += 1
        self.seen += 1


def run_tapped(tapped, hand, cases, salt) -> list[dict]:
    """Put the requests with ``hand`` at the wire, check the answers, return the handoffs."""
    running, tap = tapped
    with running.client() as client:
        before = client.status()["handoffs"]["count"]
        tap.hand = hand
        frames = tap.frames
        answers = ask_all(client, jobs(cases, cache_salt=salt))
        done = all_handoffs(client, before + len(answers))[-len(answers) :]
    assert tap.frames > frames, "the frames went another way"
    assert [a.tokens for a in answers] == [case.greedy for case in cases]
    assert all(h["bytes_sent"] == h["bytes_received"] for h in done)
    return done


@pytest.mark.parametrize("at", [0.0, 0.4, 1.0], ids=["first", "middle", "last"])
def test_one_damaged_byte_is_noticed_and_sent_again(tapped, at):
    flip = Flip(range(1), at)
    (handoff,) = run_tapped(tapped, flip, CASES[5:6], f"byte {at}")
    assert flip.done == 1
    assert (handoff["resent_frames"], handoff["attempt"]) == (1, 1)


def test_damage_to_every_frame_of_a_streamed_prompt(tapped):
    flip = Flip(range(8), 0.7)
    (handoff,) = run_tapped(tapped, flip, CASES[7:], "every")
    assert handoff["frames"] > 1
    assert handoff["resent_frames"] >= flip.done > 1


def test_damage_among_sixteen_requests(tapped):
    flip = Flip(range(0, 1000, 3), 0.5)
    handoffs = run_tapped(tapped, flip, CASES * 2, "sixteen")
    assert sum(h["resent_frames"] for h in handoffs) >= flip.done / 2 > 1


def test_a_damaged_header_is_as_good_as_lost(tapped):
    """Damage each byte of the header in turn: the announced blocks are sent again."""
    seen = []

    def hand(body: bytearray, more: bool) -> None:
        if more and len(seen) < 64:
            body[len(seen) % len(body)] ^= 0x01
            seen.append(bytes(body))

    handoffs = run_tapped(tapped, hand, CASES[:6] * 8, "header")
    assert sum(h["resent_frames"] for h in handoffs) > 0
    assert all(h["attempt"] == 1 for h in handoffs)
    assert len(seen) == 64


def test_the_workers_are_whole_after_all_the_damage(tapped):
    running, tap = tapped
    tap.hand = lambda body, more: None
    with running.client() as client:
        assert ask(client, jobs()[6]).tokens == CASES[6].greedy
        assert all(w["state"] == "ready" for w in client.status()["workers"])
    running.wait_idle()


def test_a_damaged_word_between_the_workers_is_lost_and_said_again(shared_cluster):
    """Every second envelope towards the decode worker, one bit each: no answer is another one."""
    running = shared_cluster(
        model=DATA / MODEL, prefill=1, decode=1, max_num_batched_tokens=0, step_time=0
    )
    (path,) = running.folder.rglob("decode-0.sock")
    tap = WireTap(path)
    counts = Counter()

    def hand(body: bytearray, more: bool) -> None:
        counts["seen"] += 1
        if body.startswith(b"BS") and counts["seen"] % 2 == 0:
            body[11 + counts["done"] * 37 % (len(body) - 11)] ^= 0x01
            counts["done"] += 1

    tap.hand = hand
    try:
        with running.client() as client:
            answers = ask_all(client, jobs(CASES * 2, cache_salt="control"))
    finally:
        tap.close()
    assert [a.tokens for a in answers] == [case.greedy for case in CASES * 2]
    assert counts["done"] > 1


def test_cached_tokens_with_unequal_caches(shared_cluster):
    """Tokens in the cache of the decode worker alone were computed by the prefill worker."""
    running = shared_cluster(prefill=1, decode=1)
    prompt = list(range(3, 3 + 4 * BLOCK_SIZE + 1))
    with running.client() as client:

        def cached():
            return client.complete(prompt, greedy(2)).usage.cached_tokens

        assert cached() == 0
        assert cached() == 4 * BLOCK_SIZE
        before = running.pids()["prefill-0"]
        os.kill(before, signal.SIGKILL)
        running.wait_replaced("prefill-0", before)
        running.wait_ready()
        assert cached() == 0
        assert cached() == 4 * BLOCK_SIZE
