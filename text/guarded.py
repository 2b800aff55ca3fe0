"""Runs untrusted templates and tokenizers in a process that can be killed.

Each :class:`GuardedProcess` has one helper process, started at the first request and reused.
:meth:`GuardedProcess.ask` always returns within ``timeout`` seconds. After a request that exceeds
a limit, the helper is replaced. Thread-safe: requests run one after the other.
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
# The template cannot read the environment; as a second barrier, the helper gets few variables.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "TZ")

MAX_ANSWER_BYTES = 256 << 20
"""More than the token ids of any accepted text. A longer answer is treated as endless."""
DEFAULT_TIMEOUT_S = 10.0
DEFAULT_CPU_S = 5
DEFAULT_MEMORY_BYTES = 512 << 20


class GuardedProcess:
    """A helper process with limits on memory, CPU time and wall-clock time.

    ``module``: module of this package that the helper runs. ``what``: name of the untrusted part
    in messages. ``first_request``: sent to every new helper before other requests.
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
        """Return the helper's reply, or ``{"limit": reason}``. None repeats the first request."""
        with self._lock:
            if not self._runs():
                self._start()
                if self.first_request is not None:
                    reply = self._exchange(self.first_request)
                    if request is None or "limit" in reply or "error" in reply:
                        return reply
            return self._exchange(request if request is not None else self.first_request or {})

    def close(self) -> None:
        """End the process. A later request starts another process."""
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
            self._end()  # an interrupted exchange leaves a stale answer in the pipe
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
            start_new_session=True,  # Ctrl-C in a terminal must reach the parent only
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


class GuardedRenderer(GuardedProcess):
    """Renders templates in a separate, killable process."""

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
        """Render like :func:`.sandbox.render`; ``variables`` must be JSON values.

        Raises:
            RenderLimit: a limit on size, time or memory was exceeded.
            RenderError: the template is invalid or rejected its variables.

        """
        reply = self.ask(
            {"template": source, "variables": dict(variables), "max_output": max_output_chars}
        )
        if "text" in reply:
            return str(reply["text"])
        if "limit" in reply:
            raise RenderLimit(reply["limit"])
        raise RenderError(reply.get("error", "the template process sent no answer"))


def _why_ended(process: subprocess.Popen[bytes], what: str) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        code = 0
    if code < 0:  # killed by SIGXCPU, or by SIGKILL on a machine without free memory
        return f"{what} used too much processor time or memory"
    return f"the process of {what} failed with exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _exchange(process: subprocess.Popen[bytes], request: bytes, timeout: float) -> bytes:
    """Send the request and read the whole answer. Neither direction can block indefinitely.

    Raises:
        TimeoutError: no complete answer in time, or an answer above ``MAX_ANSWER_BYTES``.
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
