"""Pictures on the core of a decode worker: positions of the router, replays, and the result."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.engine.scheduling.plan import Sampled, StepResult
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.picture_requests import STATE_VOCABULARY, state_tokens
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.messages import Abort, Aborted, Adopt, Grant, Hello, Refused, Terminal, Tokens
from baton.proto.wire.wire_context import WireTokens
from baton.worker.events import RouterUp, StepDone

from ..model_cards import model_card
from .bench import KEY, LAYOUT, OTHER, Bench

CARD = model_card(
    task="draw", kinds=["PixelContext"], vocab_size=STATE_VOCABULARY, max_length=200, layout=LAYOUT
)
BASE, STEPS = 5, 4
ROW = 13  # 7 vectors and the pooled one in 12 positions, and the last one


def committed(steps=STEPS, **fields):
    """The context of a Commit before its first token."""
    prompts = [TokenBuffer(np.arange(count, dtype=np.int64)) for count in (BASE, 8)]
    request = PixelContext(
        tokens=prompts[0], tokens_2=prompts[1], height=64, width=64, num_inference_steps=steps
    )
    wire = to_map(request)
    row = WireTokens(state_tokens(wire, LAYOUT.block_size))
    named = {"base": np.array([BASE])}
    return msgspec.structs.replace(wire, tokens=row, extra_params=named, **fields)


@pytest.fixture
def bench():
    return Bench(card=CARD)


def take_over(bench, **fields):
    return bench.run(context=committed(**fields), tokens=ROW, emitted=[0])


def step(bench, result=None):
    plan = bench.plans.pop(0)
    drawn = tuple(
        Sampled(chunk.request, chunk.start - ROW + 1, result=result) for chunk in plan.chunks
    )
    bench.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens)))
    return plan


def test_steps_have_the_positions_of_the_router(bench):
    take_over(bench)
    assert bench.streamed() == [(BASE, 0)]
    for number in range(1, STEPS):
        plan = step(bench)
        assert [chunk.start for chunk in plan.chunks] == [ROW + number - 1]
        assert plan.chunks[0].picture.length == ROW
        assert bench.streamed() == [(BASE + number, number)]
        assert not bench.take(Terminal)
    step(bench, b"png")
    assert bench.streamed() == [(BASE + STEPS, STEPS)]
    terminal = bench.one(Terminal)
    assert (terminal.status, terminal.media) == ("maximum_length", b"png")
    assert terminal.position == BASE + STEPS + 1
    assert bench.cache.pool.used == 0
    assert bench.core.load().step_rows == STEPS * (16 + 8)  # 64 x 64 pixels and 8 tokens of T5


def test_no_step_is_planned_ahead(bench):
    """So a picture that arrives meanwhile joins the next step."""
    take_over(bench)
    assert len(bench.plans) == 1
    bench.run(OTHER, context=committed(), tokens=ROW, emitted=[0])
    step(bench)
    assert len(bench.plans[0].chunks) == 2


def test_a_router_that_adopts_gets_the_steps_from_its_position(bench):
    take_over(bench)
    step(bench)
    step(bench)
    bench.streamed()
    for position, runs in ((BASE, [(BASE, [0, 1, 2])]), (BASE + 2, [(BASE + 2, [2])])):
        bench.hear(Adopt(request=KEY, position=position), "router-2")
        found = [(run.position, run.tokens) for one in bench.take(Tokens) for run in one.runs]
        assert found == runs
    bench.hear(Adopt(request=KEY, position=BASE + 4), "router-2")  # a replay, not so far yet
    (run,) = bench.one(Tokens).runs
    assert (run.position, run.tokens) == (BASE + 4, [])


def test_a_preview_travels_with_its_step_and_is_repeated(bench):
    take_over(bench)
    step(bench)
    step(bench, b"preview")
    step(bench)
    assert media(bench) == [
        (BASE, None),
        (BASE + 1, None),
        (BASE + 2, b"preview"),
        (BASE + 3, None),
    ]
    bench.hear(Adopt(request=KEY, position=BASE + 1), "router-2")
    assert media(bench) == [(BASE + 1, b"preview"), (BASE + 3, None)]
    step(bench, b"png")
    assert media(bench) == [(BASE + 4, None)]
    assert bench.one(Terminal).media == b"png"
    bench.hear(Adopt(request=KEY, position=BASE + 2), "router-3")
    assert media(bench) == [(BASE + 2, b"preview"), (BASE + 3, None)]


def media(bench):
    """The positions and media of the runs that were sent; a run ends with its media."""
    return [(run.position, run.media) for one in bench.take(Tokens) for run in one.runs]


def test_the_load_counts_the_rows_of_the_steps(bench):
    take_over(bench)
    bench.feed(RouterUp("router-2"))
    (job,) = bench.core._jobs
    assert job.work == BASE + 1 + STEPS * (16 + 8)  # 64 x 64 pixels, and 8 tokens
    step(bench)
    assert job.work == BASE + 2 + (STEPS - 1) * (16 + 8)


def test_hello_names_the_positions_of_the_router(bench):
    take_over(bench)
    step(bench)
    bench.feed(RouterUp("router-2"))
    held = {one.request: one for one in bench.take(Hello)[-1].requests}
    assert (held[KEY].position, held[KEY].prompt_length) == (BASE + 2, BASE)


def test_the_picture_is_repeated_with_its_terminal(bench):
    take_over(bench, steps=1)
    step(bench, b"png")
    assert bench.one(Terminal).media == b"png"
    bench.later(3.0)
    assert {terminal.media for terminal in bench.take(Terminal)} == {b"png"}
    bench.take(Tokens)
    bench.hear(Adopt(request=KEY, position=BASE), "router-2")
    assert bench.streamed() == [(BASE, 0), (BASE + 1, 1)]
    assert bench.one(Terminal).media == b"png"


def test_an_abort_between_steps_frees_the_blocks(bench):
    take_over(bench)
    step(bench)
    plan = bench.plans.pop(0)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used  # the step may still read them
    bench.feed(StepDone(StepResult(plan.step, (), 0.01, 1)))
    assert bench.cache.pool.used == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_params": {}},
        {"extra_params": {"base": np.array([0])}},
        {"height": 8},
        {"num_inference_steps": 251},
        {"tokens_2": WireTokens(np.arange(30, dtype=np.int32))},
        {"tokens_2": None},
        {"extra_params": {"base": np.array([BASE]), "seed": np.zeros(2)}},
    ],
)
def test_a_wrong_commit_fails_alone(bench, fields):
    bench.reserve(tokens=ROW)
    (grant,) = bench.to_peer(Grant)
    wire = msgspec.structs.replace(committed(), **fields)
    bench.commit(grant, bench.send(grant, ROW), context=wire, emitted=[0])
    refused = bench.to_peer(Refused)
    assert refused or bench.one(Terminal).code == "handoff_failed"
    assert bench.cache.pool.used == 0
