"""Memory that a burst has used goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.runtime.process.bursts import Burst

_BURST = """
import sys
from pathlib import Path
from baton.runtime.process.bursts import Burst

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

burst = Burst(10 if sys.argv[1] == "returns" else 1 << 30)
before = resident()
burst.count(20)
made = [[number] for number in range(500_000)]
most = resident() - before
kept = made[::3000]  # in each arena
del made
burst.count(0)
burst.tidy(0)
print(most, resident() - before, sum(map(sum, kept)), burst.is_on)
"""


def left_of(kind: str, **environment: str) -> tuple[int, int]:
    """Return the bytes that a burst has taken, and those that it has left."""
    command = [sys.executable, "-c", _BURST, kind]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    most, left, kept, is_on = out.stdout.split()
    assert int(kept) == sum(range(0, 500_000, 3000))
    assert is_on == "False"
    return int(most), int(left)


def test_memory_of_a_burst_returns():
    most, left = left_of("returns")
    assert most > 40 << 20
    assert left < most / 4


def test_without_the_other_heap_it_would_stay():
    most, left = left_of("stays")
    assert left > most / 2


@pytest.mark.parametrize("name", ["malloc", "debug", "pymalloc_debug"])
def test_another_allocator_is_left_alone(name):
    left_of("returns", PYTHONMALLOC=name)


def test_the_heap_changes_at_the_number_and_back():
    burst = Burst(5)
    found = []
    for now in (5, 6, 100, 6, 5, 0):
        burst.count(now)
        found.append(burst.is_on)
    assert found == [False, True, True, True, False, False]
