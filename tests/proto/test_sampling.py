import copy
import inspect
import math
import os
import pickle
import random
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import get_type_hints

import msgspec
import numpy as np
import pytest

from baton.proto import (
    InputError,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)
from baton.proto.sampling import ALIASES
from baton.proto.wire.wire_context import WireSampling

Defaults = SamplingParamsGenerationConfigDefaults


def test_defaults():
    params = SamplingParams(seed=3)
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (-1, 1, 0.0, 1)
    assert params.max_new_tokens is None
    assert params.detokenize
    assert not params.needs_penalties


def test_biases_are_kept_by_ascending_id():
    given = {np.int64(7): np.float32(0.5), 3: -100}
    params = SamplingParams(logit_bias=given)
    assert list(params.logit_bias.items()) == [(3, -100.0), (7, 0.5)]
    assert {type(item) for pair in params.logit_bias.items() for item in pair} == {int, float}
    again = SamplingParams.from_wire(params.to_wire())
    assert again == params
    assert SamplingParams(logit_bias={}).logit_bias == {}


def test_a_default_that_came_over_the_wire_is_left_out_again():
    sent = msgspec.msgpack.encode({"temperature": 1.0, "top_p": 1.0, "top_k": 5, "seed": 7})
    decode = msgspec.msgpack.Decoder(WireSampling).decode
    for _ in range(2):  # the second time from the values that passed before
        again = SamplingParams.from_wire(decode(sent))
    assert msgspec.msgpack.encode(again.to_wire()) == msgspec.msgpack.encode(
        {"top_k": 5, "seed": 7}
    )


def test_seeds_are_random_32_bit():
    seeds = {SamplingParams().seed for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < 1 << 32 for seed in seeds)
    before, drawn = random.getstate(), []
    for _ in range(2):  # a program that seeds its own generator
        random.seed(1)
        drawn.append(SamplingParams().seed)
    random.setstate(before)
    assert drawn[0] != drawn[1]
    answers, into = os.pipe()
    child = os.fork()
    if not child:
        os.write(into, str(SamplingParams().seed).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(answers, 32)) != SamplingParams().seed
    os.close(answers)
    os.close(into)


def test_none_and_zero_are_read_as_defaults():
    params = SamplingParams(top_k=None, top_p=None)
    assert (params.top_k, params.top_p) == (-1, 1)
    assert SamplingParams(top_k=0).top_k == -1


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ["end"]


def test_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0, top_k=50).top_k == 1


@pytest.mark.parametrize("top_k", [-1, 1, 2, 255])
def test_min_p_combines_with_any_top_k(top_k):
    assert SamplingParams(min_p=0.1, top_k=top_k).min_p == 0.1


@pytest.mark.parametrize(
    "values",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
    ],
)
def test_needs_penalties(values):
    assert SamplingParams(**values).needs_penalties


@pytest.mark.parametrize(
    "values",
    [
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": math.inf},
        {"top_k": -2},
        {"top_k": 256},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"frequency_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"min_new_tokens": -1},
        {"min_new_tokens": 3, "max_new_tokens": 2},
        {"seed": -1},
        {"seed": 1 << 64},
        {"stop": ["x"] * 17},
        {"stop": [""]},
        {"stop": ["x" * 129]},
        {"stop_token_ids": [1] * 65},
    ],
)
def test_impossible_values(values):
    with pytest.raises(InputError) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, ValueError)


# --------------------------------------------------------------------------- types of fields

