"""A recording is the same for the same run, and shows every other event, action and value."""

import numpy as np
import pytest

from baton.proto.wire.messages import Ping
from baton.simulator import __main__ as command
from baton.simulator.recording import Recording, text_of
from baton.simulator.run import run
from baton.simulator.scenarios import SCENARIOS
from baton.worker.events import Tick, ToRouter


def digest(seed: int, scenario: str = "crash") -> tuple[str, list[str]]:
    lines: list[str] = []
    recording = Recording(lines)
    run(seed, SCENARIOS[scenario], recording)
    return recording.digest(), lines


def test_a_run_has_one_recording():
    (first, lines), (again, _), (other, _) = digest(3), digest(3), digest(4)
    assert first == again != other
    for process in ("router-0", "prefill-0", "decode-0", "client-0"):
        assert any(f" {process} " in line for line in lines), process


@pytest.mark.parametrize("scenario", ["pictures", "embed", "structured", "roles"])
def test_a_seed_fixes_every_value_of_a_run(scenario):
    first, again = digest(1, scenario)[1], digest(1, scenario)[1]
    assert (
        next((pair for pair in zip(first, again, strict=True) if pair[0] != pair[1]), None) is None
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ToRouter("a", Ping(nonce=1)), ToRouter("a", Ping(nonce=2))),
        (Tick(0), Ping(nonce=0)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (1, True),
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (np.zeros(2), np.ones(2)),
    ],
)
def test_every_difference_shows(one, other):
    assert text_of(one) != text_of(other)


def test_the_command_writes_digests_and_the_last_run(tmp_path, capsys):
    files = ["--record", str(tmp_path / "digests"), "--text", str(tmp_path / "text")]
    assert command.main(["--seeds", "2", "--scenario", "plain", *files]) == 0
    lines = (tmp_path / "digests").read_text().splitlines()
    recording = Recording()
    for line in (tmp_path / "text").read_text().splitlines(keepends=True):
        recording._hash.update(line.encode())
    assert lines[1] == f"plain 1 {recording.digest()}"
    assert lines[0].startswith("plain 0 ")
