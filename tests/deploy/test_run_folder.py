import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton.deploy.local import run_folder
from baton.deploy.local.run_folder import RunFolder, remove_dead_socket, socket_in_use, sweep
from baton.proto.errors import ConfigError


def test_is_private_and_removed_on_close(tmp_path):
    folder = RunFolder(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    config = folder.write("router.json", b"{}")
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_folder_is_not_swept(tmp_path):
    folder = RunFolder(tmp_path)
    assert sweep(tmp_path) == []
    assert folder.path.exists()
    folder.close()


def test_the_folder_of_a_killed_process_is_swept_with_its_socket(tmp_path):
    public = tmp_path / "public.sock"
    code = (
        "import os, signal, socket, sys\n"
        "from pathlib import Path\n"
        "from baton.deploy.local.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]))\n"
        "socket.socket(socket.AF_UNIX).bind(sys.argv[2])\n"
        "folder.own_socket(Path(sys.argv[2]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(public)],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert public.exists()
    assert len(sweep(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_folders_without_a_lock_are_left_alone(tmp_path):
    (tmp_path / "baton-run-other").mkdir()
    assert sweep(tmp_path) == []
    assert (tmp_path / "baton-run-other").exists()


def test_a_listened_socket_and_a_plain_file_survive(tmp_path):
    plain, path = tmp_path / "file", tmp_path / "s"
    plain.write_text("x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert socket_in_use(path)
        remove_dead_socket(path)
        remove_dead_socket(plain)
        assert path.exists()
        assert plain.exists()
    remove_dead_socket(path)
    assert not path.exists()


def test_a_long_folder_is_a_clear_error(tmp_path: Path):
    parent = tmp_path / ("x" * 100)
    parent.mkdir()
    folder = RunFolder(parent)
    with pytest.raises(ConfigError, match="TMPDIR"):
        folder.ipc("router")
    folder.close()


def test_a_folder_that_cannot_be_locked_is_not_left_behind(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="No space left on device"):
        RunFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []
