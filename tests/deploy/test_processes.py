"""Start of the supervisor's child processes."""

import os
import subprocess
import sys

import msgspec
import pytest

from baton.deploy.supervise.oom import WORKER_MARGIN, score_adjustment
from baton.deploy.supervise.process import Child, ProcessSpec


class Nothing(msgspec.Struct):
    """Settings of a child without settings."""


@pytest.fixture(params=["router", "decode"])
def child(request, tmp_path):
    spec = ProcessSpec(name="x", role=request.param, module="this", config=Nothing())
    started = Child(spec, tmp_path / "x.json")
    yield started
    started.wait()
    started.close()


def test_a_child_is_out_of_reach_of_the_terminals_interrupts(child):
    assert os.getpgid(child.pid) == child.pid


def test_a_child_shares_its_parents_session_and_with_it_a_share_of_the_processors(child):
    assert os.getsid(child.pid) == os.getsid(0)


def test_out_of_memory_a_worker_is_killed_before_the_router_and_the_supervisor(child):
    margin = WORKER_MARGIN if child.spec.role == "decode" else 0
    assert score_adjustment(child.pid) == score_adjustment() + margin


ACTOR = """
from pathlib import Path
from baton.deploy.supervise.oom import score_adjustment, score_like_parent
Path("/proc/self/oom_score_adj").write_text("1000")  # as Ray does
score_like_parent()
print(score_adjustment())
"""


def test_an_actor_takes_rays_score_back():
    done = subprocess.run([sys.executable, "-P", "-c", ACTOR], capture_output=True, text=True)
    assert done.stdout.strip() == str(score_adjustment()), done.stderr
