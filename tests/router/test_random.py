"""Seeded random interleavings of all events of the core, with invariants.

The workers follow the protocol, but they refuse requests, die, return, lose and repeat messages,
and report old attempts. Tokens follow from the request's key and the position, so the test can
check every stream.
"""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from msgspec.structs import replace

from baton.proto.ids import request_key
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Cancel,
    FinalAck,
    Heartbeat,
    PeerLost,
    Rejected,
    RequestState,
    Submitted,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
)
from baton.router.events import ClientFull, ClientWritable, WorkersGone
from baton.router.story_report import story_record
from baton.router.story_slices import slices_of

from .test_story_slices import check_nesting

PROMPT = 10
CLIENTS = (b"a", b"b", b"c")


def token_at(key: bytes, position: int) -> int:
    return (key[0] * 31 + position * 7) % 1000


class Job:
    """One attempt on a worker."""

    def __init__(self, assign: Assign, router: bool = True) -> None:
        self.key, self.attempt = assign.request, assign.attempt
        self.position = PROMPT + len(assign.emitted)
        self.end = PROMPT + 3 + self.key[1] % 9
        self.assign = assign


class Party:
    """A worker that follows the protocol, with faults."""

    def __init__(self, world, role: str, number: int) -> None:
        self.world, self.role, self.number = world, role, number
        self.jobs: dict[bytes, Job] = {}
        self.ended: dict[bytes, tuple[Job, Terminal]] = {}
        self.aborted: dict[bytes, int] = {}
        self.start()

    def start(self) -> None:
        self.jobs, self.ended, self.aborted = {}, {}, {}
        self.alive, self.paused = True, False
        self.inbox: list = []  # messages that arrive during a pause
        self.played = self.world.bench.join(self.role, self.number)

    def say(self, message) -> None:
        """Send a message once, twice, later or never."""
        chance = self.world.random.random()
        if chance < self.world.loss:
            return
        event = (self.played.identity, message)
        if chance > 1 - self.world.loss:
            self.world.late.append(event)
        else:
            self.world.bench.hear(*event)
            if chance > 1 - 2 * self.world.loss:
                self.world.late.append(event)

    def run_tokens(self, job: Job, start: int, end: int) -> None:
        if start < end:
            tokens = [token_at(job.key, p) for p in range(start, end)]
            self.say(Tokens(runs=[TokenRun(job.key, job.attempt, start, tokens)]))

    def hear(self, message) -> None:
        match message:
            case Assign():
                self.assigned(message)
            case Abort(request=key, attempt=attempt):
                for held in (self.jobs, self.ended):
                    if key in held:
                        job = held[key] if held is self.jobs else held[key][0]
                        if job.attempt <= attempt:
                            del held[key]
                self.aborted[key] = max(attempt, self.aborted.get(key, 0))
                self.say(Aborted(request=key, attempt=attempt))
            case Adopt(request=key, position=position):
                job = self.jobs.get(key)
                if job is None and key in self.ended:
                    job, terminal = self.ended[key]
                    self.run_tokens(job, position, job.position)
                    self.say(terminal)
                elif job is not None:
                    self.run_tokens(job, position, job.position)
                else:
                    self.say(Aborted(request=key, attempt=0))
            case Rejected(code="endpoint_unknown"):
                self.say_hello()
            case Rejected(code="endpoint_dead"):
                self.start()
            case TerminalAck(requests=ended):
                for key, attempt in ended:
                    if key in self.ended and self.ended[key][0].attempt == attempt:
                        del self.ended[key]

    def say_hello(self) -> None:
        held = [RequestState(j.key, j.attempt, j.position, PROMPT) for j in self.jobs.values()]
        held += [
            RequestState(j.key, j.attempt, j.position, PROMPT, True) for j, _ in self.ended.values()
        ]
        self.played.say(replace(self.played.hello, requests=held))

    def wake(self) -> None:
        """Continue after a pause, over the old connection or a new one."""
        self.paused = False
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            self.hear(message)
        if self.played.identity == b"":
            self.world.connections += 1
            self.played.identity = b"connection %d" % self.world.connections
            self.say_hello()

    def assigned(self, message: Assign) -> None:
        key, attempt = message.request, message.attempt
        if self.aborted.get(key, 0) >= attempt:
            self.say(Aborted(request=key, attempt=attempt))
            return
        held = self.jobs.get(key)
        if held is None or held.attempt < attempt:
            if self.world.random.random() < self.world.trouble:
                full = self.world.random.random() < 0.5
                self.say(Busy(request=key, attempt=attempt, decode_full=full))
                return
            assert message.deadline > 0
            self.jobs[key] = Job(message)
        self.say(Accepted(request=key, attempt=attempt))

    def work(self) -> None:
        """Run one step: prefill computes a first token and hands over, decode the next tokens."""
        for job in list(self.jobs.values()):
            if self.world.random.random() < 0.5:
                continue
            if self.role == "prefill":
                self.hand_over(job)
            else:
                self.generate(job)
        for _, terminal in list(self.ended.values()):
            if self.world.random.random() < 0.2:
                self.say(terminal)

    def hand_over(self, job: Job) -> None:
        target = self.world.by_endpoint(job.assign.decode)
        if target is None:
            message = PeerLost(endpoint=job.assign.decode, request=job.key, attempt=job.attempt)
            self.say(message)
            self.say(Busy(request=job.key, attempt=job.attempt, decode_full=True))
            del self.jobs[job.key]
            return
        self.run_tokens(job, job.position, job.position + 1)
        job.position += 1
        del self.jobs[job.key]
        if job.position >= job.end:
            self.finish(job)
            return
        if target.aborted.get(job.key, 0) >= job.attempt:
            return
        held = target.jobs.get(job.key)
        if held is None or held.attempt < job.attempt:
            target.jobs[job.key] = job
            target.run_tokens(job, job.position - 1, job.position)
            if self.world.random.random() < 0.7:
                self.played.hello and self.say_report(job)

    def say_report(self, job: Job) -> None:
        self.played.report(job.assign)

    def generate(self, job: Job) -> None:
        count = min(self.world.random.randint(1, 2), job.end - job.position)
        self.run_tokens(job, job.position, job.position + count)
        job.position += count
        if job.position >= job.end:
            self.jobs.pop(job.key)
            self.finish(job)

    def finish(self, job: Job) -> None:
        terminal = Terminal(
            request=job.key, attempt=job.attempt, position=job.position, status="maximum_length"
        )
        self.ended[job.key] = (job, terminal)
        self.say(terminal)


