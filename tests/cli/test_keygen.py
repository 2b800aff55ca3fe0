"""``baton keygen``: exit codes and output; secrets appear only in their files."""

import os
import stat

import pytest

from baton.cli.command import main
from baton.runtime.keys.keyring import KeyRing


@pytest.fixture
def folder(tmp_path):
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def test_a_folder_is_made_once(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keygen", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.count("made ") == 5
    for path in folder.glob("*.key"):
        assert KeyRing(folder, path.stem).pair.secret.decode() not in said
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["keygen", str(folder)]) == 2
    assert "is not empty; existing keys are kept unchanged" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_whatever_the_umask_secrets_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        assert main(["keygen", str(tmp_path / "keys")]) == 0
        assert main(["keygen", str(tmp_path / "keys"), "--add", "decode", "--host", "gpu7"]) == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    assert modes.pop("allowed.toml") == 0o644
    assert set(modes.values()) == {0o600}
    assert "decode@gpu7.key" in modes


def test_add_rotate_retire_revoke(folder, capsys):
    assert main(["keygen", str(folder), "--add", "decode", "--name", "decode-1"]) == 0
    assert "decode-1.key (decode, names decode-1)" in capsys.readouterr().out
    assert main(["keygen", str(folder), "--rotate", "decode-1"]) == 0
    assert "then run --retire" in capsys.readouterr().out
    assert main(["keygen", str(folder), "--retire", "decode-1"]) == 0
    assert capsys.readouterr().out.startswith("revoked ")
    assert main(["keygen", str(folder), "--revoke", "decode-1"]) == 0
    assert main(["keygen", str(folder), "--revoke", "decode-1"]) == 2
    assert "has no key 'decode-1'" in capsys.readouterr().err


def test_options_that_mean_nothing_together(folder, capsys):
    assert main(["keygen", str(folder), "--name", "x"]) == 2
    assert "--name needs --add ROLE" in capsys.readouterr().err
    assert main(["keygen", str(folder), "--host", "x"]) == 2
    assert "--host needs --add ROLE or --for ROLES" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["keygen", str(folder), "--add", "boss", "--name", "x"])
