import msgspec
import numpy as np
import pytest

from baton.proto import (
    InputError,
    SamplingParams,
    TextAndVisionContext,
    TTSContext,
    build_wire_context,
    check_wire_context,
)
from baton.proto.errors import TaskMismatch
from baton.proto.layout import ModelCard
from baton.proto.requests import (
    _is_usual,
    build_embed_context,
    check_emitted,
    check_kind,
    check_wire_shape,
)
from baton.proto.wire.context_maps import request_map
from baton.proto.wire.wire_context import WireSampling, WireTokens

from ..model_cards import model_card

CARD = model_card(name="demo", vocab_size=1000, eos_token_ids=[3, 2], features=["logit_bias"])


def build(tokens=(1, 2, 3), params=None, **fields):
    return build_wire_context(tokens, CARD, params or SamplingParams(), **fields)


def changed(**fields):
    return msgspec.structs.replace(build(), **fields)


def array(*tokens, dtype=np.int32):
    return WireTokens(np.array(tokens, dtype))


class TestBuild:
    def test_lengths_follow_the_request_and_the_model(self):
        assert build().max_length == 64
        assert build(params=SamplingParams(max_new_tokens=5)).max_length == 8
        assert build(params=SamplingParams(max_new_tokens=500)).max_length == 64
        assert build(max_length=20, params=SamplingParams(max_new_tokens=30)).max_length == 20

    def test_user_stops_travel_as_sequences_beside_the_models_ids(self):
        params = SamplingParams(stop_token_ids=[7, 8], stop=["x"], ignore_eos=True)
        wire = build(params=params, stop_sequences=[[5, 6]])
        assert wire.eos_token_ids == [2, 3]
        assert wire.eos_sequences == [[7], [8], [5, 6]]
        assert wire.ignore_eos
        assert wire.sampling.stop == ["x"]

    @pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int32])
    def test_any_integers_become_int32(self, dtype):
        wire = build(np.array([1, 2, 3], dtype))
        assert wire.tokens.array.dtype == np.int32
        assert wire.tokens.array.tolist() == [1, 2, 3]

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ([], "empty"),
            ([1.0], "integers"),
            (["a"], "integers"),
            ([[1]], "one-dimensional"),
            ([1, 1 << 40], f"{1 << 40} at position 1"),
            (np.array([1, (1 << 32) - 1], np.uint32), "at position 1"),
            ([1, -1], "-1 at position 1"),
            ([1, 1000, 2000], "1000 at position 1 .* 1000"),
            ([1] * 64, "64 tokens, limit 63"),
        ],
    )
    def test_bad_tokens(self, tokens, message):
        with pytest.raises(InputError, match=message):
            build(tokens)

    def test_the_longest_prompt(self):
        assert len(build([1] * 63).tokens) == 63


