import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampling.reference import running_sums, sample_reference
from baton.engine.sampling.sampler import _invert, _Sums, is_greedy, log_probs, sample
from baton.engine.scheduling.plan import SampleSpec
from baton.proto.errors import InternalError
from baton.proto.sampling import SamplingParams

EMPTY = np.empty(0, np.int32)


class Mask:
    """A grammar whose mask never changes."""

    def __init__(self, allowed):
        self.row = np.asarray(allowed, np.bool_)

    def allowed(self):
        return self.row.copy()


def only(size, *tokens):
    row = np.zeros(size, np.bool_)
    row[list(tokens)] = True
    return Mask(row)


def spec_of(position=0, history=EMPTY, prompt_length=0, banned=(), logprobs=0, mask=None, **params):
    params.setdefault("seed", 1)
    return SampleSpec(
        SamplingParams(**params),
        position,
        np.asarray(history, np.int32),
        prompt_length,
        banned,
        logprobs,
        mask,
    )


def draw(logits, **spec):
    return sample(np.asarray(logits, np.float32), spec_of(**spec))[0]


def frequencies(logits, count=4000, **spec):
    """Relative frequency of each token over many positions."""
    logits = np.asarray(logits, np.float32)
    tokens = [sample(logits, spec_of(position=p, **spec))[0] for p in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


@settings(max_examples=300)
@given(
    data=st.data(),
    size=st.integers(2, 40),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    rounded=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-40, 0.01, 0.8, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 39, 200]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1 - 1e-16, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    frequency=st.sampled_from([0.0, 0.4, -1.0]),
    presence=st.sampled_from([0.0, 0.6]),
    allowed=st.sampled_from([None, 0.1, 0.5, 0.9]),
    biases=st.dictionaries(st.integers(0, 1), st.sampled_from([-100, -0.3, 1e-7, 2.5, 100])),
)
def test_equals_the_reference(
    data, size, scale, rounded, temperature, top_k, top_p, min_p, repetition, frequency, presence,
    allowed, biases,
):  # fmt: skip
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    logits = (scale * rng.standard_normal(size)).astype(np.float32)
    if rounded:
        logits = np.round(logits)  # many ties
    history = rng.integers(0, size, data.draw(st.integers(0, 30)))
    mask = None
    if allowed is not None:
        mask = Mask(rng.random(size) < allowed)
        mask.row[rng.integers(0, size)] = True
    spec = spec_of(
        mask=mask,
        position=data.draw(st.integers(0, 1 << 40)),
        history=history,
        prompt_length=len(history) // 2,
        banned=tuple(int(t) for t in rng.integers(0, size, data.draw(st.integers(0, 1)))),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=biases,
        seed=data.draw(st.integers(0, (1 << 64) - 1)),
    )
    untouched = logits.copy()
    token = sample(logits, spec)[0]
    assert token == sample_reference(logits, spec)
    assert mask is None or mask.row[token]
    np.testing.assert_array_equal(logits, untouched)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99999])
@pytest.mark.parametrize("scale", [0.1, 4.0])
@pytest.mark.parametrize("size", [128, 129, 300, 5000])
def test_equals_the_reference_over_many_blocks_of_sums(top_p, scale, size):
    rng = np.random.default_rng(3)
    logits = (scale * rng.standard_normal(size)).astype(np.float32)
    for position in range(5):
        spec = spec_of(position=position, top_p=top_p, temperature=0.8)
        assert sample(logits, spec)[0] == sample_reference(logits, spec)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 255, 256, 257, 1000, 8192, 8193, 8400])
def test_order_of_summation_is_the_documented_one(size):
    rng = np.random.default_rng(size)
    weights = np.exp(10 * rng.standard_normal(size)).astype(np.float32)
    expected = running_sums(list(weights))
    sums = _Sums(weights)
    assert sums.total == expected[-1]
    for i in range(0, size, 7):
        assert sums.find(expected[i], "left") == expected.index(expected[i])