class World:
    def __init__(self, bench, seed: int) -> None:
        self.bench, self.random = bench, random.Random(seed)
        self.loss, self.trouble = 0.05, 0.1
        self.late: deque = deque(maxlen=200)
        self.parties = [Party(self, role, n) for role in ("prefill", "decode") for n in (0, 1)]
        self.submitted: dict[bytes, tuple[bytes, str]] = {}
        self.secrets: dict[bytes, Submitted] = {}
        self.got: dict[bytes, list[int]] = {}
        self.ends: dict[bytes, Terminal] = {}
        self.acknowledged: set[bytes] = set()
        self.left: set[bytes] = set()
        self.cancelled: set[bytes] = set()
        self.full: set[bytes] = set()
        self.full_for = 0
        self.connections = 0

    def by_endpoint(self, endpoint: str) -> Party | None:
        return next((p for p in self.parties if p.alive and p.played.endpoint == endpoint), None)

    # ------------------------------------------------------------------ random events

    def step(self) -> None:
        happenings = [
            (6, self.submit), (12, self.work), (6, self.pass_time), (2, self.cancel),
            (2, self.deliver_late), (1, self.kill), (2, self.restart), (1, self.leave),
            (1, self.slow), (2, self.read_again), (5, self.acknowledge), (2, self.submit_again),
            (2, self.resume), (1, self.hello_again), (2, self.pause), (3, self.wake),
            (1, self.disconnect),
        ]  # fmt: skip
        weights = [weight for weight, _ in happenings]
        self.random.choices([f for _, f in happenings], weights)[0]()
        self.deliver()
        self.check()

    def submit(self) -> None:
        identity = self.random.choice(CLIENTS)
        name = f"r{len(self.submitted)}"
        deadline = self.random.choice((3.0, 20.0, None))
        key = self.bench.submit(name, identity, deadline=deadline, new=12)
        self.submitted[key] = (identity, name)
        self.got[key] = []

    def submit_again(self) -> None:
        open_ = [k for k in self.submitted if k not in self.acknowledged and k not in self.left]
        if open_:
            key = self.random.choice(open_)
            identity, name = self.submitted[key]
            if key in self.bench.core.table.requests:
                self.bench.submit(name, identity, new=12)

    def resume(self) -> None:
        open_ = [k for k in self.secrets if k not in self.ends and k not in self.acknowledged]
        if open_:
            key = self.random.choice(open_)
            self.left.discard(key)
            identity, _ = self.submitted[key]
            message = self.bench.resume_message(self.secrets[key], self.got[key], deadline=20.0)
            self.bench.client(message, identity)

    def work(self) -> None:
        for party in self.parties:
            if party.alive and not party.paused:
                party.work()

    def pass_time(self) -> None:
        for party in self.parties:
            if party.alive and not party.paused:
                beat = Heartbeat(incarnation=party.played.hello.incarnation, progress=0)
                self.bench.hear(party.played.identity, beat)
        self.bench.advance(self.random.choice((0.05, 0.3, 0.6)), beats=False)
        self.full_for += bool(self.full)
        if self.full_for > 5:  # terminals expire
            self.read_again()

    def cancel(self) -> None:
        if self.submitted and self.random.random() < 0.3:
            key = self.random.choice(list(self.submitted))
            self.cancelled.add(key)  # its last tokens may be missing
            self.bench.client(Cancel(request=key), self.submitted[key][0])

    def deliver_late(self) -> None:
        if self.late:
            index = self.random.randrange(len(self.late))
            event = self.late[index]
            del self.late[index]
            self.bench.hear(*event)

    def kill(self) -> None:
        party = self.random.choice(self.parties)
        if party.alive and self.random.random() < 0.4:
            party.alive = False
            self.bench.feed(WorkersGone([party.played.identity]))

    def pause(self) -> None:
        party = self.random.choice(self.parties)
        party.paused = party.alive

    def wake(self) -> None:
        for party in self.parties:
            if party.alive and party.paused:
                party.wake()
                return

    def disconnect(self) -> None:
        """Lose the messages in transit; reconnect the worker at once or later."""
        party = self.random.choice(self.parties)
        if party.alive and party.played.identity:
            self.bench.feed(WorkersGone([party.played.identity]))
            party.played.identity, party.inbox, party.paused = b"", [], True
            if self.random.random() < 0.5:
                party.wake()

    def restart(self) -> None:
        for party in self.parties:
            if not party.alive:
                party.start()
                return

    def hello_again(self) -> None:
        party = self.random.choice(self.parties)
        if party.alive and not party.paused:
            party.say_hello()

    def leave(self) -> None:
        if self.random.random() < 0.2:
            identity = self.random.choice(CLIENTS)
            self.bench.client_gone(identity)
            self.full.discard(identity)
            mine = {k for k, (i, _) in self.submitted.items() if i == identity}
            self.left |= mine - set(self.ends)

    def slow(self) -> None:
        identity = self.random.choice(CLIENTS)
        self.full.add(identity)
        self.bench.feed(ClientFull(identity))

    def read_again(self) -> None:
        for identity in sorted(self.full):
            self.bench.feed(ClientWritable(identity))
        self.full.clear()
        self.full_for = 0

    def acknowledge(self) -> None:
        for key in [k for k in self.ends if k not in self.acknowledged]:
            self.acknowledged.add(key)
            self.bench.client(FinalAck(requests=[key]), self.submitted[key][0])

    # ------------------------------------------------------------------ delivery and checks

    def deliver(self) -> None:
        """Deliver all sent messages to workers and clients."""
        for _ in range(50):
            sent = {i: m for i, m in self.bench.sent.items() if m}
            if not sent:
                return
            self.bench.sent.clear()
            for identity, messages in sent.items():
                for message in messages:
                    if identity in CLIENTS:
                        self.client_hears(identity, message)
                    else:
                        self.worker_hears(identity, message)
        raise AssertionError("messages without end")

    def worker_hears(self, identity: bytes, message) -> None:
        for party in self.parties:
            mine = party.alive and identity and party.played.identity == identity
            if mine and party.paused:
                party.inbox.append(message)
            elif mine and self.random.random() >= self.loss:
                party.hear(message)

    def client_hears(self, identity: bytes, message) -> None:
        if isinstance(message, Tokens):
            for run in message.runs:
                self.check_run(identity, run)
        elif isinstance(message, Submitted):
            self.secrets[message.request] = message
        elif isinstance(message, Terminal) and message.request in self.got:
            self.check_terminal(message)

    def check_run(self, identity: bytes, run: TokenRun) -> None:
        assert self.submitted[run.request][0] == identity
        assert identity not in self.full
        got = self.got[run.request]
        start = run.position - PROMPT
        assert start <= len(got), "a gap reached the client"
        for offset, token in enumerate(run.tokens):
            assert token == token_at(run.request, run.position + offset)
            if start + offset == len(got):
                got.append(token)

    def check_terminal(self, terminal: Terminal) -> None:
        key = terminal.request
        known = self.ends.setdefault(key, terminal)
        again = key in self.acknowledged or key in self.left
        if not again:
            assert (known.status, known.code, known.position) == (
                terminal.status, terminal.code, terminal.position,
            ), "two different terminals"  # fmt: skip
        if terminal.status == "maximum_length" and key not in self.cancelled:
            assert len(self.got[key]) == terminal.position - PROMPT
        assert terminal.code not in {"internal", "duplicate_request", "input"}, terminal

    def check(self) -> None:
        core = self.bench.core
        core.check_integrity()
        for request in core.table.requests.values():
            for incarnation in request.doubts:
                worker = core.registry.known(incarnation)
                assert worker is not None and worker.hung_up, "a doubt that is never resolved"
                assert request in worker.doubted

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Stop all faults: every request must end, and no state may remain."""
        self.loss = self.trouble = 0.0
        self.late.clear()
        self.read_again()
        for _ in range(8):
            self.restart()
            self.wake()
        for _ in range(150):
            self.work()
            self.pass_time()
            self.deliver()
            self.acknowledge()
            self.deliver()
            self.check()
        missing = [k for k in self.submitted if k not in self.ends and k not in self.left]
        assert not missing
        self.bench.advance(700.0)
        self.bench.assert_nothing_kept()


@pytest.mark.parametrize("seed", range(30))
def test_random_interleavings(make_bench, seed):
    deadly = {} if seed % 2 else {"poison_deaths": 10_000}
    bench = make_bench(max_attempts=10_000, worker_timeout_s=1.5 + seed % 3, **deadly)
    world = World(bench, seed)
    for _ in range(150):
        world.step()
    world.finish()
    assert len(world.ends) > 5
    check_stories(bench, world)
    assert request_key(b"a", "r0")


def check_stories(bench, world) -> None:
    """Each end that a client got has a story, with slices that nest whatever came late or twice."""
    stories = bench.core.stories.last(1000)
    told = {story.key: story for story in stories}
    assert world.ends.keys() <= told.keys()
    for story in stories:
        record = msgspec.json.decode(msgspec.json.encode(story_record(story, "p", bench.now)))
        check_nesting(slices_of(record))
        assert not story.attempts or story.began <= story.ended
        assert all(attempt.cause for attempt in story.attempts[:-1])
    for key, terminal in world.ends.items():
        assert told[key].status == terminal.status
