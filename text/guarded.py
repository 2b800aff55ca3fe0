"""Runs what nobody vouches for in a process that can be killed: templates, and tokenizers.

One helper process per :class:`GuardedProcess`, started at the first request and reused. Whatever
the foreign part does, :meth:`GuardedProcess.ask` returns within ``timeout`` seconds, and after any
limit the process is replaced. Thread-safe: requests take turns.
"""

from __future__ import annotations

import json
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from .sandbox import MAX_OUTPUT_CHARS, RenderError, RenderLimit

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16
# The template cannot see the environment; a process that needs little should still get little.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "TZ")

MAX_ANSWER_BYTES = 256 << 20
"""More than the ids of any text that is let in; a longer answer counts as one that never ends."""
DEFAULT_TIMEOUT_S = 10.0
DEFAULT_CPU_S = 5
DEFAULT_MEMORY_BYTES = 512 << 20


class GuardedProcess:
    """A helper process with limits on memory, processor time and wall time.

    ``module``: of this package, run as the helper; ``what``: names the foreign part in messages.
    ``first_request``: said to every new helper before anything else.
    """

    def __init__(
        self, module: str, what: str, timeout: float, cpu_seconds: int, memory_bytes: int
    ) -> None:
        self.first_request: dict[str, Any] | None = None
        self._what = what
        self._timeout = timeout
        self._command = ["-m", f"{__package__}.{module}", str(memory_bytes), str(cpu_seconds)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GuardedProcess] | None = None

    def ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """The helper's reply, or ``{"limit": why}``; ``None`` asks for the first request's."""
        with self._lock:
            if not self._runs():
                self._start()
                if self.first_request is not None:
                    reply = self._exchange(self.first_request)
                    if request is None or "limit" in reply or "error" in reply:
                        return reply
            return self._exchange(request if request is not None else self.first_request or {})

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock:
            self._end()

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None:
            return {"limit": f"{self._what} has no process"}
        body = json.dumps(request).encode()
        try:
            message = _LENGTH.pack(len(body)) + body
            reply: dict[str, Any] = json.loads(_exchange(process, message, self._timeout))
        except TimeoutError:
            reply = {"limit": f"{self._what} took longer than {self._timeout:g} seconds"}
        except (OSError, EOFError):
            reply = {"limit": _why_ended(process, self._what)}
        except BaseException:
            self._end()  # an interrupted exchange leaves an answer behind; nobody may read it
            raise
        if "limit" in reply:
            self._end()
        return reply

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._end()
        process = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
            [sys.executable, "-P", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,  # Ctrl-C in a terminal is for the parent
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


class GuardedRenderer(GuardedProcess):
    """Renders templates in a process of its own."""

    def __init__(
        self,
        timeout: float = DEFAULT_TIMEOUT_S,
        cpu_seconds: int = DEFAULT_CPU_S,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        super().__init__("template_worker", "the template", timeout, cpu_seconds, memory_bytes)

    def render(
        self, source: str, variables: Mapping[str, Any], max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> str:
        """As :func:`.sandbox.render`; ``variables`` must be JSON values.

        Raises:
            RenderLimit: a size, the time or the memory ran out.
            RenderError: the template is wrong or refused its variables.

        """
        reply = self.ask(
            {"template": source, "variables": dict(variables), "max_output": max_output_chars}
        )
        if "text" in reply:
            return str(reply["text"])
        if "limit" in reply:
            raise RenderLimit(reply["limit"])
        raise RenderError(reply.get("error", "the template process gave no answer"))


def _why_ended(process: subprocess.Popen[bytes], what: str) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        code = 0
    if code < 0:  # by a signal: SIGXCPU, or SIGKILL of a machine without memory
        return f"{what} used too much processor time or memory"
    return f"the process of {what} failed with exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _exchange(process: subprocess.Popen[bytes], request: bytes, timeout: float) -> bytes:
    """Send the request and read the whole answer; neither direction can block for ever.

    Raises:
        TimeoutError: no whole answer in time.
        EOFError, OSError: the process has ended.

    """
    if process.stdin is None or process.stdout is None:
        raise OSError("the process has no pipes")
    source, sink = process.stdout.fileno(), process.stdin.fileno()
    os.set_blocking(sink, False)
    deadline = time.monotonic() + timeout
    left, answer = memoryview(request), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        selector.register(sink, selectors.EVENT_WRITE)
        while not _complete(answer):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if key.fd == sink:
                    left = left[os.write(sink, left[:_CHUNK]) :]
                    if not left:
                        selector.unregister(sink)
                elif part := os.read(source, _CHUNK):
                    answer += part
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise TimeoutError
                else:
                    raise EOFError
    return bytes(answer[_LENGTH.size :])


def _complete(answer: bytearray) -> bool:
    if len(answer) < _LENGTH.size:
        return False
    body: int = _LENGTH.unpack_from(answer)[0]
    return len(answer) == _LENGTH.size + body