HUGE = 10**400
NUMBERLESS = ["0.5", b"1", True, False, np.True_, [1], (1.0,), {}, object(), 1j, math.nan, HUGE]
WRONG_FLOATS = [*NUMBERLESS, math.inf, -math.inf, np.float64("nan"), -HUGE, 1e39]
WRONG_INTS = [*NUMBERLESS, 1.5, 50.0, np.float32(3), Fraction(1, 2), -2, -HUGE, math.inf]
WRONG_FLAGS = ["yes", "False", 0, 1, 1.0, [], {}, object()]
WRONG_BY_TYPE = {
    float: WRONG_FLOATS,
    int: WRONG_INTS,
    int | None: WRONG_INTS,
    bool: WRONG_FLAGS,
    list[str] | None: [5, 0.5, True, {"a": 1}, {"a"}, b"end", [1], ["a", None], [["a"]], [b"a"],
                       [""], ["x" * 129], ["\ud800"], ["x"] * 17, iter("ab")],
    list[int] | None: [5, "5", True, {1}, {1: 2}, [1.0], ["1"], [None], [True], [-1], [1 << 31],
                       [1] * 65, np.ones((1, 1), int), np.array([0.5]), range(3)],
}  # fmt: skip
WRONG_BIASES = [{"5": 1}, {-1: 1}, {1 << 31: 1}, {True: 1}, {1.0: 1}, {1: "1"}, {1: True}]
WRONG_BIASES += [{1: math.nan}, {1: 100.5}, {1: -101}, {1: None}, dict.fromkeys(range(1025), 1)]
WRONG_BY_NAME = {
    "logits_processors": [5, print, "f", [5], [None], {}],
    "logit_bias": [5, "5", [1], [(1, 2.0)], {1}, *WRONG_BIASES],
}
NULLABLE = {"max_new_tokens", "stop", "stop_token_ids", "logits_processors", "logit_bias"}
WRONG_FIELDS = [
    (name, value)
    for name, hint in get_type_hints(SamplingParams).items()
    if name in {item.name for item in fields(SamplingParams)}
    for value in WRONG_BY_NAME.get(name) or WRONG_BY_TYPE[hint]
]


@pytest.mark.parametrize("kind", [SamplingParams, SamplingParamsInput])
def test_help_and_editors_show_the_fields(kind):
    aliases = list(ALIASES) if kind is SamplingParams else []
    names = [item.name for item in fields(kind)]
    assert list(inspect.signature(kind).parameters) == names + aliases


def test_every_field_is_tried():
    assert {name for name, _ in WRONG_FIELDS} == {item.name for item in fields(SamplingParams)}
    assert [f.name for f in fields(SamplingParams)] == [f.name for f in fields(SamplingParamsInput)]


@pytest.mark.parametrize("kind", [SamplingParams, SamplingParamsInput])
@pytest.mark.parametrize(
    ("name", "value"),
    WRONG_FIELDS,
    ids=[f"{name}-{at}" for at, (name, _) in enumerate(WRONG_FIELDS)],
)
def test_a_wrong_type_or_value_of_any_field_is_refused_by_name(kind, name, value):
    with pytest.raises(InputError) as caught:
        kind(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert len(message) < 250


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SamplingParams(0.7), r"top_k must be .* not 0.7 \(float\).*temperature=0.7"),
        (lambda: SamplingParams(top_k=50.0), r"top_k must be .*write 50$"),
        (lambda: SamplingParams(max_new_tokens=5.0), r"max_new_tokens must be .*write 5$"),
        (lambda: SamplingParams(temperature="hot"), r"temperature must be .* not 'hot' \(str\)"),
        (lambda: SamplingParams(ignore_eos="yes"), "ignore_eos must be True or False"),
        (lambda: SamplingParams(stop=[1]), r"stop\[0\] must be text, not 1 \(int\)"),
        (lambda: SamplingParams(temp=1), "no 'temp'; did you mean temperature"),
        (lambda: SamplingParams(max_tokens=5, max_new_tokens=6), "two names of one parameter"),
        (lambda: SamplingParams(max_tokens=0), "max_new_tokens must be a whole number"),
        (lambda: SamplingParams(logprobs=5), "give log_probabilities=... to the call"),
        (lambda: SamplingParamsInput(max_tokens=5), "SamplingParamsInput has no 'max_tokens'"),
        (lambda: SamplingParams(5, top_k=5), "top_k is given to SamplingParams twice"),
        (lambda: SamplingParams(*[None] * 17), "at most 16 values"),
    ],
)
def test_the_message_names_the_mistake_and_the_cure(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_numbers_of_numpy_and_whole_floats_for_floats_are_taken():
    params = SamplingParams(
        top_k=np.int64(5), temperature=1, top_p=np.float32(0.5), seed=np.uint64(7),
        ignore_eos=np.True_, stop=("a", "b"), stop_token_ids=np.array([3, 4]),
    )  # fmt: skip
    plain = [params.top_k, params.temperature, params.top_p, params.seed, params.ignore_eos]
    assert plain == [5, 1.0, 0.5, 7, True]
    assert [type(value) for value in plain] == [int, float, float, int, bool]
    assert (params.stop, params.stop_token_ids) == (["a", "b"], [3, 4])
    assert [type(value) for value in params.stop_token_ids] == [int, int]


@pytest.mark.parametrize("name", [item.name for item in fields(SamplingParams)])
def test_none_means_unset_for_every_field(name):
    params = SamplingParams(**{name: None})
    assert params == SamplingParams(seed=params.seed)
    assert set(params.given) == {"seed"}


def test_a_value_assigned_later_is_checked_by_check():
    for name, value in [("temperature", "hot"), ("seed", 1.5), ("stop", [1])]:
        params = SamplingParams()
        setattr(params, name, value)
        with pytest.raises(InputError, match=name):
            params.check()


# --------------------------------------------------------------------------- unset fields


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), lambda p: p],
    ids=["copy", "deepcopy", "pickle", "same"],
)
def test_what_is_given_counts_over_the_models_defaults_and_nothing_else(again):
    config = Defaults(temperature=0.6, top_k=20, repetition_penalty=1.1, max_new_tokens=9)
    params = again(SamplingParams(-1, temperature=1.0, seed=3)).merged(config)
    assert (params.top_k, params.temperature) == (-1, 1.0), "given, though equal to the default"
    assert (params.repetition_penalty, params.max_new_tokens, params.seed) == (1.1, 9, 3)


