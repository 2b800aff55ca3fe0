"""The traceparent header of W3C Trace Context."""

import pytest

from baton.proto.trace_context import TraceContext, parse_traceparent

TRACE, SPAN = "4b" * 16, "5c" * 8


def test_a_header_names_trace_parent_and_flags():
    found = parse_traceparent(f" 00-{TRACE}-{SPAN}-01 ")
    assert found == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled=True)
    assert found.traceparent == f"00-{TRACE}-{SPAN}-01"
    assert not parse_traceparent(f"00-{TRACE}-{SPAN}-02").sampled
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more").traceparent.startswith("00-")


@pytest.mark.parametrize(
    "header",
    [
        "", "00", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-x",
        f"00-{TRACE}-{SPAN}-01" + "-" + "x" * 99,
    ],
)  # fmt: skip
def test_other_headers_name_none(header):
    assert parse_traceparent(header) is None
