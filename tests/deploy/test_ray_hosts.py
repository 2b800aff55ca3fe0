"""The usable hosts, the hosts in use, and their file. No Ray needed."""

import subprocess
import sys

import pytest

from baton.deploy.ray.hosts import (
    HostBook,
    check_mounts,
    check_node_types,
    host_of,
    provider_settings,
)
from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import make_folder

SECTION = {
    "type": "external",
    "module": "baton.deploy.ray.provider.FixedHosts",
    "pools": {"head": ["10.0.0.1"], "decode": ["10.0.0.2", "10.0.0.3"]},
}
TYPES = {"head": {"max_workers": 0}, "decode": {"min_workers": 1, "max_workers": 2}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pool": {}}, "unknown field `pool`"),
        ({"pools": {"decode": ["gpu-1"]}}, "'gpu-1' is not an IP address"),
        ({"pools": {"head": ["10.0.0.1"], "decode": ["10.0.0.1"]}}, "in head and decode"),
        ({"pools": {"decode": ["10.0.0.1", "10.0.0.1"]}}, "in decode and decode"),
        ({"pools": ["10.0.0.1"]}, "Expected `object`"),
        ({"grace": -1}, "grace must not be negative"),
    ],
)
def test_a_wrong_section_is_named(change, said):
    with pytest.raises(ConfigError, match=said):
        provider_settings({**SECTION, **change})


def test_what_ray_adds_to_the_section_is_let_be():
    assert provider_settings({**SECTION, "_config_cache_path": "/x"}).python == "python3.11"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode": {"max_workers": 3}}, "max_workers 3, but provider.pools.decode has 2 hosts"),
        ({"decode": {"min_workers": 2, "max_workers": 1}}, "needs 0 <= min <= max"),
        ({"decode": {"min_workers": -1, "max_workers": 1}}, "needs 0 <= min <= max"),
        ({"decode": {"node_config": {"InstanceType": "p5"}}}, "node_config must be"),
        ({"prefill": {}}, "'prefill' is missing from provider.pools"),
    ],
)
def test_node_types_that_do_not_fit_the_hosts_are_named(change, said):
    pools = provider_settings(SECTION).pools
    check_node_types(pools, TYPES, "head")
    with pytest.raises(ConfigError, match=said):
        check_node_types(pools, {**TYPES, **change}, "head")
    with pytest.raises(ConfigError, match="missing from available_node_types"):
        check_node_types({**pools, "prefill": ("10.0.0.9",)}, TYPES, "head")


def test_what_is_copied_to_hosts_must_be_there_and_secrets_their_owners(tmp_path):
    make_folder(tmp_path / "keys")
    key, token, wheel = tmp_path / "keys/prefill.key", tmp_path / "token", tmp_path / "b.whl"
    token.touch(mode=0o600)
    wheel.touch()
    paths = [str(tmp_path / "keys"), str(token), str(wheel)]
    check_mounts(paths)
    for secret, said in ((key, "others may use it: chmod 600"), (token, "others can read .*token")):
        secret.chmod(0o640)
        with pytest.raises(ConfigError, match=said):
            check_mounts(paths)
        secret.chmod(0o600)
    (tmp_path / "keys").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it: chmod 700"):
        check_mounts(paths)
    (tmp_path / "keys").chmod(0o700)
    key.rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match="has no prefill key"):
        check_mounts(paths)
    (tmp_path / "kept").rename(key)
    token.unlink()
    with pytest.raises(ConfigError, match=r"token does not exist; create keys with `baton keygen`"):
        check_mounts(paths)


def test_an_id_is_new_with_every_launch_and_tells_its_host(tmp_path):
    book = HostBook(tmp_path / "nodes" / "c.json")
    with book.open() as state:
        first = state.launch("10.0.0.2", {"kind": "worker"})
        del state.nodes[first]
        second = state.launch("10.0.0.2", {"kind": "worker"})
    assert first != second and host_of(first) == host_of(second) == "10.0.0.2"
    with HostBook(tmp_path / "nodes" / "c.json").open() as state:
        assert state.matching({"kind": "worker"}) == [second] and state.matching({"x": "y"}) == []
    assert (tmp_path / "nodes").stat().st_mode & 0o077 == 0
    assert book.path.stat().st_mode & 0o077 == 0


def test_a_block_that_fails_changes_nothing(tmp_path):
    book = HostBook(tmp_path / "c.json")
    with pytest.raises(ZeroDivisionError), book.open() as state:
        state.launch("10.0.0.2", {})
        _ = 1 / 0
    with book.open() as state:
        assert state.nodes == {} and state.launches == 0


def test_a_damaged_file_says_which_and_what_to_do(tmp_path):
    book = HostBook(tmp_path / "c.json")
    book.path.write_bytes(b'{"launches": "x"}')
    with pytest.raises(ConfigError, match=r"c\.json is damaged .*; remove it"), book.open():
        pass


LAUNCH_MANY = """
import os, pathlib, sys
from baton.deploy.ray.hosts import HostBook
for _ in range(50):
    with HostBook(pathlib.Path(sys.argv[1])).open() as state:
        state.launch("10.0.0.2", {"pid": str(os.getpid())})
"""


def test_processes_at_once_lose_no_launch(tmp_path):
    path = tmp_path / "c.json"
    command = [sys.executable, "-P", "-c", LAUNCH_MANY, str(path)]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    with HostBook(path).open() as state:
        assert state.launches == 150 and len(state.nodes) == 150
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "c.lock"]
