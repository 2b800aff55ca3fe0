"""Grammars of requests on the decode worker."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.decode_worker.events import PeerGone
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.proto.errors import CapacityError, InputError, SchemaTooComplex
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Adopt,
    Busy,
    GrammarSpec,
    Grant,
    PeerDead,
    Release,
    Terminal,
    Tokens,
)

from .bench import KEY, OTHER, PEER, PROMPT, Bench, make_context, wanted


class Digits:
    """A grammar of tokens, and the tokens it was shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def consume_token(self, token: int) -> bool:
        self.seen.append(token)
        return token < 50

    def allowed(self) -> np.ndarray:
        return np.arange(100) < 50


STRUCTURED = msgspec.structs.replace(make_context(), json_schema='{"type":"integer"}')


def test_a_request_runs_once_its_grammar_is_rebuilt(bench):
    bench.run(context=STRUCTURED)
    assert bench.streamed() == [(10, 42)]
    (wanted,) = bench.other
    assert isinstance(wanted, CompileGrammar)
    assert (wanted.key, wanted.task.emitted) == ((KEY, 1), (42,))
    assert wanted.task.eos == frozenset({0})
    bench.later(0.5)
    assert not bench.plans
    assert not bench.core.idle
    matcher = Digits()
    bench.feed(GrammarDone(wanted.key, matcher))
    assert bench.plans[0].chunks[0].sample.mask is matcher
    bench.step()
    assert (bench.streamed(), matcher.seen) == ([(11, 43)], [43])
    bench.feed(GrammarDone(wanted.key, Digits()))  # sent twice
    for _ in range(6):
        bench.step()
    assert bench.one(Terminal).status == "maximum_length"
    assert bench.cache.pool.used == 0


SPEC = GrammarSpec(STRUCTURED.json_schema, [0], [])


def granted(bench, **fields) -> Grant:
    bench.reserve(grammar=SPEC, **fields)
    (grant,) = bench.to_peer(Grant)
    return grant


def test_a_grammar_compiles_from_the_reserve_on_and_is_there_with_the_kv(bench):
    grant = granted(bench)
    (first,) = wanted(bench)
    assert (first.key, first.task.emitted) == ((KEY, 1), ())
    matcher = Digits()
    bench.feed(GrammarDone(first.key, matcher))
    assert not bench.plans
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    assert (wanted(bench), matcher.seen) == ([], [42]), "no other grammar, behind prefill's token"
    assert bench.plans[0].chunks[0].sample.mask is matcher, "runs in the turn of the commit"
    assert bench.streamed() == [(10, 42)]


def test_a_commit_before_its_grammar_waits_for_the_one_that_compiles(bench):
    grant = granted(bench)
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    (first,) = wanted(bench)
    assert not bench.plans
    matcher = Digits()
    bench.feed(GrammarDone(first.key, matcher))
    assert (matcher.seen, [plan.ahead for plan in bench.plans]) == ([42], [False, True])


def test_a_replays_grammar_compiles_behind_its_tokens(bench):
    bench.reserve(tokens=PROMPT + 2, grammar=GrammarSpec(SPEC.schema, [0], [7, 8]))
    (grant,) = bench.to_peer(Grant)
    (first,) = wanted(bench)
    assert first.task.emitted == (7, 8)
    matcher = Digits()
    bench.feed(GrammarDone(first.key, matcher))
    manifest = bench.send(grant, PROMPT + 2)
    bench.commit(grant, manifest, context=STRUCTURED, emitted=[7, 8, 9])
    assert (matcher.seen, [plan.ahead for plan in bench.plans]) == ([9], [False, True])


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec('{"type":"null"}', [0], []),
        GrammarSpec(SPEC.schema, [0, 1], []),
        GrammarSpec(SPEC.schema, [0], [41]),
    ],
)
def test_a_commit_of_another_grammar_than_reserved_gets_its_own(bench, spec):
    bench.reserve(grammar=spec)
    (grant,) = bench.to_peer(Grant)
    (first,) = wanted(bench)
    bench.feed(GrammarDone(first.key, Digits()))
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    (second,) = wanted(bench)
    assert second.task.emitted == (42,)
    assert not bench.plans
    bench.feed(GrammarDone(second.key, Digits()))
    assert bench.plans


def test_a_reserve_said_twice_compiles_once_and_a_busy_one_nothing():
    bench = Bench(blocks=5)
    message = bench.reserve(grammar=SPEC)
    bench.ask(message)
    assert len(wanted(bench)) == 1
    bench.reserve(OTHER, tokens=16, grammar=SPEC)
    assert bench.to_peer(Busy)
    assert not wanted(bench)


