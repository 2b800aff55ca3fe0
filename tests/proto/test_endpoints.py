import pytest

from baton.proto import InputError
from baton.proto.wire.endpoints import check_endpoint, check_target_endpoint


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1:5555",
        "tcp://host.example:1",
        "tcp://[::1]:65535",
        "ipc:///run/baton/worker-0",
        "ipc://" + "x" * 107,
        "ipc://@abstract",
    ],
)
def test_good_targets(text):
    assert check_target_endpoint(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp",
        "tcp://",
        "tcp://:",
        "tcp://:5555",
        "tcp://host",
        "tcp://host:",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:000080",
        "tcp://host:-1",
        "tcp://host:+1",
        "tcp://host:٣",
        "tcp://host:1:2",
        "tcp://a b:1",
        "tcp://host/x:1",
        "tcp://::1:5555",
        "tcp://[host]:1",
        "tcp://[]:1",
        "tcp://h\n:1",
        "ipc://",
        "ipc://" + "x" * 108,
        "ipc://" + "é" * 54,
        "ipc://a\0b",
        "http://host:1",
        "TCP://host:1",
        "udp://host:1",
        "tcp://" + "h" * 600 + ":1",
    ],
)
def test_bad_endpoints(text):
    with pytest.raises(InputError):
        check_endpoint(text)
    with pytest.raises(InputError):
        check_target_endpoint(text)


def test_inproc_is_no_target():
    assert check_endpoint("inproc://router") == "inproc://router"
    with pytest.raises(InputError, match="tcp:// or ipc://"):
        check_target_endpoint("inproc://router")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10.0.0.1:7000", "tcp://10.0.0.1:7000"), ("10.0.0.1", "tcp://10.0.0.1:PORT"),
        ("localhost:7000", "tcp://localhost:7000"), ("[::1]:7000", "tcp://[::1]:7000"),
        ("/run/baton/baton.sock", "ipc:///run/baton/baton.sock"),
        ("nonsense", ""), ("http://host:1", ""), ("/" + "x" * 108, ""), ("10.0.0.1:x", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("check", [check_endpoint, check_target_endpoint])
def test_an_address_without_its_scheme_gets_a_hint(text, meant, check):
    with pytest.raises(InputError) as caught:
        check(text)
    message = str(caught.value)
    assert message.endswith(f"; did you mean {meant}?") if meant else "mean" not in message


def test_a_long_address_is_shown_short():
    with pytest.raises(InputError) as caught:
        check_endpoint("x" * 100_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(InputError) as caught:
        check_endpoint("x" * 300 + ":80")
    assert len(str(caught.value)) < 300
