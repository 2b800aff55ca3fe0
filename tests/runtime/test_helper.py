"""Helper processes: every exchange ends, and every helper ends with its owner."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.proto.errors import CapacityError
from baton.runtime.process.helper import HelperProcess

from ..processes import alive, wait_until

MODULE = """
import os, sys, time
from baton.runtime.process.helper import serve

if sys.argv[1:] == ["ends"]:
    os._exit(5)
time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0)

def answer(request):
    if request == b"end":
        os._exit(3)
    if request == b"sleep":
        time.sleep(600)
    if request == b"many":
        return bytes(1 << 20)
    return request[::-1]

serve(answer)
"""
MAX_BYTES = 4 << 20


@pytest.fixture
def start(tmp_path):
    (tmp_path / "some_helper.py").write_text(MODULE)
    started = []

    def start(*arguments: str, start_s: float = 60.0) -> HelperProcess:
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        started.append(
            HelperProcess("some_helper", *arguments, environment=environment, start_s=start_s)
        )
        return started[-1]

    yield start
    for helper in started:
        helper.close()


def test_a_helper_answers_requests_in_order(start):
    helper = start()
    for request in (b"", b"abc", bytes(range(256)) * 4096):
        assert helper.exchange(request, 60.0, MAX_BYTES) == request[::-1]
    assert helper.running


def test_an_exchange_ends_after_its_time(start):
    helper = start()
    with pytest.raises(TimeoutError):
        helper.exchange(b"sleep", 0.1, MAX_BYTES)


def test_the_time_of_an_exchange_begins_after_the_start(start):
    assert start("2.5").exchange(b"abc", 2.0, MAX_BYTES) == b"cba"


def test_a_start_without_end_is_an_error(start):
    helper = start("600", start_s=0.1)
    with pytest.raises(CapacityError, match="cannot start: it takes too long") as caught:
        helper.exchange(b"abc", 60.0, MAX_BYTES)
    assert caught.value.retry_after
    with pytest.raises(CapacityError, match="takes too long"):  # it does not wait anew
        helper.exchange(b"abc", 60.0, MAX_BYTES)


def test_a_helper_that_ends_while_it_starts_is_an_error(start):
    with pytest.raises(CapacityError, match="cannot start: it ended with exit code 5"):
        start("ends").exchange(b"abc", 60.0, MAX_BYTES)


def test_an_endless_answer_is_an_error(start):
    with pytest.raises(TimeoutError, match="does not end"):
        start().exchange(b"many", 60.0, 1000)


def test_the_end_of_a_helper_is_an_error(start):
    helper = start()
    with pytest.raises(EOFError):
        helper.exchange(b"end", 60.0, MAX_BYTES)
    assert helper.exit_code(60.0) == 3
    assert not helper.running


def test_killing_ends_the_exchange_of_another_thread(start):
    helper, errors = start(), []
    helper.exchange(b"started", 60.0, MAX_BYTES)

    def sleep() -> None:
        try:
            helper.exchange(b"sleep", 600.0, MAX_BYTES)
        except (EOFError, OSError) as error:
            errors.append(error)

    sleeping = threading.Thread(target=sleep)
    sleeping.start()
    time.sleep(0.05)
    helper.kill()
    sleeping.join(60)
    assert len(errors) == 1 and not isinstance(errors[0], TimeoutError)


def test_killing_ends_the_start_for_another_thread(start):
    helper, errors = start("600"), []

    def ask() -> None:
        with pytest.raises(CapacityError) as caught:
            helper.exchange(b"abc", 60.0, MAX_BYTES)
        errors.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    helper.kill()
    asking.join(60)
    assert errors == ["a helper process cannot start: it ended with exit code -9"]


def test_a_helper_whose_owner_ends_during_the_start_ends_after_it(tmp_path):
    (tmp_path / "some_helper.py").write_text(MODULE)
    program = (
        "import os\n"
        "from baton.runtime.process.helper import HelperProcess\n"
        "helper = HelperProcess('some_helper', '0.5', environment=os.environ)\n"
        "print(helper.pid, flush=True)\n"
        "os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", program]
    output = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    wait_until(lambda: not alive(int(output)), what="the helper's end")


def test_deleting_the_object_ends_the_process():
    helper = HelperProcess("http.server", "--help", environment=os.environ)
    pid = helper.pid
    del helper
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("left", range(7))
def test_too_few_descriptors_are_an_error_that_leaves_none_open(left):
    """A start needs seven: two pipes, the null device, and a pipe of the interpreter."""
    before = {path.name for path in Path("/dev/fd").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gap = os.dup(0)
    os.close(gap)  # the lowest free number
    # `gap` was the listing's own descriptor.
    free = [gap, *(number for number in range(gap, gap + 99) if str(number) not in before)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))
    try:
        with pytest.raises(CapacityError, match=r"cannot start: .*Too many open files"):
            HelperProcess("http.server", "--help", environment=os.environ)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {path.name for path in Path("/dev/fd").iterdir()} == before
