"""Log-probabilities of completions: most likely tokens, and where each token's text begins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.text.conftest import DEMO_FOLDER, SENTENCEPIECE_DECODERS, sentencepiece_core

from baton.client.output import Output
from baton.gateway.answers import Choice, CompletionForm, TokenTexts
from baton.proto.contexts.outputs import LogProbabilities
from baton.proto.contexts.status import GenerationStatus
from baton.proto.prompt_log_probs import PromptLogProb
from baton.text.tokenizer import Tokenizer

TEXT = "the fox é🦊 walked"


@pytest.fixture(params=["bytes", *sorted(SENTENCEPIECE_DECODERS)])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer.from_folder(DEMO_FOLDER)
    core = sentencepiece_core(SENTENCEPIECE_DECODERS[request.param])
    return Tokenizer.from_files({"tokenizer.json": core.to_str().encode()}, trusted=True)


def lists_of(
    tokenizer: Tokenizer, tokens: list[int], top: int, likely: dict[int, float], prompt: str = ""
) -> dict[str, Any]:
    """The lists of a whole answer, which those of a stream with one token per event must equal."""
    entries = [LogProbabilities([-2.0], [likely]) for _ in tokens]
    form = CompletionForm(TokenTexts(tokenizer, top), [prompt])
    choice = Choice(0, entries=list(zip(tokens, entries, strict=True)))
    found: dict[str, Any] = form.whole(choice)["logprobs"]

    stream, joined = CompletionForm(TokenTexts(tokenizer, top), [prompt]), dict.fromkeys(found)
    for token, entry in zip(tokens, entries, strict=True):
        output = Output(
            request_id="r", tokens=[token], text="", position=0, log_probabilities=[entry]
        )
        (part,) = stream.parts(Choice(0), output)
        for name, values in part["logprobs"].items():
            joined[name] = values and (joined[name] or []) + values
    assert joined == found
    return found


def assert_ends(text: str, offsets: list[int], before: list[str]) -> None:
    """Each token begins where the text before it ends, unless this ends inside a character."""
    whole = [at for at, one in enumerate(before) if "\ufffd" not in one]
    assert len(whole) > 5
    assert [text[: offsets[at]] for at in whole] == [before[at] for at in whole]


def test_offsets_count_from_the_beginning_of_the_prompt(tokenizer):
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    text, prompt = tokenizer.decode(tokens), "Once: "
    offsets = lists_of(tokenizer, tokens, 1, {}, prompt)["text_offset"]
    assert offsets[0] == len(prompt)
    # A token begins where the text before it ends; a part of a character, where that begins.
    assert offsets == sorted(offsets) and len(set(offsets)) < len(offsets)
    assert_ends(
        prompt + text,
        offsets,
        [prompt + tokenizer.decode(tokens[:at]) for at in range(len(tokens))],
    )


def test_offsets_of_an_echoed_prompt_leave_out_special_tokens(tokenizer):
    tokens = tokenizer.encode(TEXT).tolist()
    scored = [PromptLogProb(one, None if not at else -1.0, 1, {}) for at, one in enumerate(tokens)]
    choice = Choice(0, scored=scored)
    form = CompletionForm(TokenTexts(tokenizer, 1), [TEXT], echo=True)
    found = form.whole(choice)["logprobs"]
    assert len(found["text_offset"]) == len(tokens) and found["top_logprobs"][0] is None
    before = [tokenizer.decode(tokens[:at]) for at in range(len(tokens))]
    assert_ends(TEXT, found["text_offset"], before)


def test_the_drawn_token_is_among_the_most_likely_ones(tokenizer):
    one, two, three, drawn = tokenizer.encode("the fox walked by", add_special_tokens=False)[-4:]
    shown = [tokenizer.token_bytes(int(token)).decode() for token in (one, two, three, drawn)]
    likely = {int(one): -0.5, int(two): -1.0, int(three): -1.5}
    for top in (1, 2):
        (tops,) = lists_of(tokenizer, [int(drawn)], top, likely)["top_logprobs"]
        values = itertools.islice(likely.values(), top)
        assert tops == {shown[3]: -2.0, **dict(zip(shown, values, strict=False))}
    (tops,) = lists_of(tokenizer, [int(two)], 2, likely)["top_logprobs"]
    assert tops == {shown[0]: -0.5, shown[1]: -1.0}


def test_without_likely_tokens_the_list_of_them_is_null(tokenizer):
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    found = lists_of(tokenizer, tokens, 0, {tokens[0]: -0.5})
    assert found["top_logprobs"] is None
    assert found["token_logprobs"] == [-2.0] * len(tokens)


def test_tokens_of_a_cut_stop_string_begin_at_or_beyond_the_end_of_the_text(tokenizer):
    tokens = tokenizer.encode("the fox walked", add_special_tokens=False).tolist()
    entry = LogProbabilities([-2.0], [{}])
    choice = Choice(0)
    outputs = [
        Output(request_id="r", tokens=tokens, text="the", position=5,
               log_probabilities=[entry] * len(tokens)),
        Output(request_id="r", tokens=[], text="", position=5 + len(tokens),
               final_status=GenerationStatus.END_OF_SEQUENCE),
    ]  # fmt: skip
    for output in outputs:
        choice.take(output, log_probs=True)
    found = CompletionForm(TokenTexts(tokenizer, 1), ["Once: "]).whole(choice)
    offsets = found["logprobs"]["text_offset"]
    assert choice.tokens == len(offsets) and found["text"] == "the"
    assert [at for at in offsets if at >= len("Once: the")]
