"""Compiles an untrusted schema in a separate process, where it can do no harm.

A few hundred characters can cost the library gigabytes, hours, or more stack than a thread has,
and no code inside the same process can stop it. So a helper process loads the tokenizer and
forks for every schema. The fork compiles the schema under limits on memory, time and stack. A
schema that ends the fork is rejected. After a successful trial, the worker compiles the schema
itself and knows its cost.

Invariants: every trial returns within little more than its time limit, whatever the schema does.
The helper ends with its worker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from ...proto.errors import BatonError, CapacityError, InputError, SchemaTooComplex
from ...runtime.process.os_settings import die_with_parent
from .compiler import compile_schema, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK_BYTES = 2 << 20
"""Stack of a trial; the worker's threads have several times as much."""
MAX_SCHEMA_BYTES = 128 << 20
"""Memory limit of a compiled schema."""
_SLACK_BYTES = 256 << 20  # reserved address space without memory: the allocator's arenas
_START_S = 60.0  # for the helper to read the tokenizer
_ANSWER_S = 1.0  # added to the trial's own time limit


class SchemaCost(msgspec.Struct, frozen=True, array_like=True):
    """Cost of a schema: ``seconds`` of CPU time to compile, ``nbytes`` of memory."""

    seconds: float
    nbytes: int


class _Verdict(msgspec.Struct, array_like=True):
    cost: SchemaCost | None = None
    message: str = ""
    too_complex: bool = False


class SchemaTrial:
    """The helper process of one model folder, started by the first trial. Thread-safe.

    ``limit_s``: time limit of a schema, seconds.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos: Iterable[int], limit_s: float = 5.0
    ) -> None:
        self._command = [
            sys.executable, "-P", "-m", __name__, str(folder), str(vocab_size),
            ",".join(map(str, eos)), str(limit_s),
        ]  # fmt: skip
        self._limit_s = limit_s
        self._helper: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held during a trial
        self._closed = False

    def cost(self, schema: str) -> SchemaCost:
        """Try a schema. Raises InputError as :func:`.compile_schema`, or CapacityError.

        Raises SchemaTooComplex if the schema exceeds its time, memory or stack limit.
        """
        with self._lock:
            try:
                helper = self._started()
                _write(helper.stdin, schema.encode())
                answer = _read(helper.stdout, self._limit_s + _ANSWER_S)
                verdict = msgspec.msgpack.decode(answer, type=_Verdict)
            except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
                self._stop()
                text = f"json_schema cannot be checked now: {error!r}"
                raise CapacityError(text, retry_after=1.0) from None
        if verdict.cost is None:
            raise (SchemaTooComplex if verdict.too_complex else InputError)(verdict.message)
        return verdict.cost

    def close(self) -> None:
        """End the helper at once. A running trial raises CapacityError."""
        self._closed = True
        self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise EOFError("closed")
        if self._helper is not None and self._helper.poll() is None:
            return self._helper
        helper = self._helper = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # fork() must not find other threads
        )
        weakref.finalize(self, _end, helper)
        _read(helper.stdout, _START_S)
        return helper

    def _stop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            _end(helper)


def _end(helper: subprocess.Popen[bytes]) -> None:
    helper.kill()
    helper.wait()


# --------------------------------------------------------------------------- frames on the pipes


def _write(pipe: IO[bytes] | None, content: bytes) -> None:
    if pipe is None:
        raise EOFError("no pipe")
    content = len(content).to_bytes(4, "little") + content
    view = memoryview(content)
    while view:
        view = view[os.write(pipe.fileno(), view) :]


def _read(pipe: IO[bytes] | None, seconds: float | None = None) -> bytes:
    """Read one frame. Raises EOFError, or TimeoutError after ``seconds``."""
    if pipe is None:
        raise EOFError("no pipe")
    until = None if seconds is None else time.monotonic() + seconds
    size = int.from_bytes(_exactly(pipe.fileno(), 4, until), "little")
    return _exactly(pipe.fileno(), size, until)


def _exactly(pipe: int, size: int, until: float | None) -> bytes:
    content = b""
    while len(content) < size:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = select.poll()  # select() rejects descriptors above 1,023
        ready.register(pipe, select.POLLIN)
        if not ready.poll(None if left is None else 1000 * left):
            raise TimeoutError("no answer in time")
        piece = os.read(pipe, size - len(content))
        if not piece:
            raise EOFError("the helper has ended")
        content += piece
    return content


# --------------------------------------------------------------------------- the helper's side


def main(arguments: list[str]) -> None:
    """Read the tokenizer, then try schemas from standard input until it ends."""
    folder, vocab_size, eos, limit_s = arguments
    # Ignore a Ctrl-C in the worker's terminal: the worker ends its helper.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ids = [int(token) for token in eos.split(",")]
    tokenizer = load_tokenizer(Path(folder), int(vocab_size), ids)
    _write(sys.stdout.buffer, b"ready")
    while True:
        schema = _read(sys.stdin.buffer).decode()
        verdict = _fork(tokenizer, schema, float(limit_s))
        _write(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


def _fork(tokenizer: LLTokenizer, schema: str, limit_s: float) -> _Verdict:
    """Compile in a fork and turn its end, whatever it is, into a verdict."""
    answers, into = os.pipe()
    helper, child = os.getpid(), os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(answers)
            die_with_parent(helper, signal.SIGKILL)
            _bound(limit_s)
            verdict = _on_small_stack(tokenizer, schema)
            with os.fdopen(into, "wb", buffering=0) as pipe:
                _write(pipe, msgspec.msgpack.encode(verdict))
        os._exit(0)
    os.close(into)
    try:
        with os.fdopen(answers, "rb", buffering=0) as pipe:
            return msgspec.msgpack.decode(_read(pipe, limit_s), type=_Verdict)
    except TimeoutError:
        return _too_complex(f"it does not compile within {limit_s:g} s")
    except (EOFError, msgspec.MsgspecError):
        return _too_complex("it exceeds the memory limit, or its references nest too deep")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _too_complex(reason: str) -> _Verdict:
    return _Verdict(message=f"json_schema is too complex: {reason}", too_complex=True)


def _bound(limit_s: float) -> None:
    """Set the limits of this process."""
    seconds = int(limit_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    room = _pages(0) + MAX_SCHEMA_BYTES + STACK_BYTES + _SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def _on_small_stack(tokenizer: LLTokenizer, schema: str) -> _Verdict:
    verdicts: list[_Verdict] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_try(tokenizer, schema)))
    thread.start()
    thread.join()
    return verdicts[0]


def _try(tokenizer: LLTokenizer, schema: str) -> _Verdict:
    before, began = _pages(1), time.process_time()
    try:
        matcher = compile_schema(tokenizer, schema)
    except BatonError as error:
        return _Verdict(message=str(error), too_complex=isinstance(error, SchemaTooComplex))
    seconds, nbytes = time.process_time() - began, _pages(1) - before
    del matcher
    if nbytes > MAX_SCHEMA_BYTES:
        return _too_complex(
            f"it needs {nbytes >> 20} MiB, the limit is {MAX_SCHEMA_BYTES >> 20} MiB"
        )
    return _Verdict(SchemaCost(seconds, max(nbytes, 0)))


def _pages(index: int) -> int:
    """Return bytes of this process: field 0 is address space, field 1 resident memory."""
    fields = Path("/proc/self/statm").read_bytes().split()
    return int(fields[index]) * resource.getpagesize()


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        main(sys.argv[1:])
