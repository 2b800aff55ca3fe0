import re
import signal
import subprocess
import sys

import pytest

from .conftest import command_environment

pytestmark = pytest.mark.cluster


def test_demo_answers_prompts_through_a_whole_cluster_and_leaves_nothing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        env=command_environment(folder),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Prefill workers read the prompt" in done.stdout  # readable text of the real model
    handoffs = re.findall(
        r"prefill-0 read the prompt, handed ([\d.]+) KiB .* to (decode-\d)", done.stdout
    )
    assert len(handoffs) >= 3
    assert all(float(size) > 0 for size, _ in handoffs)
    assert {decode for _, decode in handoffs} == {"decode-0", "decode-1"}
    assert len(re.findall(r"TTFT [\d.]+ ms, \d+ tokens, \d+ tokens/s", done.stdout)) >= 3
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("moment", ["starting", "> ", "tokens/s"])
def test_an_interrupted_demo_is_silent_and_leaves_nothing(tmp_path_factory, moment):
    folder = tmp_path_factory.mktemp("d")
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(folder),
    )
    with demo:
        next(line for line in demo.stdout if moment in line)
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=60)
    assert (demo.returncode, said) == (130, "")
    assert list(folder.iterdir()) == []


def test_a_demo_whose_output_nobody_reads_any_more_ends_in_silence(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(folder),
    )
    with demo:
        next(line for line in demo.stdout if "starting" in line)
        demo.stdout.close()
        said = demo.stderr.read()
    assert (demo.wait(60), said) == (0, "")
    assert list(folder.iterdir()) == []
