"""``from baton import ...``: where users look for the names, and what the import costs."""

import pydoc
import subprocess
import sys

import pytest

import baton
import baton.client
from baton.client.environment import find_cluster
from baton.proto.errors import ConfigError


def test_the_public_names_are_found_and_shown():
    for module in (baton, baton.client):
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
        help_text = pydoc.plain(pydoc.render_doc(module))
        assert "class Client(" in help_text and "class AsyncClient(" in help_text
    with pytest.raises(AttributeError, match="Clint"):
        baton.Clint  # noqa: B018


def test_importing_the_package_loads_no_other_module():
    code = "import sys, baton; print([m for m in sys.modules if m.startswith(('baton.', 'numpy'))])"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


def test_without_an_address_the_environment_names_the_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_ADDRESS", "ipc:///run/a,ipc:///run/b")
    monkeypatch.setenv("BATON_KEYS", "/keys")
    assert find_cluster(None, None) == (("ipc:///run/a", "ipc:///run/b"), "/keys")
    assert find_cluster(None, "/own")[1] == "/own"
    assert find_cluster("tcp://h:1", None) == (("tcp://h:1",), None)
    monkeypatch.delenv("BATON_ADDRESS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert find_cluster(None, None)[0] == (f"ipc://{tmp_path}/baton.sock",)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write"):
        find_cluster(None, None)
