import struct

import msgspec
import pytest

from baton.proto import GenerationStatus, LogProbabilities, RequestID, TextGenerationOutput
from baton.proto.contexts.outputs import TokenLogProbs, token_output

A = LogProbabilities([-1.0], [{1: -1.0}])


def output(tokens, status=GenerationStatus.ACTIVE, log_probabilities=None, name="a"):
    return TextGenerationOutput(
        request_id=RequestID(name),
        tokens=tokens,
        final_status=status,
        log_probabilities=log_probabilities,
    )


def test_status_values_and_done():
    assert [str(status) for status in GenerationStatus] == [
        "active",
        "end_of_sequence",
        "maximum_length",
        "cancelled",
    ]
    assert [status.is_done for status in GenerationStatus] == [False, True, True, True]
    assert GenerationStatus("active") is GenerationStatus.ACTIVE


def test_merge_keeps_order_first_id_and_last_status():
    done = GenerationStatus.END_OF_SEQUENCE
    merged = TextGenerationOutput.merge([output([1]), output([2, 3], done, name="b")])
    assert merged == output([1, 2, 3], done)
    assert merged.is_done


def test_merge_of_one_is_itself_and_of_none_an_error():
    one = output([1])
    assert TextGenerationOutput.merge([one]) is one
    with pytest.raises(ValueError, match="empty"):
        TextGenerationOutput.merge([])


def test_merge_of_log_probabilities():
    merged = TextGenerationOutput.merge(
        [output([1], log_probabilities=[A]), output([2, 3], log_probabilities=[None, A])]
    )
    assert merged.log_probabilities == [A, None, A]
    with pytest.raises(ValueError, match="with and without"):
        TextGenerationOutput.merge([output([1], log_probabilities=[A]), output([2])])


def test_log_probabilities_wire_form():
    wire = TokenLogProbs.of(-0.5, {7: -0.5, 8: -1.5})
    assert LogProbabilities.of_token(wire).to_wire() == wire
    assert wire.packed == struct.pack("<2i2d", 7, 8, -0.5, -1.5)
    assert list(wire.top.items()) == [(7, -0.5), (8, -1.5)]
    assert TokenLogProbs.of(-1.0, {}).top == {}


@pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1])
def test_log_probabilities_of_no_token_are_not_sent(token):
    with pytest.raises(ValueError, match="cannot be sent"):
        TokenLogProbs.of(-0.5, {token: -0.5})


@pytest.mark.parametrize("size", [1, 11, 13, 252])
def test_bytes_that_are_no_likely_tokens_are_refused(size):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([0.5, bytes(size)]), type=TokenLogProbs)


def test_the_output_of_a_token_equals_a_constructed_one():
    name = RequestID("a")
    made = token_output(name, 5, GenerationStatus.ACTIVE)
    assert made == TextGenerationOutput(request_id=name, tokens=[5])
    assert repr(made) == repr(TextGenerationOutput(request_id=name, tokens=[5]))  # has all fields