def test_a_replaced_or_changed_field_counts_as_given():
    config = Defaults(temperature=0.6, top_k=20, top_p=0.9)
    params = replace(SamplingParams(top_p=0.5), max_new_tokens=4)
    params.top_k = 7
    merged = params.merged(config)
    assert (merged.temperature, merged.top_k, merged.top_p) == (0.6, 7, 0.5)
    assert merged.max_new_tokens == 4


def test_the_drawn_seed_is_used_and_only_an_unset_one_is_drawn_again():
    params = SamplingParams()
    assert params.merged(Defaults()).seed == params.seed
    assert len({params.reseeded().seed for _ in range(4)} - {params.seed}) > 1
    assert SamplingParams(seed=5).reseeded().seed == 5


def test_a_length_of_the_model_gives_way_to_the_users():
    config = Defaults(min_new_tokens=5, max_new_tokens=9)
    assert SamplingParams(max_new_tokens=2).merged(config).min_new_tokens == 2
    assert SamplingParams(min_new_tokens=20).merged(config).max_new_tokens is None


def test_v22_a_temperature_of_ones_own_ends_greedy_decoding():
    config = Defaults(do_sample=False, top_k=20)
    assert SamplingParams(temperature=0.8).merged(config).top_k == 20
    greedy = SamplingParams().merged(config)
    assert (greedy.temperature, greedy.top_k) == (0, 1)


def test_merging_again_gives_the_same_as_merging_first():
    config = Defaults(temperature=0.6, top_k=20)
    for given in ({}, {"top_p": 0.3}, {"stop": ["x"]}, {"temperature": 0.6}, {"seed": 4}):
        first, again = (SamplingParams(**{"seed": 9, **given}).merged(config) for _ in range(2))
        assert first == again and first is not again
        assert first._given == again._given
        assert again.merged(Defaults(temperature=0.1)).temperature == 0.6
    first.top_p = 0.1
    assert SamplingParams(seed=4).merged(config).top_p == 1.0, "a change stays with its object"
    assert SamplingParams(seed=4).merged(Defaults()).temperature == 1.0