class TestCheck:
    def test_a_good_request_passes(self):
        check_wire_context(build(params=SamplingParams(top_k=3, min_new_tokens=4)), CARD)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"tokens": array()}, "empty"),
            ({"tokens": array(1, dtype=np.int64)}, "int32"),
            ({"tokens": array(1, dtype=np.float32)}, "int32"),
            ({"tokens": WireTokens(np.ones((2, 2), np.int32))}, "one-dimensional"),
            ({"tokens": WireTokens(np.ones((), np.int32))}, "one-dimensional"),
            ({"tokens": array(5, -7, -8)}, "-7 at position 1"),
            ({"tokens": array(5, 6, 1000)}, "1000 at position 2"),
            ({"max_length": 65}, "65 .* 64"),
            ({"max_length": 3}, "3 .* 3 tokens"),
            ({"max_length": -1}, "-1"),
            ({"json_schema": "x" * ((128 << 10) + 1)}, "json_schema has 131073"),
            ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos"),
            ({"json_schema": "{}", "sampling": WireSampling(ignore_eos=True)}, "ignore_eos"),
            ({"sampling": WireSampling(logit_bias={1 << 30: 1.0})}, "logit_bias has token id"),
            ({"json_schema": "{}", "eos_token_ids": []}, "end-of-sequence"),
            ({"log_probabilities_echo": True}, "log_probabilities_echo"),
            ({"log_probabilities": 21}, "0 to 20"),
            ({"log_probabilities": -1}, "0 to 20"),
            ({"lora_name": "l"}, "lora_name"),
            ({"cache_salt": "x" * 257}, "cache_salt"),
            ({"model_name": "other"}, "'other' .* 'demo'"),
            ({"eos_token_ids": [1] * 65}, "64"),
            ({"eos_token_ids": [1, 1 << 30]}, "vocabulary"),
            ({"eos_token_ids": [-1]}, "vocabulary"),
            ({"eos_sequences": [[1]] * 81}, "81 stop sequences"),
            ({"eos_sequences": [[]]}, "1 to 128"),
            ({"eos_sequences": [[1] * 129]}, "1 to 128"),
            ({"eos_sequences": [[1, 1000]]}, "vocabulary"),
            ({"eos_sequences": [[-1]]}, "vocabulary"),
            ({"target_endpoint": "tcp://:"}, "host:port"),
            ({"sampling": WireSampling(temperature=-1)}, "temperature"),
            ({"sampling": WireSampling(stop=["x"] * 17)}, "17 stop strings"),
            ({"sampling": WireSampling(min_new_tokens=62)}, "62 .* 3 .* 64"),
            ({"sampling": WireSampling(max_new_tokens=0)}, "max_new_tokens"),
        ],
    )
    def test_what_is_wrong_is_said(self, fields, message):
        with pytest.raises(InputError, match=message):
            check_wire_context(changed(**fields), CARD)

    def test_a_request_of_the_most_frequent_kind_is_recognised(self):
        assert _is_usual(build(), CARD)
        assert _is_usual(build(range(60), SamplingParams(temperature=0.5, seed=7)), CARD)
        assert _is_usual(build(range(60), SamplingParams(ignore_eos=True)), CARD)
        assert _is_usual(changed(ignore_eos=True), CARD)

    @pytest.mark.parametrize(
        "fields",
        [
            {"cache_salt": "s"},
            {"ignore_eos": True, "cache_salt": "s"},
            {"eos_sequences": [[1]]},
            {"eos_token_ids": [2]},
            {"log_probabilities": 3},
            {"target_endpoint": "ipc:///decode-0"},
            {"sampling": WireSampling(logit_bias={5: 1.0})},
        ],
    )
    def test_all_checks_are_made_of_other_requests(self, fields):
        card = msgspec.structs.replace(CARD, features=["logit_bias"])
        assert not _is_usual(changed(**fields), card)
        check_wire_context(changed(**fields), card)

    def test_a_model_without_text_takes_no_text(self):
        with pytest.raises(InputError, match="takes no text"):
            check_wire_context(build(), msgspec.structs.replace(CARD, kinds=["TTSContext"]))

    def test_messages_stay_short(self):
        with pytest.raises(InputError) as caught:
            check_wire_context(changed(model_name="m" * 100_000), CARD)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("context", "takes"),
    [
        (
            TextAndVisionContext(max_length=9, tokens=[1], pixel_values=(np.zeros(1),)),
            "takes no images",
        ),
        (TTSContext(max_length=9, tokens=[1]), "takes no requests for speech"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_that_the_card_does_not_name_are_refused(context, takes):
    wire = request_map(context)
    for check in (check_wire_context, check_kind):
        with pytest.raises(InputError, match=f"{takes} .{type(context).__name__}"):
            check(wire, CARD)
    check_kind(wire, msgspec.structs.replace(CARD, kinds=["TextContext", type(context).__name__]))


def test_the_card_of_an_older_worker_takes_text_only():
    older = msgspec.to_builtins(CARD)
    del older["kinds"]
    assert msgspec.convert(older, ModelCard).kinds == ["TextContext"]


class TestEmbed:
    card = msgspec.structs.replace(CARD, task="embed", embedding_size=8)

    def embed(self, tokens=(1, 2, 3), **fields):
        return msgspec.structs.replace(build_embed_context(tokens, self.card), **fields)

    def test_a_text_may_fill_the_whole_context(self):
        assert self.embed(range(64)).max_length == 64
        with pytest.raises(InputError, match="limit 64"):
            self.embed(range(65))
        check_wire_shape(self.embed(range(64)))
        with pytest.raises(InputError, match="do not fit"):
            check_wire_shape(self.embed(max_length=2))
        with pytest.raises(InputError, match="no room"):
            check_wire_context(self.embed(max_length=2), self.card)

    def test_text_still_needs_room_for_a_token(self):
        with pytest.raises(InputError, match="do not fit"):
            check_wire_shape(changed(max_length=3))

    @pytest.mark.parametrize(
        ("tokens", "message"), [((), "empty"), ((1000,), "outside"), ((-1,), "outside")]
    )
    def test_tokens_are_looked_at(self, tokens, message):
        with pytest.raises(InputError, match=message):
            self.embed(tokens)

    def test_each_model_does_its_own_task(self):
        with pytest.raises(TaskMismatch, match="generation model"):
            build_embed_context([1, 2], CARD)
        with pytest.raises(TaskMismatch, match="embedding model"):
            check_wire_context(build(), self.card)
        with pytest.raises(InputError, match="known are generate, embed and draw"):
            check_wire_shape(self.embed(task="sing"))
        with pytest.raises(TaskMismatch):
            check_wire_context(self.embed(task="sing"), self.card)

    def test_nothing_was_ever_emitted(self):
        check_emitted(self.embed(), [], self.card)
        with pytest.raises(InputError):
            check_emitted(self.embed(), [5], self.card)

    def test_models_of_different_tasks_do_not_meet(self):
        assert CARD.mismatch(self.card) == ("task", "generate", "embed")
