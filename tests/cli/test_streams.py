"""The command with odd standard streams: one line and an exit code, never a traceback."""

import subprocess
import sys

import pytest

BATON = f"'{sys.executable}' -P -m baton.cli"


def shell(command, **environment):
    return subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


@pytest.fixture
def nobody(tmp_path):
    """Options with the address of a cluster that does not exist."""
    return f"--timeout 0.1 --address ipc://{tmp_path}/none.sock"


def test_a_full_disk_is_one_line():
    ended = shell(f"{BATON} doctor > /dev/full")
    assert (ended.returncode, ended.stderr) == (1, "baton: No space left on device\n")


def test_a_reader_that_left_is_no_fault():
    ended = shell(f"{BATON} doctor | true; exit ${{PIPESTATUS[0]}}")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("verb", "code"), [("status", 1), ("chat", 0), ("generate", 2)])
def test_closed_streams_are_empty_ones(closed, verb, code, nobody):
    ended = shell(f"{BATON} {verb} {nobody} {closed}")
    lines = ended.stderr.splitlines()
    silent = verb == "chat"  # no input, no output
    assert ended.returncode == code
    assert len(lines) == (0 if silent or "2>&-" in closed else 1)
    assert all(line.startswith("baton: ") for line in lines)


def test_characters_the_terminal_lacks_are_replaced(tmp_path):
    folder = tmp_path / "h\u00e9"
    folder.mkdir()
    command = f"{BATON} serve --dry-run --address ipc://{folder}/x.sock"
    ended = shell(command, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert ended.returncode == 0, ended.stderr
    assert "h?" in ended.stdout


def test_a_folder_for_sockets_that_is_missing_is_one_line(tmp_path):
    ended = shell(f"{BATON} serve", TMPDIR=str(tmp_path), XDG_RUNTIME_DIR="/proc/self")
    assert ended.returncode != 0
    assert ended.stderr.startswith("baton: ")
    assert ended.stderr.count("\n") == 1
