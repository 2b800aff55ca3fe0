"""From tokens to outputs: text, stop strings, ends."""

from __future__ import annotations

import pytest

from baton.client.events import Ended, NewTokens
from baton.client.output import Assembler
from baton.proto import GenerationStatus, InternalError, RequestFailed
from baton.proto.contexts.outputs import TokenLogProbs
from baton.text.detokenizer import IncrementalDetokenizer


def end(**kwargs):
    return Ended(request_id="r", position=20, **kwargs)


def test_nothing_follows_a_stop_string(tokenizer):
    tokens = tokenizer.encode("ab STOP cd", add_special_tokens=False).tolist()
    probs = [TokenLogProbs.of(-1.0, {}) for _ in tokens]
    assembler = Assembler(IncrementalDetokenizer(tokenizer, ["STOP"]), show_text=True)
    output = assembler.tokens(NewTokens("r", 5, tokens, probs))
    assert output.text == "ab " and assembler.stopped
    assert tokenizer.decode(output.tokens) == "ab STOP"
    assert len(output.log_probabilities) == len(output.tokens) < len(tokens)
    assert assembler.tokens(NewTokens("r", 15, [1])) is None
    last = assembler.end(end(status="cancelled", decode="d"))
    assert last.final_status is GenerationStatus.END_OF_SEQUENCE and last.text == ""
    assert last.position == 5 + len(output.tokens) and last.decode == "d"


def test_a_stopped_text_is_whole_whatever_happens_afterwards(tokenizer):
    tokens = tokenizer.encode("a STOP", add_special_tokens=False).tolist()
    assembler = Assembler(IncrementalDetokenizer(tokenizer, ["STOP"]), show_text=True)
    assembler.tokens(NewTokens("r", 5, tokens))
    last = assembler.end(end(error=RequestFailed("the worker died")))
    assert last.final_status is GenerationStatus.END_OF_SEQUENCE


def test_held_back_text_comes_with_the_end(tokenizer):
    tokens = tokenizer.encode("ab ST", add_special_tokens=False).tolist()
    assembler = Assembler(IncrementalDetokenizer(tokenizer, ["STOP"]), show_text=True)
    assert assembler.tokens(NewTokens("r", 5, tokens)).text == "ab "
    last = assembler.end(end(status="maximum_length"))
    assert last.text == "ST" and last.position == 20


def test_stop_strings_work_without_showing_text(tokenizer):
    tokens = tokenizer.encode("ab STOP", add_special_tokens=False).tolist()
    assembler = Assembler(IncrementalDetokenizer(tokenizer, ["STOP"]), show_text=False)
    assert assembler.tokens(NewTokens("r", 5, tokens)).text == ""
    assert assembler.stopped


def test_ends():
    assembler = Assembler(None, show_text=False)
    assert assembler.end(end(status="cancelled")).final_status is GenerationStatus.CANCELLED
    with pytest.raises(RequestFailed, match="broken"):
        assembler.end(end(error=RequestFailed("broken")))
    with pytest.raises(InternalError, match="sideways"):
        assembler.end(end(status="sideways"))