def test_greedy_takes_the_lowest_id_of_equals():
    assert draw([1, 3, 3, 2], temperature=0) == 1
    assert draw([1, 3, 3, 2], top_k=1) == 1
    assert is_greedy(SamplingParams(temperature=0))
    assert not is_greedy(SamplingParams(temperature=0.1))


def test_draws_follow_the_softmax():
    logits = np.log([0.5, 0.3, 0.2])
    np.testing.assert_allclose(frequencies(logits), [0.5, 0.3, 0.2], atol=0.03)
    hot = np.array([0.5, 0.3, 0.2]) ** 0.5
    np.testing.assert_allclose(frequencies(logits, temperature=2.0), hot / hot.sum(), atol=0.03)


def test_a_draw_depends_on_seed_and_position_only():
    logits = np.zeros(1000, np.float32)
    again = [draw(logits, position=p, seed=9) for p in range(20)]
    assert again == [draw(logits, position=p, seed=9) for p in range(20)]
    assert again != [draw(logits, position=p, seed=8) for p in range(20)]
    assert len(set(again)) > 15


def test_top_k_keeps_the_lowest_ids_among_equals():
    assert np.flatnonzero(frequencies([2, 1, 1, 1, 0], top_k=3, count=300)).tolist() == [0, 1, 2]


def test_top_p_keeps_the_shortest_list_that_reaches_it():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.flatnonzero(frequencies(logits, top_p=0.65, count=300)).tolist() == [0, 1]
    assert np.flatnonzero(frequencies(logits, top_p=0.0, count=50)).tolist() == [0]
    shares = frequencies(logits, top_p=0.65)
    np.testing.assert_allclose(shares[:2], [4 / 7, 3 / 7], atol=0.03)


def test_top_p_is_reached_by_equality():
    assert np.flatnonzero(frequencies(np.zeros(4), top_p=0.5, count=200)).tolist() == [0, 1]


def test_draw_on_a_border_takes_the_next_token():
    weights = np.array([0, 1, 1, 1, 1, 0], np.float32)
    assert [_invert(weights, u) for u in (0.0, 0.2, 0.25, 0.5, 0.99)] == [1, 1, 2, 3, 4]
    assert _invert(weights, 1.0) == 4  # rounding: never a token of weight 0


def test_min_p_is_relative_to_the_best():
    logits = np.log([0.1, 0.5, 0.26, 0.14])
    assert np.flatnonzero(frequencies(logits, min_p=0.5, count=300)).tolist() == [1, 2]


def test_repetition_penalty_covers_prompt_and_generated():
    logits = [4.0, -1.0, 3.9, -1.2]
    options = {"history": [0, 1, 1], "prompt_length": 2, "temperature": 0}
    assert draw(logits, repetition_penalty=1.1, **options) == 2  # 4 / 1.1 < 3.9
    negative = [-1.0, -1.05]
    assert draw(negative, history=[0], prompt_length=1, repetition_penalty=1.1, temperature=0) == 1


def test_frequency_and_presence_penalties_cover_generated_only():
    logits = [2.0, 1.5, 0.0]
    history = [0, 0, 0, 1, 0, 0]
    everywhere = {"history": history, "temperature": 0}
    assert draw(logits, prompt_length=6, frequency_penalty=1.0, **everywhere) == 0
    assert draw(logits, prompt_length=4, frequency_penalty=1.0, **everywhere) == 1
    assert draw(logits, prompt_length=4, frequency_penalty=0.2, **everywhere) == 0
    assert draw(logits, prompt_length=4, presence_penalty=0.6, **everywhere) == 1
    assert draw(logits, prompt_length=4, presence_penalty=0.4, **everywhere) == 0


def test_banned_tokens_are_not_drawn():
    assert draw([5, 4, 3], banned=(0, 1), temperature=0) == 2
    assert frequencies([5, 4, 3], banned=(1,), count=200)[1] == 0
    with pytest.raises(InternalError):
        draw([5, 4, 3], banned=(0, 1, 2))


