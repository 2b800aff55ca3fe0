"""Pictures on the core of a prefill worker: the row, the handoff, and replays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.picture_requests import STATE_VOCABULARY, base_length, state_tokens
from baton.proto.requests import check_continued
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.messages import Accepted, Adopt, Hello, Reserve, Terminal, Tokens
from baton.worker.events import RouterUp

from ..model_cards import model_card
from . import test_core as core
from .test_core import KEY, LAYOUT, SECOND, Bench, generated, make_context

CARD = model_card(
    task="draw", kinds=["PixelContext"], vocab_size=STATE_VOCABULARY, max_length=200, layout=LAYOUT
)
PROMPT, STEPS = 5, 6
ROW = 25  # 20 vectors and the pooled one in 24 positions, and the last one


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(core, "CARD", CARD)
    return Bench()


def picture(**fields):
    prompts = [TokenBuffer(np.arange(count, dtype=np.int64)) for count in (PROMPT, 20)]
    settings = {"height": 64, "width": 64, "num_inference_steps": STEPS, **fields}
    return to_map(PixelContext(tokens=prompts[0], tokens_2=prompts[1], **settings))


def test_a_whole_life(bench):
    bench.assign(context=picture())
    assert bench.one(Accepted).attempt == 1
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert (reserve.num_tokens, reserve.growth) == (ROW, STEPS + 1)  # of all steps
    assert len(reserve.hashes) == ROW // LAYOUT.block_size
    bench.grant(reserve)
    (plan,) = bench.plans
    (chunk,) = plan.chunks
    assert (chunk.start, len(chunk.tokens)) == (0, ROW)  # more than the budget of 16
    assert chunk.tokens.tolist() == state_tokens(picture(), LAYOUT.block_size).tolist()
    bench.step(0)
    (run,) = bench.one(Tokens).runs
    assert (run.position, run.tokens) == (PROMPT, [0])
    commit = bench.commit()
    assert (generated(commit), base_length(commit.context), commit.request_id) == ([0], PROMPT, "r")
    check_continued(commit.context, CARD)
    bench.committed(commit)
    bench.assert_empty()


def test_blocks_are_reserved_for_all_steps(bench):
    """A step must not wait for a block: the state cannot be computed again by a decode worker."""
    bench.assign(context=picture(num_inference_steps=150))
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.growth == 151


def test_a_long_row_is_sent_at_the_end_of_its_step(monkeypatch):
    """Its layers are not reported during the step, as those of a long prompt are."""
    monkeypatch.setattr(core, "CARD", CARD)
    bench = Bench(stream_tokens=4)
    bench.computing(context=picture())
    assert bench.plans[0].chunks[0].stream_layers
    bench.step(0)
    commit = bench.commit()
    assert commit.bytes == 2 * LAYOUT.blocks_for(ROW) * LAYOUT.block_bytes
    bench.committed(commit)
    bench.assert_empty()


@pytest.mark.parametrize("emitted", [[0], [0, 1, 2], list(range(STEPS + 1))])
def test_a_replay_starts_from_the_seed(bench, emitted):
    """Also if the client has every step: the picture went down with its decode worker."""
    bench.assign(context=picture(), attempt=2, emitted=emitted)
    assert not bench.take(Terminal)
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert (reserve.num_tokens, reserve.growth) == (ROW, STEPS + 1)
    bench.grant(reserve)
    bench.step(0)
    (run,) = bench.one(Tokens).runs
    assert (run.position, run.tokens) == (PROMPT, [0])  # the router drops it
    assert generated(bench.commit()) == [0]


def test_routers_are_told_their_own_positions(bench):
    bench.computing(context=picture())
    bench.step(0)
    bench.take(Tokens)
    bench.hear(Adopt(request=KEY, position=PROMPT), "router-2")
    (run,) = bench.one(Tokens).runs
    assert (run.position, run.tokens) == (PROMPT, [0])
    bench.feed(RouterUp("router-2"))
    (held,) = bench.take(Hello)[-1].requests
    assert (held.position, held.prompt_length) == (PROMPT + 1, PROMPT)


def test_the_same_prompt_again_computes_one_position(bench):
    bench.committed(bench.handing_over(context=picture()))
    bench.assign(key=SECOND, context=picture(height=32, num_inference_steps=2))
    (reserve,) = bench.to_peer(Reserve)
    bench.grant(reserve, cached=ROW - 1)
    (plan,) = bench.plans
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] == [(ROW - 1, 1)]
    bench.step(0)
    commit = bench.commit()
    assert commit.bytes == 2 * LAYOUT.block_bytes  # the block of the last position
    assert commit.cached_tokens == ROW - 1


def test_each_prompt_has_its_own_step(bench):
    bench.assign(context=picture())
    bench.open()
    bench.grant()
    other = msgspec.structs.replace(picture(), tokens=make_context(PROMPT).tokens)
    bench.assign(key=SECOND, context=other)
    bench.grant()
    for _ in range(2):
        assert [len(chunk.tokens) for chunk in bench.plans[0].chunks] == [ROW]
        bench.step(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_inference_steps": 10**6}, "num_inference_steps must be"),
        ({"width": 24}, "multiple of 16"),
        ({"tokens_2": None}, "tokens_2 are missing"),
        ({"extra_params": {"seed": np.zeros(2)}}, "seed must be"),
        ({"num_inference_steps": 200}, "need 226 positions"),
        ({"task": "generate"}, "does not serve task"),
    ],
)
def test_wrong_requests_end_before_anything_is_reserved(bench, fields, message):
    bench.assign(context=msgspec.structs.replace(picture(), **fields))
    assert message in bench.one(Terminal).message
    assert not bench.to_peer(Reserve)
    bench.assert_empty()


def test_text_is_refused(bench):
    bench.assign(context=make_context())
    assert "does not serve task" in bench.one(Terminal).message
