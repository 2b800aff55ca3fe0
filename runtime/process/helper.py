"""A helper process for input that is not trusted: it answers one request at a time.

The parent's side is :class:`HelperProcess`. The helper's module calls :func:`limit_process` and
:func:`serve`. A message is its length, 4 bytes big-endian, and its content; what the content means
is up to the two sides. An empty message ends the start of the helper: everything is imported. The
start has a time limit of its own, because on a busy machine with cold files it can take longer
than a request may.

Invariants: :meth:`HelperProcess.exchange` ends within its time limit and that of the start,
whatever the helper does. A helper ends with its parent, because its input ends.
"""

from __future__ import annotations

import os
import resource
import select
import selectors
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from io import FileIO

from baton.proto.errors import CapacityError

from .garbage import end_of_imports

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16
START_S = 60.0
"""Time limit of a helper's start, seconds."""


class HelperProcess:
    """A running ``python -m module arguments``. Raises CapacityError if it cannot start.

    ``environment``: its environment variables. ``own_session``: a Ctrl-C in the terminal does not
    reach it; the signals of the parent's process group do not either. ``start_s``: seconds until
    it must have started; the first :meth:`exchange` waits for it. Deleting the object kills the
    process. One thread at a time may use it, except :meth:`kill`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        own_session: bool = False,
        start_s: float = START_S,
    ) -> None:
        command = [sys.executable, "-P", "-m", module, *arguments]
        try:
            self._process = _started(command, dict(environment), own_session)
        except OSError as error:
            raise _not_started(str(error)) from None
        self._start_until: float | None = time.monotonic() + start_s  # None: it has started
        self._finalizer = weakref.finalize(self, _close, self._process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def exit_code(self, timeout: float) -> int | None:
        """Wait up to ``timeout`` seconds for the end. None: still running; negative: a signal."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def exchange(self, request: bytes, timeout: float, max_answer_bytes: int) -> bytes:
        """Send a request and return the answer. After an error, the helper must be closed.

        Raises:
            CapacityError: the process ended while it started, or has not started in time.
            TimeoutError: no complete answer within ``timeout`` seconds, or a longer answer.
            EOFError, OSError: the process has ended.

        """
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("the process has no pipes")
        sink, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._await_start(source)
        os.set_blocking(sink, False)
        deadline = time.monotonic() + timeout
        left, answer = memoryview(_framed(request)), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            selector.register(sink, selectors.EVENT_WRITE)
            while not _complete(answer):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError("no answer in time")
                for key, _ in ready:
                    if key.fd == sink:
                        left = left[os.write(sink, left[:_CHUNK]) :]
                        if not left:
                            selector.unregister(sink)
                        continue
                    answer += _read(source)
                    if len(answer) > max_answer_bytes:
                        raise TimeoutError("the answer does not end")
        return bytes(answer[_LENGTH.size :])

    def _await_start(self, source: int) -> None:
        if self._start_until is None:
            return
        try:
            read_message(source, max(0.0, self._start_until - time.monotonic()))
        except EOFError:
            code = self.exit_code(1.0)
            raise _not_started(f"it ended with exit code {code}") from None
        except TimeoutError:
            raise _not_started("it takes too long; the machine may be too busy") from None
        self._start_until = None

    def kill(self) -> None:
        """Kill the process, from any thread.

        An exchange on another thread raises EOFError, or CapacityError during the start.
        """
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        self._finalizer()


def _not_started(reason: str) -> CapacityError:
    return CapacityError(f"a helper process cannot start: {reason}", retry_after=1.0)


def _started(
    command: list[str], environment: dict[str, str], own_session: bool
) -> subprocess.Popen[bytes]:
    """Start a process with pipes. Popen's own pipes stay open if there are too few descriptors."""
    with ExitStack() as stack:
        (requests, sink), (source, answers) = _pipe(stack), _pipe(stack)
        null = stack.enter_context(FileIO(os.devnull, "wb"))
        process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            command,
            stdin=requests,
            stdout=answers,
            stderr=null,
            env=environment,
            start_new_session=own_session,
        )
        process.stdin, process.stdout = sink, source
        stack.pop_all()
        for end in (requests, answers, null):
            end.close()
        return process


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """Return the two ends of a pipe, which the stack closes."""
    reading, writing = os.pipe()
    ends = FileIO(reading, "rb"), FileIO(writing, "wb")
    for end in ends:
        stack.enter_context(end)
    return ends


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _complete(answer: bytearray) -> bool:
    if len(answer) < _LENGTH.size:
        return False
    size: int = _LENGTH.unpack_from(answer)[0]
    return len(answer) == _LENGTH.size + size


# --------------------------------------------------------------------------- the helper's side


def limit_process(memory_bytes: int) -> None:
    """Limit this process's address space; forbid file writes and core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow_cpu_seconds(seconds: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def serve(answer: Callable[[bytes], bytes], cpu_seconds: int | None = None) -> None:
    """Answer requests from standard input on standard output, until the input ends.

    Call it when everything is imported and loaded: it ends the start of the helper.
    ``cpu_seconds``: CPU time of one request. SIGXCPU ends a process that exceeds it.
    """
    end_of_imports()
    requests, answers = sys.stdin.fileno(), sys.stdout.fileno()
    write_message(answers, b"")
    while True:
        if cpu_seconds is not None:
            _allow_cpu_seconds(cpu_seconds)
        try:
            request = read_message(requests)
        except EOFError:
            return
        write_message(answers, answer(request))


# --------------------------------------------------------------------------- messages on a pipe


def write_message(pipe: int, content: bytes) -> None:
    """Write a message to a blocking pipe. Raises OSError if the reader has closed it."""
    left = memoryview(_framed(content))
    while left:
        left = left[os.write(pipe, left) :]


def read_message(pipe: int, timeout: float | None = None) -> bytes:
    """Read one message. Raises EOFError, or TimeoutError after ``timeout`` seconds."""
    until = None if timeout is None else time.monotonic() + timeout
    (size,) = _LENGTH.unpack(_read_exactly(pipe, _LENGTH.size, until))
    return _read_exactly(pipe, size, until)


def _framed(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _read_exactly(pipe: int, size: int, until: float | None) -> bytes:
    content = bytearray()
    while len(content) < size:
        if until is not None:
            ready = select.poll()  # select() rejects descriptors above 1,023
            ready.register(pipe, select.POLLIN)
            if not ready.poll(1000 * max(0.0, until - time.monotonic())):
                raise TimeoutError("no message in time")
        content += _read(pipe, size - len(content))
    return bytes(content)


def _read(pipe: int, size: int = _CHUNK) -> bytes:
    content = os.read(pipe, min(size, _CHUNK))
    if not content:
        raise EOFError("the other process has ended")
    return content