@pytest.mark.parametrize(
    ("field", "good", "wrong"),
    [("top_k", 1, True), ("ignore_eos", True, 1), ("seed", 7, 7.5), ("seed", 7, -1)],
)
def test_a_merge_seen_before_is_not_taken_for_one_with_a_wrong_value(field, good, wrong):
    config = Defaults(temperature=0.3)
    params = SamplingParams(**{field: good})
    params.merged(config)
    setattr(params, field, wrong)
    with pytest.raises(InputError, match=field):
        params.merged(config)


def test_a_copy_with_a_seed_counts_it_as_given():
    params = SamplingParams(top_p=0.5)
    assert params.seeded(8).merged(Defaults()).seed == 8
    assert params.seeded(8).reseeded().seed == 8
    drawn = params.seeded(None)
    assert drawn.seed != params.seed or drawn.seed != params.seeded(None).seed
    assert drawn._given == params._given == ("top_p",)
    assert params.seeded(8) == SamplingParams(top_p=0.5, seed=8)
    with pytest.raises(InputError, match="seed"):
        params.seeded(1 << 64)


# --------------------------------------------------------------------------- the wire form


def test_values_seen_before_are_not_taken_for_others_that_are_equal():
    good = SamplingParams(temperature=1, seed=1).to_wire()
    assert SamplingParams.from_wire(good) == SamplingParams.from_wire(good)
    for seed in (-1, 1 << 64):
        with pytest.raises(InputError, match="seed"):
            SamplingParams.from_wire(msgspec.structs.replace(good, seed=seed))


def test_wire_round_trip():
    params = SamplingParams(
        top_k=5, top_p=0.9, min_p=0.1, temperature=0.7, seed=9, stop=["x"], stop_token_ids=[4],
        max_new_tokens=7, min_new_tokens=2, ignore_eos=True, detokenize=False,
        frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.3,
    )  # fmt: skip
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_code_cannot_travel():
    with pytest.raises(InputError, match="logits_processors"):
        SamplingParams(logits_processors=[print]).to_wire()


def test_the_first_wrong_field_is_named_and_a_subclass_may_have_more():
    @dataclass
    class Named(SamplingParams):
        label: str = ""

    assert Named(label="mine", top_k=5).label == "mine"
    for kind in (SamplingParams, Named):
        with pytest.raises(InputError, match=r"^top_p"):
            kind(top_p="a", seed="b", min_p="c", stop=[1], top_k="d")


def test_values_changed_later_are_checked_on_the_other_side():
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(InputError, match="temperature"):
        SamplingParams.from_wire(params.to_wire())


class TestMerge:
    def merge(self, given=None, config=None):
        return SamplingParams.from_input_and_generation_config(
            SamplingParamsInput(**(given or {})), Defaults(**(config or {}))
        )

    def test_user_over_config_over_default(self):
        params = self.merge({"temperature": 0.3}, {"temperature": 0.6, "top_k": 20})
        assert (params.temperature, params.top_k, params.top_p) == (0.3, 20, 1)

    def test_falsy_user_values_count(self):
        params = self.merge({"min_new_tokens": 0, "ignore_eos": False}, {"min_new_tokens": 5})
        assert params.min_new_tokens == 0

    def test_no_sampling_means_greedy(self):
        params = self.merge({}, {"do_sample": False, "temperature": 0.6, "top_k": 20})
        assert (params.temperature, params.top_k) == (0, 1)
        params = self.merge({"temperature": 0.5, "top_k": 3}, {"do_sample": False})
        assert (params.temperature, params.top_k) == (0.5, 3)
        assert self.merge({}, {"do_sample": True}).temperature == 1

    def test_nothing_is_shared_between_requests(self):
        stop, defaults = ["x"], Defaults(top_k=20)
        given = SamplingParamsInput(stop=stop, top_k=3)
        first = SamplingParams.from_input_and_generation_config(given, defaults)
        assert first.stop is not stop
        second = SamplingParams.from_input_and_generation_config(SamplingParamsInput(), defaults)
        assert (second.top_k, second.stop) == (20, None)
        assert defaults == Defaults(top_k=20)

    def test_values_to_update_are_those_set(self):
        assert Defaults(top_p=0.5, do_sample=False).values_to_update == {
            "top_p": 0.5,
            "do_sample": False,
        }
        assert Defaults().values_to_update == {}
