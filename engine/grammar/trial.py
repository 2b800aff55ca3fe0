"""Compiles an untrusted schema in a separate process, where it can do no harm.

A few hundred characters can cost the library gigabytes, hours, or more stack than a thread has,
and no code inside the same process can stop it. So a helper process loads the tokenizer and
forks for every schema. The fork compiles the schema under limits on memory, time and stack. A
schema that ends the fork is rejected. After a successful trial, the worker compiles the schema
itself and knows its cost.

Invariants: every trial returns within little more than twelve times its limit of CPU time,
whatever the schema does. A busy machine never makes a schema too complex. The helper ends with
its worker.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

import msgspec

from baton.proto.errors import BatonError, CapacityError, InputError, SchemaTooComplex
from baton.runtime.process.helper import HelperProcess, read_message, serve, write_message
from baton.runtime.process.memory import size_text
from baton.runtime.process.os_settings import die_with_parent

from .compiler import compile_schema, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK_BYTES = 2 << 20
"""Stack of a trial; the worker's threads have several times as much."""
MAX_SCHEMA_BYTES = 128 << 20
"""Memory limit of a compiled schema."""
_SLACK_BYTES = 256 << 20  # reserved address space without memory: the allocator's arenas
_WAIT_FACTOR = 12.0  # seconds that a trial may take per second of CPU time: processors are shared
_ANSWER_S = 1.0  # added to the trial's own time limit
_MAX_ANSWER_BYTES = 1 << 20  # a cost, or the message of an error


class SchemaCost(msgspec.Struct, frozen=True, array_like=True):
    """Cost of a schema: ``seconds`` of CPU time to compile, ``nbytes`` of memory."""

    seconds: float
    nbytes: int


class _Verdict(msgspec.Struct, array_like=True):
    cost: SchemaCost | None = None
    message: str = ""
    too_complex: bool = False
    unjudged: bool = False  # the machine was too busy, or at a limit


class SchemaTrial:
    """The helper process of one model folder, started by the first trial. Thread-safe.

    ``limit_s``: CPU time that a schema may take, seconds.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos: Iterable[int], limit_s: float = 5.0
    ) -> None:
        eos_ids = ",".join(map(str, eos))
        self._arguments = (str(folder), str(vocab_size), eos_ids, str(limit_s))
        self._limit_s = limit_s
        self._helper: HelperProcess | None = None
        self._lock = threading.Lock()  # held during a trial
        self._closed = False

    def cost(self, schema: str) -> SchemaCost:
        """Try a schema. Raises InputError as :func:`.compile_schema`.

        Raises SchemaTooComplex if the schema exceeds its limit of CPU time, memory or stack, and
        CapacityError if the helper does not answer or the machine is too busy for a verdict.
        """
        with self._lock:
            try:
                timeout = _WAIT_FACTOR * self._limit_s + _ANSWER_S
                answer = self._started().exchange(schema.encode(), timeout, _MAX_ANSWER_BYTES)
                verdict = msgspec.msgpack.decode(answer, type=_Verdict)
            except CapacityError:
                self._stop()
                raise
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                self._stop()
                text = f"json_schema cannot be checked now: {error!r}"
                raise CapacityError(text, retry_after=1.0) from None
        if verdict.unjudged:
            raise CapacityError(verdict.message, retry_after=1.0)
        if verdict.cost is None:
            raise (SchemaTooComplex if verdict.too_complex else InputError)(verdict.message)
        return verdict.cost

    def close(self) -> None:
        """End the helper at once. A running trial raises CapacityError."""
        self._closed = True
        self._stop()

    def _started(self) -> HelperProcess:
        if self._closed:
            raise EOFError("closed")
        if self._helper is None or not self._helper.running:
            self._helper = HelperProcess(
                __name__,
                *self._arguments,
                # One thread: the helper must not have other threads when it forks.
                environment={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        return self._helper

    def _stop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()


# --------------------------------------------------------------------------- the helper's side


def main(arguments: list[str]) -> None:
    """Read the tokenizer, then try schemas from standard input until it ends."""
    folder, vocab_size, eos, limit_s = arguments
    # Ignore a Ctrl-C in the worker's terminal: the worker ends its helper.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ids = [int(token) for token in eos.split(",")]
    tokenizer = load_tokenizer(Path(folder), int(vocab_size), ids)

    def answer(request: bytes) -> bytes:
        return msgspec.msgpack.encode(_fork(tokenizer, request.decode(), float(limit_s)))

    serve(answer)


def _fork(tokenizer: LLTokenizer, schema: str, limit_s: float) -> _Verdict:
    """Compile in a fork and turn its end, whatever it is, into a verdict."""
    answers, into = os.pipe()
    verdict: _Verdict | None = None
    wait_s = _WAIT_FACTOR * limit_s
    helper, child = os.getpid(), os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(answers)
            die_with_parent(helper, signal.SIGKILL)
            _bound(limit_s)
            verdict = _on_small_stack(tokenizer, schema)
            write_message(into, msgspec.msgpack.encode(verdict))
        os._exit(0)
    os.close(into)
    try:
        verdict = msgspec.msgpack.decode(read_message(answers, wait_s), type=_Verdict)
    except TimeoutError:
        text = f"json_schema was not compiled within {wait_s:g} s, because the machine is too busy"
        verdict = _Verdict(message=text, unjudged=True)
    except (EOFError, msgspec.MsgspecError):
        pass  # the fork ended without a verdict: its exit status has the cause
    finally:
        os.close(answers)
        os.kill(child, signal.SIGKILL)  # a fork that has ended keeps its status
        _, status = os.waitpid(child, 0)
    if verdict is not None:
        return verdict
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return _too_complex(f"it does not compile within {limit_s:g} s of CPU time")
    return _too_complex("it exceeds the memory limit, or its references nest too deep")


def _too_complex(reason: str) -> _Verdict:
    return _Verdict(message=f"json_schema is too complex: {reason}", too_complex=True)


def _bound(limit_s: float) -> None:
    """Set the limits of this process. SIGPROF ends it after ``limit_s`` seconds of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    room = _pages(0) + MAX_SCHEMA_BYTES + STACK_BYTES + _SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def _on_small_stack(tokenizer: LLTokenizer, schema: str) -> _Verdict:
    verdicts: list[_Verdict] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_try(tokenizer, schema)))
    try:
        thread.start()
    except RuntimeError as problem:  # a limit on threads, as of a container
        return _Verdict(message=f"json_schema cannot be checked now: {problem}", unjudged=True)
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
            f"it needs {size_text(nbytes)}, the limit is {size_text(MAX_SCHEMA_BYTES)}"
        )
    return _Verdict(SchemaCost(seconds, max(nbytes, 0)))


def _pages(index: int) -> int:
    """Return bytes of this process: field 0 is address space, field 1 resident memory."""
    fields = Path("/proc/self/statm").read_bytes().split()
    return int(fields[index]) * resource.getpagesize()


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the worker has ended
        main(sys.argv[1:])
