"""An installation without the compiled kernels, made by a machine without a compiler."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import command_environment

ROOT = Path(__file__).parents[2]
ADVICE = "install a C compiler"


@pytest.fixture(scope="module")
def baton(tmp_path_factory):
    """Starts the command of such an installation."""
    folder = tmp_path_factory.mktemp("bare")
    build = ["egg_info", f"--egg-base={folder}", "build_py", f"--build-lib={folder}/lib"]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *build], cwd=ROOT, check=True, capture_output=True
    )
    environment = command_environment(folder)
    environment["PYTHONPATH"] = f"{folder}/lib{os.pathsep}{environment['PYTHONPATH']}"

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.cli", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, cwd=folder,
        )  # fmt: skip

    return start


@pytest.mark.cluster
def test_serve_says_that_the_slow_kernels_are_used_and_how_to_get_the_others(baton):
    with baton("serve", "--kv-memory=16MiB") as serve:
        said = []
        for line in serve.stdout:
            said.append(line)
            if line.startswith("  try "):
                serve.send_signal(signal.SIGINT)
    text = "".join(said)
    assert serve.returncode == 0, text
    assert "  kernels    NumPy " in text
    (warning,) = [line for line in said if line.startswith("  warning ")]
    assert "slow NumPy kernels" in warning
    assert ADVICE in warning


@pytest.mark.long
def test_launch_says_it_where_it_is_typed(baton):
    with baton("launch", "--kv-memory=16MiB") as launch:
        text = launch.stdout.read()
    with baton("down") as down:
        down.wait(60)
    assert launch.returncode == 0, text
    assert ADVICE in text
    assert "serving at" in text


@pytest.mark.long
def test_doctor_says_it_too(baton):
    with baton("doctor") as doctor:
        text = doctor.stdout.read()
    assert doctor.returncode == 0, text
    (line,) = [line for line in text.splitlines() if " kernels " in line]
    assert line.startswith("warn  kernels    NumPy ")
    assert ADVICE in line


def test_kernels_that_are_asked_for_and_missing_are_an_error_before_anything_starts(baton):
    with baton("serve", "--kernels=cpu") as serve:
        text = serve.stdout.read()
    assert serve.returncode == 2
    assert text.count("\n") == 1
    assert ADVICE in text
