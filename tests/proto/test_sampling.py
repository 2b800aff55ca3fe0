import math

import pytest

from baton.proto import (
    InputError,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)

Defaults = SamplingParamsGenerationConfigDefaults


def test_defaults():
    params = SamplingParams(seed=3)
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (-1, 1, 0.0, 1)
    assert params.max_new_tokens is None
    assert params.detokenize
    assert not params.needs_penalties


def test_seeds_are_random_32_bit():
    seeds = {SamplingParams().seed for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < 1 << 32 for seed in seeds)


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
