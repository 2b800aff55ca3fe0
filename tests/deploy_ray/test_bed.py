"""The test bed needs no privileges and cannot reach anything outside."""

from pathlib import Path

import pytest


def test_an_unprivileged_user_makes_it():
    """Root in the bed is an unprivileged user outside."""
    inside, outside, count = Path("/proc/self/uid_map").read_text().split()
    if outside == "0":
        pytest.skip("root made it: nobody cannot reach this folder or its Python")
    assert (int(inside), int(count)) == (0, 1)


def test_it_has_a_network_and_processes_of_its_own():
    assert Path("/proc/1/cmdline").read_bytes().endswith(Path("/proc/self/cmdline").read_bytes())
    lines = Path("/proc/net/dev").read_text().splitlines()
    assert [line.split(":")[0].strip() for line in lines if ":" in line] == ["lo"]