def test_only_what_a_grammar_allows_is_drawn():
    logits = [5, 4, 3, 2]
    assert draw(logits, mask=only(4, 2, 3), temperature=0) == 2
    assert np.flatnonzero(frequencies(logits, mask=only(4, 1, 3), count=300)).tolist() == [1, 3]
    with pytest.raises(InternalError, match="no token is left"):
        draw(logits, mask=only(4))


def test_filters_see_only_what_a_grammar_allows():
    logits = np.log([0.5, 0.2, 0.2, 0.1])
    mask = only(4, 1, 2, 3)
    shares = frequencies(logits, mask=mask)
    np.testing.assert_allclose(shares, [0, 0.4, 0.4, 0.2], atol=0.03)
    assert np.flatnonzero(frequencies(logits, mask=mask, top_k=2, count=200)).tolist() == [1, 2]
    assert np.flatnonzero(frequencies(logits, mask=mask, top_p=0.7, count=200)).tolist() == [1, 2]
    assert np.flatnonzero(frequencies(logits, mask=mask, min_p=0.6, count=200)).tolist() == [1, 2]


def test_bans_hold_beside_a_grammar_unless_it_leaves_nothing_else():
    assert draw([5, 4, 3], banned=(0,), mask=only(3, 0, 2), temperature=0) == 2
    assert draw([5, 4, 3], banned=(1,), mask=only(3, 1), temperature=0) == 1


def test_log_probs_do_not_know_the_grammar():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    token, logprobs = sample(logits, spec_of(mask=only(3, 0), logprobs=1))
    assert token == 0
    assert logprobs.logprob == pytest.approx(np.log(0.1), abs=1e-6)
    assert list(logprobs.top) == [1]


def test_biases_come_before_penalties():
    logits = [1.0, 2.0, 0.0]
    assert draw(logits, temperature=0, logit_bias={0: 1.5}) == 0
    assert draw(logits, temperature=0, logit_bias={1: -100}) == 0
    doubled = {"temperature": 0, "history": [2], "repetition_penalty": 0.5}
    assert draw(logits, **doubled, logit_bias={2: 1.25}) == 2  # (0 + 1.25) / 0.5
    assert draw(logits, **doubled, logit_bias={2: 0.75}) == 1
    shares = frequencies([0.0, 0.0], logit_bias={1: float(np.log(3))})
    assert shares[1] == pytest.approx(0.75, abs=0.03)
    row = np.zeros(3, np.float32)
    _, entry = sample(row, spec_of(temperature=0, logit_bias={2: 5}, logprobs=1))
    assert entry == log_probs(row, 2, 1)
    with pytest.raises(InternalError, match="outside"):
        draw(logits, logit_bias={3: 1})


def test_logits_processors_run_on_a_copy():
    def favour_last(row):
        row[-1] = 100.0

    logits = np.zeros(4, np.float32)
    spec = spec_of(logits_processors=[favour_last])
    assert sample(logits, spec)[0] == 3
    assert logits[-1] == 0


def test_ids_outside_the_vocabulary_are_refused():
    for token in (-999, 4):
        with pytest.raises(InternalError):
            draw([1, 2, 3, 4], history=[token], prompt_length=0, frequency_penalty=1.0)


def test_log_probs_are_of_the_raw_logits():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    token, logprobs = sample(logits, spec_of(banned=(1,), temperature=0, logprobs=2))
    assert token == 2
    assert logprobs.logprob == pytest.approx(np.log(0.3), abs=1e-6)
    assert list(logprobs.top) == [1, 2]
    assert logprobs.top[1] == pytest.approx(np.log(0.6), abs=1e-6)
    assert sample(logits, spec_of())[1] is None


def test_log_probs_of_ties_and_of_more_than_there_are():
    logprobs = log_probs(np.array([1, 2, 2, 2, 0], np.float32), 4, 2)
    assert list(logprobs.top) == [1, 2]
    assert len(log_probs(np.zeros(3, np.float32), 0, 20).top) == 3
