from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto.errors import InputError
from baton.text.stop import StopMatcher, stop_sequences
from baton.text.tokenizer import Tokenizer

DEMO_FOLDER = Path(__file__).parents[2] / "deploy" / "demo_model"

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The definition: read one character at a time until some stop string is complete."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text: str, stop: list[str], cuts: list[int]) -> tuple[str, str | None]:
    matcher = StopMatcher(stop)
    bounds = [0, *sorted(cuts), len(text)]
    out = "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(bounds))
    if matcher.matched is None:
        out += matcher.finish()
    return out, matcher.matched


@settings(max_examples=300)
@given(st.text(alphabet="abc", max_size=24), st.lists(WORDS, max_size=4), st.data())
def test_any_division_gives_the_definition(text, stop, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert run(text, stop, cuts) == reference(text, stop)


def test_holds_back_only_what_may_become_a_stop_string():
    matcher = StopMatcher(["</s>", "\n\nUser:"])
    assert matcher.push("Hello <") == "Hello "
    assert matcher.push("/") == ""
    assert matcher.push("p> \n") == "</p> "
    assert matcher.push("\nUse") == ""
    assert matcher.push("r: x") == ""
    assert matcher.matched == "\n\nUser:"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_finish_gives_the_held_start():
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") + matcher.finish() == "the EN"


@pytest.mark.parametrize("stop", [[""], ["x" * 129], [str(n) for n in range(17)], [3]])
def test_impossible_stop_strings(stop):
    with pytest.raises(InputError):
        StopMatcher(stop)


def test_stop_sequences_of_a_byte_level_vocabulary(demo):
    stop = ["<|im_end|>", "fox", " owl.", "été"]
    sequences = stop_sequences(demo, stop)
    assert sequences[0] == [2]
    assert [demo.decode(ids, skip_special_tokens=False) for ids in sequences] == stop


def test_a_sequence_always_shows_as_its_stop_string(demo):
    rng = random.Random(3)
    for text in ["fox", " owl.", "été", "\n\n", "12"]:
        (ids,) = stop_sequences(demo, [text])
        for _ in range(20):
            before = [rng.randrange(1024) for _ in range(4)]
            assert text in demo.decode([*before, *ids, rng.randrange(1024)])


def test_no_sequence_for_a_text_the_tokenizer_changes():
    files = {"tokenizer.json": (DEMO_FOLDER / "tokenizer.json").read_bytes()}
    content = json.loads(files["tokenizer.json"])
    content["normalizer"] = {"type": "Lowercase"}
    files["tokenizer.json"] = json.dumps(content).encode()
    assert len(stop_sequences(Tokenizer.from_files(files), ["FOX", "fox"])) == 1


def test_other_vocabularies_give_only_added_tokens(sentencepiece):
    assert stop_sequences(sentencepiece, ["the fox", "</s>"]) == [[sentencepiece.eos_token_id]]
