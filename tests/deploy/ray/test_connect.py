"""Why a Ray cluster cannot be joined, said in time; no Ray is needed to be told."""

import socket
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest

from baton.deploy.ray import connect
from baton.deploy.ray.connect import HeadFacts
from baton.proto.errors import ConfigError, ConnectionLost

ROOT = Path(__file__).parents[3]


def test_the_version_is_the_one_that_the_extra_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ray"] == [f"ray=={connect.RAY_VERSION}"]


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'baton\[ray\]'"):
        connect.import_ray()


def test_another_ray_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__version__="2.9.0"))
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.0 is installed"):
        connect.import_ray()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000", "nonsense", ""])
def test_nobody_at_the_address(address):
    with pytest.raises(ConnectionLost, match="no Ray head answers"):
        connect.ask_head(address)


def test_something_else_at_the_address(monkeypatch):
    """It takes the connection and never says a word."""
    monkeypatch.setattr(connect, "PROBE_TIMEOUT", 0.5)
    monkeypatch.setattr(connect, "PROBE", ("-c", "import time; time.sleep(60)"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="does not answer as a Ray head"):
            connect.ask_head(f"127.0.0.1:{server.getsockname()[1]}")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ("ray.exceptions.AuthenticationError: RPC error: x", ConfigError, "RAY_AUTH_TOKEN_PATH"),
        ("but no authentication token was found\n", ConfigError, "RAY_AUTH_TOKEN_PATH"),
        ("Traceback\nRuntimeError: it broke\n", ConnectionLost, "it broke"),
        ("", ConnectionLost, "no message"),
    ],
)
def test_what_the_head_refuses(monkeypatch, said, error, words):
    script = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    monkeypatch.setattr(connect, "PROBE", ("-c", script))
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(error, match=words):
        connect.ask_head(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (HeadFacts("2.59.0", "3.11.7", []), "runs Ray 2.59.0"),
        (HeadFacts("", "", []), "no known version"),
        (HeadFacts(connect.RAY_VERSION, "3.9.1", []), "runs Python 3.9.1"),
    ],
)
def test_a_head_of_another_version_is_refused(facts, words):
    with pytest.raises(ConfigError, match=words):
        connect.check_versions("10.0.0.1:6379", facts)


def test_a_machine_outside_the_cluster_is_told_so():
    connect.check_here("a:1", HeadFacts("", "", ["203.0.113.9", "127.0.0.1"]))
    with pytest.raises(ConfigError, match=r"no node of .*203\.0\.113\.9"):
        connect.check_here("a:1", HeadFacts("", "", ["203.0.113.9"]))
