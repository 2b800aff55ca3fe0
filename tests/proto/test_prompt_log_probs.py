"""Records of prompt tokens: their form, their limits, and the requests that cannot have them."""

import numpy as np
import pytest

from baton.proto.errors import DecodeFailed, InputError
from baton.proto.limits import MAX_CHUNK_BYTES
from baton.proto.prompt_log_probs import (
    PromptLogProb,
    check_prompt_log_probs,
    read_prompt_log_probs,
    record_type,
    records_bytes,
)
from baton.proto.requests import build_wire_context
from baton.proto.sampling import SamplingParams

from ..model_cards import model_card


def records(*rows, top=2):
    return np.array(list(rows), record_type(top)).tobytes()


def test_entries_have_the_prompts_tokens_and_as_many_alternatives_as_asked():
    data = records((-0.5, 1, [7, 8], [-0.5, -2]), (-3, 9, [1, 0], [-0.25, -0.5]))
    first, second, third = read_prompt_log_probs(data, [5, 7, 6], top=2, shown=1)
    assert first == PromptLogProb(5, None, 0, {})
    assert second == PromptLogProb(7, -0.5, 1, {7: -0.5})
    assert third == PromptLogProb(6, -3.0, 9, {1: -0.25})
    assert read_prompt_log_probs(b"", [5], top=2, shown=2) == [PromptLogProb(5)]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_bytes_of_another_prompt_are_refused(tokens):
    with pytest.raises(DecodeFailed, match="not the records"):
        read_prompt_log_probs(records((0, 1, [1, 2], [0, 0])), tokens, top=2, shown=2)


def test_the_largest_prompt_is_named_in_the_refusal():
    for top in (1, 5, 20):
        most = MAX_CHUNK_BYTES // record_type(top).itemsize + 1
        check_prompt_log_probs(most, top)
        assert records_bytes(most, top) <= MAX_CHUNK_BYTES
        with pytest.raises(InputError, match=f"the limit is {most} tokens"):
            check_prompt_log_probs(most + 1, top)


def test_only_prompts_of_text_have_them():
    card = model_card()
    params = SamplingParams(max_new_tokens=2)
    wire = build_wire_context(
        [1, 2, 3], card, params, log_probabilities=1, log_probabilities_echo=True
    )
    assert wire.log_probabilities_echo
    with pytest.raises(InputError, match="at least 1"):
        build_wire_context([1, 2, 3], card, params, log_probabilities_echo=True)
