"""The command with odd standard streams: one line and an exit code, never a traceback."""

import os
import subprocess
import sys
import time

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


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_characters_that_the_output_lacks_are_an_error(tmp_path, unbuffered):
    """They became question marks, in answers too, with exit code 0."""
    folder = tmp_path / "h\u00e9"
    folder.mkdir()
    command = f"{BATON} serve --dry-run --address ipc://{folder}/x.sock"
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": unbuffered}
    ended = shell(command, **variables)
    assert ended.returncode == 1
    assert ended.stderr == (
        "baton: standard output has the encoding ascii, which lacks '\\xe9';"
        " set PYTHONIOENCODING=utf-8\n"
    )
    variables["PYTHONIOENCODING"] = "utf-8"
    ended = shell(command, **variables)
    assert ended.returncode == 0
    assert str(folder) in ended.stdout


LINES = 40_000
PRINTS = f"""
import os, signal, sys
from baton.cli.command import prepare_streams
os.set_blocking(1, sys.argv[1] == "blocking")
prepare_streams()
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
text = "".join(f"{{n:06}}\\n" for n in range({LINES}))
if sys.argv[2] == "text":
    print(text, end="")
else:
    sys.stdout.buffer.write(text.encode())
sys.stdout.flush()
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.parametrize("kind", ["text", "bytes"])
@pytest.mark.parametrize("pipe", ["blocking", "non-blocking"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_gets_the_whole_output(unbuffered, pipe, kind):
    """Python's unbuffered stream drops what a write leaves, here because a signal interrupts it."""
    command = [sys.executable, "-P", "-c", PRINTS, pipe, kind]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        first = process.stdout.read(1)
        time.sleep(0.1)  # the pipe is full, and signals interrupt the writer
        whole = first + process.stdout.read()
    assert process.returncode == 0
    assert whole.split() == [b"%06d" % n for n in range(LINES)]


def test_a_folder_for_sockets_that_is_missing_is_one_line(tmp_path):
    ended = shell(f"{BATON} serve", TMPDIR=str(tmp_path), XDG_RUNTIME_DIR="/proc/self")
    assert ended.returncode != 0
    assert ended.stderr.startswith("baton: ")
    assert ended.stderr.count("\n") == 1