def end_by_abort(bench, grant):
    bench.hear(Abort(request=KEY, attempt=1))


def end_by_release(bench, grant):
    bench.ask(Release(request=KEY, attempt=1, grant=grant.grant, incarnation=5))


def end_by_death(bench, grant):
    bench.hear(PeerDead(endpoint="ipc:///prefill", incarnation=5))


def end_by_absence(bench, grant):
    bench.feed(PeerGone(PEER))
    bench.later(6.0, step=0.5)


def end_by_deadline(bench, grant):
    bench.later(61.0, step=1.0)


def end_by_higher_attempt(bench, grant):
    bench.reserve(attempt=2)


def end_by_damage(bench, grant):
    bench.commit(grant, (0, 0, 0), context=STRUCTURED)  # a manifest that does not agree


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        end_by_abort,
        end_by_release,
        end_by_death,
        end_by_absence,
        end_by_deadline,
        end_by_higher_attempt,
        end_by_damage,
    ],
)
def test_a_handoff_that_ends_drops_its_grammar(bench, end, ready):
    grant = granted(bench)
    (first,) = wanted(bench)
    if ready:
        bench.feed(GrammarDone(first.key, Digits()))
    end(bench, grant)
    dropped = wanted(bench, DropGrammar)
    assert dropped == ([] if ready else [DropGrammar((KEY, 1))])
    assert not bench.core._grammars
    bench.feed(GrammarDone(first.key, Digits()))
    assert not bench.core._grammars


def test_an_abort_of_a_request_taken_over_drops_its_compile(bench):
    grant = granted(bench)
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    bench.hear(Abort(request=KEY, attempt=1))
    assert wanted(bench, DropGrammar) == [DropGrammar((KEY, 1))]
    assert bench.cache.pool.used == 0


def test_a_first_token_the_grammar_refuses_ends_the_request(bench):
    grant = granted(bench)
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.commit(grant, bench.send(grant), context=STRUCTURED, emitted=[60])
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("input", 11)
    assert bench.cache.pool.used == 0


def test_an_error_found_before_the_commit_ends_the_request_with_it(bench):
    grant = granted(bench)
    bench.feed(GrammarDone((KEY, 1), SchemaTooComplex("too much")))
    assert not bench.take(Terminal)
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    assert bench.one(Terminal).code == "schema_too_complex"
    assert bench.cache.pool.used == 0


def test_nobody_waits_for_anothers_grammar(bench):
    bench.run(context=STRUCTURED)
    bench.run(OTHER)
    bench.step()
    assert (11, 43) in bench.streamed()


def test_a_grammar_that_cannot_be_rebuilt_ends_its_request(bench):
    bench.run(context=STRUCTURED)
    bench.feed(GrammarDone((KEY, 1), InputError("json_schema: not like this")))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("input", 11)
    assert bench.cache.pool.used == 0
    assert bench.core.idle


def test_no_memory_for_a_grammar_now_says_when_to_come_back(bench):
    bench.run(context=STRUCTURED)
    bench.feed(GrammarDone((KEY, 1), CapacityError("schemas take it all", retry_after=1.5)))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.retry_after) == ("overloaded", 1.5)


def test_an_abort_while_the_grammar_is_rebuilt_frees_its_blocks(bench):
    bench.run(context=STRUCTURED)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used == 0
    bench.feed(GrammarDone((KEY, 1), Digits()))
    assert not bench.plans
    assert bench.core.idle


def test_a_deadline_passes_while_the_grammar_is_rebuilt(bench):
    bench.run(context=STRUCTURED, deadline=0.5)
    bench.later(1.0)
    assert bench.one(Terminal).code == "deadline_exceeded"
    assert bench.cache.pool.used == 0


def test_a_new_router_hears_of_a_request_whose_grammar_is_rebuilt(bench):
    bench.run(context=STRUCTURED)
    bench.take(Tokens)
    bench.hear(Adopt(request=KEY, position=10), "router-2")
    assert bench.streamed() == [(10, 42)]


def test_a_token_its_grammar_refuses_fails_the_request_alone(bench):
    bench.run(context=STRUCTURED)
    bench.run(OTHER)
    bench.step()
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.finish()
    bench.step(token=60)
    terminal = bench.one(Terminal)
    assert (terminal.request, terminal.code) == (KEY, "internal")
    bench.step()
    assert bench.cache.pool.used > 0
