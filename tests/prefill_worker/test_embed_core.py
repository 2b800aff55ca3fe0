"""The decisions of an embedding worker, without sockets, threads or a model."""

import itertools

import msgspec
import numpy as np
import pytest

from baton.prefill_worker.embed_core import BatchDone, EmbedCore, EmbedLimits, RunBatch
from baton.prefill_worker.job import make_job
from baton.proto.errors import TaskMismatch
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Drained,
    Heartbeat,
    Hello,
    Moved,
    Terminal,
    TerminalAck,
    Tokens,
)
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.worker.events import (
    DrainRequested,
    Fault,
    FromRouter,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
)
from baton.worker.membership import Membership, WorkerIdentity

from ..model_cards import model_card

CARD = model_card(
    architecture="BertModel", max_length=50, eos_token_ids=[], task="embed", embedding_size=3
)
ROUTER = "router"


def key(number):
    return bytes([number]) * 16


class Worker:
    """A core, its messages and the batch it runs."""

    def __init__(self, **limits):
        identity = WorkerIdentity("p", "prefill", 7, 1, "ipc:///p", "default", CARD, 16)
        self.core = EmbedCore(Membership(identity, (ROUTER,)), EmbedLimits(**limits))
        self.now = 0.0
        self.said = []
        self.batch = None
        self.faulty = False  # the test plants exceptions in the core's code
        self.feed(RouterUp(ROUTER))

    def feed(self, event):
        actions = self.core.handle(event, self.now)
        self.core.check_integrity()
        said = [a for a in actions if isinstance(a, ToRouter)]
        self.said += said
        for action in actions:
            if isinstance(action, Fault) and not self.faulty:
                raise action.error
            if isinstance(action, RunBatch):
                assert self.batch is None, "two batches at once"
                assert action.tokens == sum(len(c.tokens) for c in action.batch.values())
                self.batch = action.batch
        return [a.message for a in said]

    def assign(self, number, tokens=4, attempt=1, deadline=10.0, router=ROUTER, **changes):
        fields = {"task": "embed", "max_length": tokens, **changes}
        context = WireContext(tokens=WireTokens(np.full(tokens, number, np.int32)), **fields)
        message = Assign(
            request=key(number), attempt=attempt, request_id=f"r{number}", context=context,
            deadline=deadline,
        )  # fmt: skip
        return self.feed(FromRouter(router, message))

    def hear(self, message, router=ROUTER):
        return self.feed(FromRouter(router, message))

    def keys_of(self, kind):
        """The attempts in its messages of a kind."""
        said = [a.message for a in self.said]
        return {(m.request, m.attempt) for m in said if type(m) is kind}

    def running(self):
        """First token of each text in the batch."""
        return [int(c.tokens[0]) for c in self.batch.values()]

    def finish(self, missing=(), failure="", size=3):
        batch, self.batch = self.batch, None
        vectors = {
            name: np.full(size, c.tokens[0], np.float32)
            for name, c in batch.items()
            if c.tokens[0] not in missing and not failure
        }
        return self.feed(BatchDone(vectors, 0.01, failure))

    def tick(self, after):
        self.now += after
        return self.feed(Tick())


def kinds(messages):
    return [type(m) for m in messages]


def test_a_text_comes_back_as_a_vector_in_its_terminal():
    worker = Worker()
    assert kinds(worker.assign(5)) == [Accepted]
    (terminal,) = worker.finish()
    assert (terminal.request, terminal.attempt, terminal.status) == (key(5), 1, "end_of_sequence")
    assert (terminal.position, terminal.request_id, terminal.prefill) == (4, "r5", "p")
    assert terminal.embedding.tolist() == [5, 5, 5]


def test_texts_that_wait_are_computed_together_within_the_budget():
    worker = Worker(token_budget=10, max_batch=3)
    worker.assign(1)
    for number in (2, 3, 4):
        worker.assign(number)
    worker.assign(5, tokens=30)
    for number in (6, 7, 8, 9):
        worker.assign(number, tokens=1)
    batches = []
    while worker.batch is not None:
        batches.append(worker.running())
        worker.finish()
    assert batches == [[1], [2, 3], [4], [5], [6, 7, 8], [9]]


def test_without_a_budget_the_batch_alone_bounds():
    worker = Worker(token_budget=0, max_batch=4)
    for number in range(1, 8):
        worker.assign(number, tokens=40)
    worker.finish()
    assert worker.running() == [2, 3, 4, 5]


def test_v16_a_missing_result_is_an_error_of_its_own_request():
    worker = Worker()
    worker.assign(1)
    worker.assign(2)
    worker.assign(3)
    worker.finish()
    first, second = worker.finish(missing=[2])
    assert (first.code, first.embedding, first.status) == ("internal", None, None)
    assert "no embedding" in first.message
    assert second.embedding is not None


def test_a_vector_of_the_wrong_size_is_none():
    worker = Worker()
    worker.assign(1)
    (terminal,) = worker.finish(size=4)
    assert terminal.code == "internal"


def test_a_failing_pass_fails_its_texts_and_not_the_worker():
    worker = Worker()
    worker.assign(1)
    (terminal,) = worker.finish(failure="forward pass: MemoryError")
    assert (terminal.code, terminal.message) == ("internal", "forward pass: MemoryError")
    worker.assign(2)
    assert worker.finish()[0].embedding is not None


def test_the_same_assign_is_answered_the_same():
    worker = Worker()
    worker.assign(1)
    assert kinds(worker.assign(1)) == [Accepted]
    worker.finish()
    assert kinds(worker.assign(1)) == [Accepted]  # its end is not acknowledged yet
    worker.hear(TerminalAck(requests=[(key(1), 1)]))
    assert kinds(worker.assign(1)) == [Aborted]  # a router without memory must not wait
    assert worker.batch is None


def test_terminals_are_said_until_acknowledged():
    worker = Worker()
    worker.assign(1)
    worker.finish()
    assert next(m for m in worker.tick(0.6) if isinstance(m, Terminal)).embedding is not None
    worker.hear(TerminalAck(requests=[(key(1), 1)]))
    assert not [m for m in worker.tick(0.6) if isinstance(m, Terminal)]


def test_an_abort_frees_what_waits_and_drops_what_runs():
    worker = Worker()
    for number in (1, 2, 3):
        worker.assign(number)
    assert Aborted in kinds(worker.hear(Abort(request=key(1), attempt=1)))
    worker.hear(Abort(request=key(2), attempt=1))
    assert worker.finish() == []
    assert worker.running() == [3]
    assert kinds(worker.assign(1)) == [Aborted]  # an Assign that was overtaken
    assert kinds(worker.assign(1, attempt=2)) == [Accepted]


def test_a_higher_attempt_replaces_a_lower_one():
    worker = Worker()
    worker.assign(1)
    worker.assign(1, attempt=2)
    assert worker.finish() == []  # no request wants the first attempt's vector
    (terminal,) = worker.finish()
    assert terminal.attempt == 2


def test_deadlines_end_what_waits_and_what_runs():
    worker = Worker()
    worker.assign(1, deadline=1.0)
    worker.assign(2, deadline=0.5)
    late = [m for m in worker.tick(0.7) if isinstance(m, Terminal)]
    assert [(m.request, m.code) for m in late] == [(key(2), "deadline_exceeded")]
    late = [m for m in worker.tick(0.4) if isinstance(m, Terminal)]
    assert (key(1), "deadline_exceeded") in [(m.request, m.code) for m in late]
    assert worker.finish() == []


def test_expired_work_is_never_started():
    worker = Worker()
    worker.assign(1)
    worker.assign(2, deadline=0.5)
    worker.now = 1.0
    messages = worker.finish()
    assert [m.code for m in messages] == [None, "deadline_exceeded"]
    assert worker.batch is None


def test_a_full_queue_and_a_drain_answer_busy():
    worker = Worker(max_queue=1)
    worker.assign(1)
    worker.assign(2)
    (busy,) = worker.assign(3)
    assert (type(busy), busy.reason, busy.decode_full) == (Busy, "queue full", False)
    worker.feed(DrainRequested())
    worker.finish()
    (busy,) = worker.assign(4)
    assert busy.reason == "draining"


def test_what_belongs_to_a_router_that_is_gone_for_good_is_freed_at_last():
    worker = Worker(max_batch=1)
    for number in (1, 2):
        worker.assign(number, deadline=600.0)
    worker.feed(RouterDown(ROUTER))
    for _ in range(59):
        worker.tick(1.0)
    assert len(worker.core._held()) == 2
    worker.tick(2.0)
    assert not worker.core._held() and not worker.keys_of(Aborted)


def test_a_drain_ends_when_all_vectors_have_arrived():
    worker = Worker()
    worker.assign(1)
    worker.feed(DrainRequested())
    worker.finish()
    assert not worker.core.is_drained
    said = worker.hear(TerminalAck(requests=[(key(1), 1)]))
    assert worker.core.is_drained
    assert Drained in kinds(said)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"task": "generate", "max_length": 40}, "task_mismatch"),
        ({"tokens": 51}, "context_length_exceeded"),
        ({"max_length": 2}, "input"),
        ({"model_name": "other"}, "input"),
    ],
)
def test_what_is_no_text_to_embed_gets_a_typed_error(changes, code):
    worker = Worker()
    accepted, terminal = worker.assign(1, **changes)
    assert (type(accepted), terminal.code) == (Accepted, code)
    assert worker.batch is None


