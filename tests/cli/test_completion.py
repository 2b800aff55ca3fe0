"""TAB completes commands, options, their values and folders, in a real bash."""

import os
import pty
import subprocess
import sys

import pytest

from baton.cli.command import VERBS, build_parser
from baton.cli.completion import SHELLS, script

from ..processes import wait_until


@pytest.fixture(scope="module")
def completions(tmp_path_factory):
    """The bash script, as the command prints it."""
    file = tmp_path_factory.mktemp("completion") / "baton.bash"
    command = [sys.executable, "-m", "baton.cli", "completion", "bash"]
    file.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return file


def typed(keys: str, completions, folder) -> str:
    """Type keys into an interactive bash where ``baton`` prints its words; return these."""
    words = folder / "words"
    setup = f'source {completions}; baton() {{ echo "$*" > {words}.new; mv {words}.new {words}; }}'
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
        env={"PATH": os.environ["PATH"], "TERM": "dumb", "INPUTRC": "/dev/null"},
    )  # fmt: skip
    try:
        os.close(theirs)
        os.write(ours, f"{setup}\n{keys}\n".encode())
        wait_until(words.exists, what="bash to run the completed line")
        return words.read_text().rstrip("\n")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("baton stat\t", "status"),
        ("baton status --js\t", "status --json"),
        ("baton serve --kernels nu\t", "serve --kernels numpy"),
        ("baton doctor my-mo\tx", "doctor my-model/x"),
        ("baton completion fi\t", "completion fish"),
    ],
)
def test_bash_completes_commands_options_values_and_folders(keys, words, completions, tmp_path):
    (tmp_path / "my-model").mkdir()
    assert typed(keys, completions, tmp_path) == words


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_every_shell_names_every_command(shell):
    text = script(build_parser(), shell)
    assert [name for name in VERBS if name not in text] == []


def test_other_commands_do_not_import_the_library():
    program = "import sys, baton.cli.command as c; c.build_parser(); print('shtab' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert found.stdout == b"False\n"
