"""Full disk: the command reports one error with the path, or continues.

A limit on the size of files simulates a full disk: the file can be created, but a write fails.
"""

import resource
import subprocess
import sys

import pytest

from baton.deploy.local.run_folder import PREFIX


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))


def python(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("verb", ["serve", "launch"])
def test_a_start_ends_with_one_error(tmp_path, verb):
    run_dir = tmp_path / "r"  # the path of a socket has at most 107 bytes
    run_dir.mkdir()
    words = ["-m", "baton.cli", verb, "--address", f"ipc://{tmp_path}/s", "--run-dir", str(run_dir)]
    done = python(*words, preexec_fn=no_room)
    assert done.returncode == (2 if verb == "serve" else 1)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"baton: cannot write {run_dir}/{PREFIX}")
    assert "free disk space there" in line
    assert not done.stdout and not list(run_dir.iterdir())
    if verb == "launch":
        assert "Traceback" not in (tmp_path / "s.log").read_text()


FOLDER = """
import resource, sys
from pathlib import Path
from baton.deploy.local.run_folder import RunFolder
from baton.proto.errors import ConfigError
folder = RunFolder(Path(sys.argv[1]))
folder.write("decode-0.json", b"{}")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(folder.write("decode-0.json", b"{}").read_text())
for write in (lambda: folder.write("decode-1.json", b"{}"), lambda: folder.own_socket("/s")):
    try:
        write()
    except ConfigError as error:
        print(error)
"""


def test_what_is_written_already_is_there_for_a_restart(tmp_path):
    done = python("-c", FOLDER, str(tmp_path))
    assert not done.stderr
    kept, *refused = done.stdout.splitlines()
    assert kept == "{}"
    assert [line.startswith(f"cannot write {tmp_path}") for line in refused] == [True, True]
