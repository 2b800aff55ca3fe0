"""Requests for embeddings: one worker, no tokens, and an embedding in the terminal."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.proto.limits import MAX_EMBEDDING_SIZE
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Cancel,
    RequestState,
    Submit,
    Submitted,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
)
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.router.admission import context_bytes


@pytest.fixture
def embeds(card):
    return msgspec.structs.replace(card, task="embed", embedding_size=3)


def text(length=10, **fields):
    tokens = np.arange(length, dtype=np.int32)
    return WireContext(
        tokens=WireTokens(tokens), **{"task": "embed", "max_length": length, **fields}
    )


def embedding(value=1.0):
    return np.full(3, value, np.float32)


def run(bench, request_id="r", **fields):
    key = bench.submit(request_id, context=text(), **fields)
    worker, assign = bench.find(Assign)
    worker.accept(assign)
    return key, worker


def test_a_whole_life_without_a_decode_worker(bench, embeds):
    prefill = bench.join("prefill", model=embeds)
    key = bench.submit("r", context=text())
    assign = bench.one(prefill, Assign)
    assert (assign.decode, assign.decode_incarnation, assign.emitted) == ("", 0, [])
    assert assign.context.target_endpoint is None
    assert assign.context.task == "embed"
    prefill.accept(assign)
    prefill.end(key, 10, embedding=embedding(2))
    assert bench.one(prefill, TerminalAck).requests == [(key, 1)]
    terminal = bench.one(b"client", Terminal)
    assert terminal.embedding.tolist() == [2, 2, 2]
    assert (terminal.status, terminal.prefill, terminal.decode) == (
        "end_of_sequence", "prefill-0", "",
    )  # fmt: skip
    assert bench.core.admission.queued_tokens == 0
    bench.ack(key)
    bench.assert_nothing_kept()


def test_the_vector_is_kept_until_it_is_acknowledged(bench, embeds):
    bench.join("prefill", model=embeds)
    key, prefill = run(bench)
    prefill.end(key, 10, embedding=embedding())
    bench.client(Submit(request_id="r", context=text()))  # as if the answer was lost
    assert all(t.embedding is not None for t in bench.terminals(key))
    bench.ack(key)
    bench.assert_nothing_kept()


def test_the_policy_spreads_texts_over_the_workers(bench, embeds):
    workers = [bench.join("prefill", number, model=embeds) for number in range(3)]
    for number in range(9):
        bench.submit(f"r{number}", context=text())
    assert [len(bench.take(worker, Assign)) for worker in workers] == [3, 3, 3]


def test_an_end_without_a_vector_is_an_error(bench, embeds):
    bench.join("prefill", model=embeds)
    key, prefill = run(bench)
    prefill.end(key, 10)
    terminal = bench.one(b"client", Terminal)
    assert (terminal.code, terminal.status) == ("internal", None)


def test_a_workers_error_is_passed_on(bench, embeds):
    bench.join("prefill", model=embeds)
    key, prefill = run(bench)
    prefill.end(key, 10, code="internal", message="no embedding")
    assert bench.one(b"client", Terminal).message == "no embedding"


def test_the_wrong_task_is_refused_at_once(bench, served, embeds):
    bench.submit("r", context=text())
    terminal = bench.one(b"client", Terminal)
    assert (terminal.code, "generation model" in terminal.message) == ("task_mismatch", True)


def test_text_asked_of_an_embedder_is_refused_at_once(bench, embeds):
    bench.join("prefill", model=embeds)
    bench.submit("r")
    terminal = bench.one(b"client", Terminal)
    assert (terminal.code, "embedding model" in terminal.message) == ("task_mismatch", True)


def test_what_came_before_any_worker_is_looked_at_when_one_comes(bench, embeds):
    right = bench.submit("right", context=text())
    wrong = bench.submit("wrong")
    prefill = bench.join("prefill", model=embeds)
    assert bench.one(prefill, Assign).request == right
    (terminal,) = bench.terminals(wrong)
    assert terminal.code == "task_mismatch"


def test_an_unknown_task_is_refused(bench):
    bench.submit("r", context=text(task="sing"))
    assert bench.one(b"client", Terminal).code == "input"


def test_busy_goes_to_another_worker(bench, embeds):
    bench.join("prefill", 0, model=embeds)
    bench.join("prefill", 1, model=embeds)
    key = bench.submit("r", context=text())
    first, _assign = bench.find(Assign)
    first.say(Busy(request=key, attempt=1, reason="queue full"))
    second, again = bench.find(Assign)
    assert second is not first
    assert again.attempt == 2


def test_a_death_is_replayed_elsewhere(bench, embeds):
    bench.join("prefill", 0, model=embeds)
    bench.join("prefill", 1, model=embeds)
    key, first = run(bench)
    first.gone()
    second, assign = bench.find(Assign)
    assert second is not first
    second.accept(assign)
    second.end(key, 10, attempt=assign.attempt, embedding=embedding())
    assert bench.one(b"client", Terminal).embedding is not None


def test_cancel_frees_it_on_its_worker(bench, embeds):
    bench.join("prefill", model=embeds)
    key, prefill = run(bench)
    bench.client(Cancel(request_id="r"))
    assert bench.one(b"client", Terminal).status == "cancelled"
    assert bench.one(prefill, Abort).attempt == 1
    prefill.say(Aborted(request=key, attempt=1))
    bench.ack(key)
    bench.assert_nothing_kept()


def test_a_deadline_ends_it(bench, embeds):
    bench.join("prefill", model=embeds)
    run(bench, deadline=1.0)
    bench.advance(1.5)
    assert bench.one(b"client", Terminal).code == "deadline_exceeded"


def test_a_restarted_router_finds_the_worker_that_has_it(bench, embeds):
    bench.join("prefill", model=embeds)
    bench.submit("r", context=text())
    submitted = bench.one(b"client", Submitted)
    other = type(bench)(bench.config)
    key = submitted.request
    held = RequestState(key, 1, 10, 10, router=bench.config.name)
    worker = other.join("prefill", model=embeds, requests=[held])
    other.client(other.resume_message(submitted, [], context=text()))
    assert other.one(worker, Adopt).position == 10
    worker.say(Tokens(runs=[TokenRun(key, 1, 10, [])]))
    worker.end(key, 10, embedding=embedding(4))
    assert other.one(b"client", Terminal).embedding.tolist() == [4, 4, 4]


def test_no_worker_is_said_in_the_roles_that_are_missing(make_bench, embeds):
    bench = make_bench(start_grace_s=0.5)
    bench.submit("r", context=text())
    bench.advance(1.0)
    terminal = bench.one(b"client", Terminal)
    assert terminal.code == "overloaded"
    assert terminal.message == "no prefill worker was ready for 0.5 s"


def test_a_vector_for_a_text_request_is_not_kept(bench):
    prefill, _decode = bench.pair()
    key, _assign = bench.run("r", new=1)
    prefill.tokens(key, 10, 5)
    prefill.end(key, 11, status="maximum_length", embedding=embedding())
    assert bench.one(b"client", Terminal).embedding is None


def test_memory_is_charged_for_the_vector():
    text_only = WireContext(tokens=WireTokens(np.arange(10, dtype=np.int32)), max_length=10)
    assert context_bytes(text()) - context_bytes(text_only) == 4 * MAX_EMBEDDING_SIZE


def test_accepting_twice_changes_nothing(bench, embeds):
    bench.join("prefill", model=embeds)
    key, prefill = run(bench)
    prefill.say(Accepted(request=key, attempt=1))
    prefill.end(key, 10, embedding=embedding())
    prefill.end(key, 10, embedding=embedding())
    assert len(bench.terminals(key)) == 1
