"""The share of a key folder for each host."""

import stat

import pytest

from baton.cli.command import main
from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import KeyRing, add_key, make_folder, revoke
from baton.runtime.keys.shares import secrets_for, write_share


@pytest.fixture
def folder(tmp_path):
    """A folder with keys of roles, of two hosts, of one worker and of a user."""
    folder = tmp_path / "keys"
    make_folder(folder)
    add_key(folder, "decode", [], "gpu7")
    add_key(folder, "decode", [], "gpu8")
    add_key(folder, "decode", ["decode-3"])
    add_key(folder, "prefill", ["odd"])  # the file name differs from the role
    add_key(folder, "client", ["alice"])
    return folder


def names(paths) -> set[str]:
    return {path.name.removesuffix(".key") for path in paths}


@pytest.mark.parametrize(
    ("roles", "host", "stems"),
    [
        (["prefill"], "gpu7", {"prefill", "odd"}),
        (["decode"], "gpu7", {"decode", "decode-3", "decode@gpu7"}),
        (["decode"], "", {"decode", "decode-3"}),
        (["decode"], None, {"decode", "decode-3", "decode@gpu7", "decode@gpu8"}),
        (["router", "operator"], "", {"router", "operator"}),
        (["client"], "", {"client", "alice"}),
    ],
)
def test_a_host_gets_the_secrets_of_its_roles_alone(folder, tmp_path, roles, host, stems):
    assert names(secrets_for(folder, roles, host)) == stems
    write_share(folder, tmp_path / "share", roles, host)
    made = {path.name for path in (tmp_path / "share").iterdir()}
    assert made == {"allowed.toml", *(f"{stem}.key" for stem in stems)}
    assert stat.S_IMODE((tmp_path / "share").stat().st_mode) == 0o700
    for stem in stems:
        assert stat.S_IMODE((tmp_path / f"share/{stem}.key").stat().st_mode) == 0o600
    for role in roles:
        assert KeyRing(tmp_path / "share", role).entry.role == role


def test_a_withdrawn_or_damaged_secret_goes_nowhere(folder, tmp_path):
    text = (folder / "decode-3.key").read_text()
    revoke(folder, "decode-3")
    (folder / "decode-3.key").touch(0o600)
    (folder / "decode-3.key").write_text(text)
    assert "decode-3" not in names(secrets_for(folder, ["decode"]))
    (folder / "decode.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        write_share(folder, tmp_path / "share", ["prefill"])
    assert not (tmp_path / "share").exists()


@pytest.mark.parametrize(
    ("roles", "said"), [(["boss"], "unknown role 'boss'"), ([""], "unknown role ''")]
)
def test_a_share_that_cannot_be(folder, tmp_path, roles, said):
    with pytest.raises(ConfigError, match=said):
        write_share(folder, tmp_path / "share", roles)


def test_a_share_without_a_key_is_none(folder, tmp_path):
    revoke(folder, "router")
    with pytest.raises(ConfigError, match="has no router key for this host"):
        write_share(folder, tmp_path / "share", ["prefill", "router"])
    assert not (tmp_path / "share").exists()


def test_what_is_there_is_kept(folder, tmp_path):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="is not empty"):
        write_share(folder, folder, ["decode"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"keys"}


def test_the_verb(folder, tmp_path, capsys):
    share = tmp_path / "a" / "share"
    words = ["keygen", str(folder), "--for", "decode", "--host", "gpu8", "--to", str(share)]
    assert main(words) == 0
    assert "decode.key decode@gpu8.key" in capsys.readouterr().out
    assert main(["keygen", str(folder), "--for", "decode"]) != 0
    assert main(["keygen", str(folder), "--to", str(share)]) != 0
    assert main(["keygen", str(folder), "--host", "gpu8"]) != 0
    assert capsys.readouterr().err.count("\n") == 3
