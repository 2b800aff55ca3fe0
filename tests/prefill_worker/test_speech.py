"""A replay of speech on a prefill worker: its tokens belong to a decode worker, with chunks."""

from __future__ import annotations

import pytest

from baton.proto.wire.messages import Aborted, Adopt, Reserve, Terminal, Tokens
from baton.proto.wire.wire_context import WireSampling, WireSpeechContext, WireTokens

from ..model_cards import model_card
from . import test_core as core
from .test_core import KEY, LAYOUT, Bench, generated

CARD = model_card(
    architecture="LlamaForCausalLM",
    max_length=200,
    eos_token_ids=[0],
    layout=LAYOUT,
    kinds=["TextContext", "TTSContext"],
)


@pytest.fixture
def speaker(monkeypatch):
    monkeypatch.setattr(core, "CARD", CARD)
    return Bench()


def speech(new=8):
    text = core.make_context()
    return WireSpeechContext(
        tokens=WireTokens(text.tokens.array),
        max_length=200,
        sampling=WireSampling(temperature=0.0, max_new_tokens=new),
        eos_token_ids=[0],
    )


def test_the_first_token_is_sent_at_once(speaker):
    speaker.assign(context=speech())
    speaker.open()
    speaker.grant(*speaker.to_peer(Reserve))
    speaker.step()
    (run,) = speaker.one(Tokens).runs
    assert (run.position, run.tokens, run.media) == (10, [42], None)


def test_a_replay_hands_over_the_tokens_of_the_router_and_no_other(speaker):
    """The sampled token, 42, may differ from the one that the client has: that one counts."""
    speaker.assign(context=speech(), attempt=2, emitted=[50, 51])
    speaker.open()
    (reserve,) = speaker.to_peer(Reserve)
    assert (reserve.num_tokens, reserve.growth) == (11, 7)
    speaker.grant(reserve)
    speaker.step()
    assert not speaker.take(Tokens)
    speaker.hear(Adopt(request=KEY, position=10), "router-2")
    (run,) = speaker.one(Tokens).runs
    assert (run.position, run.tokens) == (10, [])  # it is here, but its chunks are not
    assert generated(speaker.commit()) == [50, 51]


@pytest.mark.parametrize(
    ("emitted", "status"), [([5, 0], "end_of_sequence"), ([5] * 8, "maximum_length")]
)
def test_an_end_is_repeated_only_to_a_router_that_has_all_tokens(speaker, emitted, status):
    speaker.assign(context=speech(), emitted=emitted)
    terminal = speaker.one(Terminal)
    end = 10 + len(emitted)
    assert (terminal.status, terminal.position) == (status, end)
    speaker.hear(Adopt(request=KEY, position=end - 1), "router-2")
    assert speaker.one(Aborted).attempt == 0
    speaker.hear(Adopt(request=KEY, position=end), "router-2")
    assert speaker.one(Terminal).status == status
    assert not speaker.take(Tokens)