def test_ids_outside_the_vocabulary_get_a_typed_error():
    worker = Worker()
    _, terminal = worker.assign(200)
    assert (terminal.code, worker.batch) == ("input", None)


def test_another_router_can_take_a_request_over():
    worker = Worker()
    worker.assign(1)
    messages = worker.hear(Adopt(request=key(1), position=4), router="other")
    assert kinds(messages) == [Accepted, Moved, Tokens]
    assert messages[2].runs[0].tokens == []
    worker.finish()
    assert worker.said[-1].router == "other"
    again = worker.hear(Adopt(request=key(1), position=4))
    assert kinds(again) == [Accepted, Moved, Terminal]
    assert again[2].embedding is not None
    assert kinds(worker.hear(Adopt(request=key(9), position=1))) == [Aborted]


def test_hello_lists_what_is_here():
    worker = Worker()
    worker.assign(1)
    worker.assign(2)
    (hello,) = [m for m in worker.feed(RouterUp(ROUTER)) if isinstance(m, Hello)]
    assert [(r.request, r.position, r.prompt_length, r.done) for r in hello.requests] == [
        (key(1), 4, 4, False), (key(2), 4, 4, False),
    ]  # fmt: skip


def test_heartbeats_tell_a_slow_batch_from_none():
    worker = Worker()
    worker.assign(1)
    worker.assign(2)
    (beat,) = [m for m in worker.tick(0.3) if isinstance(m, Heartbeat)]
    assert beat.busy
    assert (beat.load.requests_running, beat.load.requests_waiting) == (1, 1)
    assert beat.load.tokens_waiting == 4
    worker.finish()
    worker.finish()
    (beat,) = [m for m in worker.tick(0.3) if isinstance(m, Heartbeat)]
    assert (beat.busy, beat.progress, beat.load.prompt_tokens) == (False, 2, 8)


@pytest.mark.parametrize("seed", range(20))
def test_every_assign_ends_once_whatever_happens(seed):
    rng = np.random.default_rng(seed)
    worker = Worker(token_budget=12, max_batch=3, max_queue=6)
    attempts, serial = {}, itertools.count(1)
    for _ in range(300):
        match rng.integers(7):
            case 0 | 1 | 2:
                number = next(serial) % 90 + 1
                attempts[number] = attempts.get(number, 0) + 1
                worker.assign(
                    number, int(rng.integers(1, 9)), attempts[number], float(rng.uniform(0.1, 3))
                )
            case 3 if attempts:
                number = int(rng.choice(list(attempts)))
                worker.hear(Abort(request=key(number), attempt=attempts[number]))
            case 4:
                worker.tick(float(rng.uniform(0, 0.5)))
            case _ if worker.batch is not None:
                worker.finish(missing=rng.choice(90, 20).tolist())
    while worker.batch is not None:
        worker.finish()
    ends = {}
    accepted = worker.keys_of(Accepted)
    gone = worker.keys_of(Aborted)
    for action in worker.said:
        if isinstance(action.message, Terminal):
            name = (action.message.request, action.message.attempt)
            assert ends.setdefault(name, action.message) is action.message, "two different ends"
    newest = {(key(n), a) for n, a in attempts.items()}
    assert {k for k in accepted & newest if k not in gone} <= ends.keys()
    assert not len(worker.core._queue)


def test_a_text_worker_refuses_to_embed():
    context = WireContext(tokens=WireTokens(np.array([1, 2], np.int32)), max_length=2, task="embed")
    assign = Assign(request=key(1), attempt=1, context=context, deadline=1.0)
    text = msgspec.structs.replace(CARD, task="generate")
    with pytest.raises(TaskMismatch):
        make_job((key(1), 1), ROUTER, assign, text, 0.0)


def test_steps_are_counted_with_their_tokens_and_seconds():
    worker = Worker()
    for number, tokens in ((1, 4), (2, 10), (3, 20)):
        worker.assign(number, tokens=tokens)
    worker.finish()  # one text; the others form the next batch
    worker.finish()
    worker.assign(4)
    worker.finish(failure="no memory")  # its time shows nothing about steps
    histograms = worker.core.load().histograms
    assert {name: sum(found.counts) for name, found in histograms.items()} == {
        "step_seconds": 2, "step_tokens": 2,
    }  # fmt: skip
    assert histograms["step_tokens"].total == 34
    assert histograms["step_seconds"].total == pytest.approx(0.02)
