"""Ray with a token and Baton with keys, and the errors without them."""

import os
import subprocess
import sys

import pytest

from baton.client import Client
from baton.proto.errors import BatonError

from ..cluster.streams import jobs
from .conftest import ADDRESS, BATON, launched

pytestmark = pytest.mark.timeout(120)

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}


def refused(*words: str, **environment: str) -> str:
    """Return the error of `baton launch`."""
    done = subprocess.run(
        [*BATON, "launch", "--backend", "ray", *words],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("baton: ")]
    assert len(said) == 1, done.stderr
    return said[0]


def test_without_a_head():
    assert "no Ray cluster runs on this machine" in refused()
    assert "no Ray head answers at 127.0.0.1:1" in refused("--ray-address", "127.0.0.1:1")


def test_token_and_keys(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    subprocess.run([*BATON, "keygen", str(keys)], check=True, capture_output=True)
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    with launched(tmp_path, {"keys": str(keys)}, keys=keys) as cluster:
        job = jobs(1, prompt=50, new=5)[0]
        with Client(ADDRESS, keys=keys, connect_timeout=20) as client:
            assert sum(len(o.tokens) for o in client.generate(job.prompt, job.params)) == 5
        with pytest.raises(BatonError), Client(ADDRESS, connect_timeout=1) as client:
            client.status()
        assert "requires a token" in refused(RAY_AUTH_TOKEN="f" * 32)
        assert "requires a token" in refused(RAY_AUTH_MODE="disabled")
        end_controller()
        assert "router" in cluster.baton("down", "--ray-address", "auto")
        assert cluster.members() == []


def end_controller() -> None:
    """Kill the controller permanently, like `ray kill`; its members keep running."""
    script = (
        "from baton.deploy.ray.connect import connect\n"
        "ray = connect()\n"
        "ray.kill(ray.get_actor('controller'), no_restart=True)"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True)
