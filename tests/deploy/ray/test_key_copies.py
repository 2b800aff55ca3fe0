"""A node gets only its share of a key folder, although Ray copies the folder. No Ray needed."""

from pathlib import Path

import pytest

from baton.deploy.ray.key_copies import HEAD_ROLES, SharesKeys, roles_by_type
from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import add_key, make_folder

TYPES = {
    "head": {"resources": {"CPU": 0, "router": 1}},
    "prefill": {"resources": {"CPU": 1, "prefill": 1}},
    "big": {"resources": {"decode": 2, "prefill": 0}},
    "both": {"resources": {"decode": 1, "prefill": 1}},
    "other": {},
    "turning": {"resources": {"decode": 1, "turn": 1}},
    "router": {"resources": {"router": 1, "turn": 1}},
}


class Runner:
    """The copy method of Ray's command runner; records the files that a node would get."""

    def __init__(self) -> None:
        self.got: dict[str, set[str]] = {}
        self.sources: list[str] = []

    def run_rsync_up(self, source, target, options=None):
        assert options == {"docker_mount_if_possible": True}
        self.sources.append(source)
        path = Path(source)
        names = {p.name for p in path.iterdir()} if path.is_dir() else {path.name}
        self.got[target] = names

    def run(self, command):
        return f"ran {command}"


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "keys")
    add_key(tmp_path / "keys", "decode", [], "gpu7")
    add_key(tmp_path / "keys", "client", ["alice"])
    return tmp_path / "keys"


def copied(folder, roles, host=None) -> set[str]:
    runner = Runner()
    shares = SharesKeys(runner, roles, (lambda: host) if host else lambda: None)
    shares.run_rsync_up(f"{folder}/", "~/.baton/keys/", {"docker_mount_if_possible": True})
    assert not Path(runner.sources[0]).exists()  # the temporary copy is removed
    return runner.got["~/.baton/keys/"]


def test_whose_keys_a_node_type_gets():
    assert roles_by_type(TYPES, "head") == {
        "head": list(HEAD_ROLES), "prefill": ["prefill"], "big": ["decode"],
        "both": ["prefill", "decode"], "other": [], "turning": ["prefill", "decode"],
        "router": ["router"],
    }  # fmt: skip


def test_a_worker_gets_its_roles_secrets_and_the_head_all_but_clients(folder):
    assert copied(folder, ["prefill"], "gpu1") == {"allowed.toml", "prefill.key"}
    assert copied(folder, ["decode"], "gpu1") == {"allowed.toml", "decode.key"}
    assert copied(folder, ["decode"], "gpu7") == {"allowed.toml", "decode.key", "decode@gpu7.key"}
    assert copied(folder, []) == {"allowed.toml"}
    assert copied(folder, list(HEAD_ROLES)) == {
        "allowed.toml", "router.key", "operator.key", "prefill.key", "decode.key",
        "decode@gpu7.key",
    }  # fmt: skip


def test_other_files_and_commands_pass(folder, tmp_path):
    runner = Runner()
    shares = SharesKeys(runner, ["decode"])
    (tmp_path / "token").write_text("t")
    (tmp_path / "wheel").mkdir()
    for name in ("token", "wheel"):
        source = str(tmp_path / name)
        shares.run_rsync_up(source, name, {"docker_mount_if_possible": True})
        assert runner.sources[-1] == source
    assert shares.run("x") == "ran x"


def test_a_folder_that_cannot_be_used_is_not_copied(folder):
    (folder / "prefill.key").chmod(0o640)
    runner = Runner()
    with pytest.raises(ConfigError, match="chmod 600"):
        SharesKeys(runner, ["decode"]).run_rsync_up(str(folder), "x", {})
    assert runner.sources == []
