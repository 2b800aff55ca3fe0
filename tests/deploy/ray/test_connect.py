"""Errors when a Ray cluster cannot be joined, and their time limits. No Ray needed."""

import re
import socket
import sys
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
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[ray\]'$"):
        connect.import_ray()


def test_another_ray_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__version__="2.9.0"))
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.0 is installed"):
        connect.import_ray()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000", "nonsense", ""])
def test_nobody_at_the_address(address):
    with pytest.raises(ConnectionLost, match="no Ray head answers"):
        connect.ask_head(address)


@pytest.fixture
def listener():
    """Yield the address of a socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_listener_that_never_answers_is_probed_until_patience_ends(monkeypatch, listener):
    monkeypatch.setattr(connect, "PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr(connect, "PROBE", ("-c", "import time; time.sleep(60)"))
    with pytest.raises(ConnectionLost) as lost:
        connect.ask_head(listener, patience=2.0)
    said = re.fullmatch(r"(.*) probed (\d+) times in (\d+) s, last result: (.*)", str(lost.value))
    assert said and int(said[2]) > 1 and said[4].startswith("no answer within ")
    assert "give --ray-address" in said[4]


FLAKY = """
import pathlib, sys, time
seen = pathlib.Path({seen!r})
with seen.open("a") as file:
    file.write("x")
tries = len(seen.read_text())
if tries == 1:
    time.sleep(60)
if tries == 2:
    sys.exit("RuntimeError: the head is still starting")
print('{{"ray_version": "1", "python_version": "2", "nodes": []}}')
"""


def test_a_head_that_answers_at_the_third_probe_is_joined(monkeypatch, capsys, listener, tmp_path):
    script = FLAKY.format(seen=str(tmp_path / "seen"))
    monkeypatch.setattr(connect, "PROBE_TIMEOUT", 1.0)
    monkeypatch.setattr(connect, "PROBE", ("-c", script))
    assert connect.ask_head(listener) == HeadFacts("1", "2", [])
    assert capsys.readouterr().err.count("does not answer yet; probing it again") == 1


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ("ray.exceptions.AuthenticationError: RPC error: x", ConfigError, "RAY_AUTH_TOKEN_PATH"),
        ("but no authentication token was found\n", ConfigError, "RAY_AUTH_TOKEN_PATH"),
        ("Traceback\nRuntimeError: it broke\n", ConnectionLost, "it broke"),
        ("", ConnectionLost, "no message"),
    ],
)
def test_what_the_head_refuses(monkeypatch, listener, said, error, words):
    script = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    monkeypatch.setattr(connect, "PROBE", ("-c", script))
    with pytest.raises(error, match=words):
        connect.ask_head(listener, patience=0.0 if error is ConnectionLost else 60.0)


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
    with pytest.raises(ConfigError, match=r"not a node of .*203\.0\.113\.9"):
        connect.check_here("a:1", HeadFacts("", "", ["203.0.113.9"]))
