"""How the supervisor's children are started."""

import os

import msgspec
import pytest

from baton.deploy.processes import Child, ProcessSpec


class Nothing(msgspec.Struct):
    """Settings of a child that needs none."""


@pytest.fixture
def child(tmp_path):
    spec = ProcessSpec(name="x", role="router", module="this", config=Nothing())
    started = Child(spec, tmp_path / "x.json")
    yield started
    started.wait()
    started.close()


def test_a_child_is_out_of_reach_of_the_terminals_interrupts(child):
    assert os.getpgid(child.pid) == child.pid


def test_a_child_shares_its_parents_session_and_with_it_a_share_of_the_processors(child):
    assert os.getsid(child.pid) == os.getsid(0)
