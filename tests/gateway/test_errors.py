"""Every error of Baton has a status and OpenAI's shape."""

import json

import pytest

from baton.gateway.config import GatewayConfig
from baton.gateway.errors import ParameterError, error_json, headers_of, status_of
from baton.proto import errors
from baton.proto.errors import BatonError, CapacityError, ConfigError
from baton.runtime.keys.api_keys import is_loopback


def kinds(root=BatonError):
    yield root
    for child in root.__subclasses__():
        yield from kinds(child)


NATIVE = [kind for kind in kinds() if kind.__module__ == errors.__name__]
STATUS = {
    "input": 400, "context_length_exceeded": 400, "schema_too_complex": 400,
    "task_mismatch": 400, "feature_missing": 400,
    "endpoint_unknown": 404, "duplicate_request": 409, "overloaded": 429, "router_closing": 503,
    "endpoint_draining": 503, "endpoint_dead": 503, "name_taken": 429, "cancelled": 499,
    "model_contested": 429,
    "deadline_exceeded": 504, "worker_lost": 503, "poisoned": 500, "handoff_failed": 500,
    "failed": 500, "connection_lost": 503, "access_denied": 503, "limit_exceeded": 400,
}  # fmt: skip


@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.code)
def test_errors_have_a_status_and_a_shape(kind):
    error = kind("what happened")
    status = status_of(error)
    assert status == STATUS.get(kind.code, 500)
    assert json.loads(error_json(error)) == {
        "error": {
            "message": "what happened",
            "type": "rate_limit_error"
            if status == 429
            else "invalid_request_error"
            if status < 500
            else "server_error",
            "param": None,
            "code": kind.code,
        }
    }
    assert ("retry-after" in headers_of(error)) == (status in (429, 503))


def test_retry_after_is_whole_seconds():
    assert headers_of(CapacityError("full", retry_after=2.1)) == {"retry-after": "3"}
    assert headers_of(CapacityError("full", retry_after=0.05)) == {"retry-after": "1"}


def test_a_parameter_is_named():
    assert json.loads(error_json(ParameterError("x is wrong", "x")))["error"]["param"] == "x"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "give an API key"),
        ({"host": "::"}, "give an API key"),
        ({"host": "example.org"}, "give an API key"),
        ({"port": 70000}, "port"),
        ({"ssl_certfile": "x"}, "ssl_keyfile"),
        ({"api_keys": ("secret",)}, "digests"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        GatewayConfig(routers=("ipc:///tmp/x",), **settings)


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "host", "")))
    GatewayConfig(routers=("ipc:///tmp/x",), host="0.0.0.0", api_keys=("0" * 64,))


@pytest.mark.parametrize("names", [("",), (" ",), ("a", ""), ("a ",), ("a\n",), ("a", "b", "a")])
def test_names_of_the_model_that_cannot_be_are_refused(names):
    with pytest.raises(ConfigError, match="name of the served model"):
        GatewayConfig(routers=("ipc:///tmp/x",), model_names=names)
