"""Ports of KV events: no two workers share one, and the last worker's fits."""

import pytest

from baton.deploy.config import ServeSettings, check, kv_events_of
from baton.proto.errors import ConfigError


def test_no_two_workers_share_a_port():
    settings = ServeSettings(kv_events="tcp://127.0.0.1:5557")
    names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(20)]
    ports = [int(kv_events_of(settings, name).rpartition(":")[2]) for name in names]
    assert len({*ports, *(port + 1 for port in ports)}) == 80
    assert min(ports) == 5557


def test_without_an_address_there_is_none():
    assert kv_events_of(ServeSettings(), "decode-3") == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_events": "ipc:///x"}, "not of the form"),
        ({"kv_events": "tcp://127.0.0.1:65530", "decode": 3}, "needs port"),
        ({"kv_events": "tcp://127.0.0.1:65500", "prefill_max": 20}, "needs port"),
    ],
)
def test_a_wrong_setting_is_named(fields, words):
    with pytest.raises(ConfigError, match=f"^kv_events .*{words}"):
        check(ServeSettings(**fields))
