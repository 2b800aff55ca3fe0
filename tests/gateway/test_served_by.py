"""Headers with the workers and times of an answer."""

import pytest

from baton.client.output import Output
from baton.gateway.served_by import served_by
from baton.proto.wire.messages import ServedTimes


def lines(prefill="", decode="", served=None):
    output = Output(
        request_id="r", tokens=[], text="", position=0, prefill=prefill, decode=decode,
        served=served,
    )  # fmt: skip
    return served_by(output)


def test_all_that_is_known():
    assert lines("prefill-0", "decode-1", ServedTimes(0.001, 0.0205, 0.0004, 0.03)) == (
        b"x-baton-prefill: prefill-0\r\nx-baton-decode: decode-1\r\n"
        b"server-timing: queue;dur=1.000, prefill;dur=20.500, handoff;dur=0.400, "
        b"first-token;dur=30.000\r\n"
    )


def test_what_is_not_known_is_left_out():
    assert lines() == b""
    assert lines("prefill-0") == b"x-baton-prefill: prefill-0\r\n"
    assert lines(served=ServedTimes()) == b""
    assert (
        lines(served=ServedTimes(first_token=1.0)) == b"server-timing: first-token;dur=1000.000\r\n"
    )


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "größe", "\u2028", '"quoted"', "\x00"])
def test_no_name_adds_a_header(name):
    found = lines(name)
    assert found.count(b"\r\n") == 1
    assert found.isascii()
    assert found.removeprefix(b"x-baton-prefill: ").removesuffix(b"\r\n").isalnum() is False
