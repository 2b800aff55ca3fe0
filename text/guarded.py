"""Renders templates nobody vouches for, in a process that can be killed.

One helper process per :class:`GuardedRenderer`, started at the first render and reused. Whatever
a template does, :meth:`GuardedRenderer.render` returns or raises within ``timeout`` seconds, and
after any limit the process is replaced. Thread-safe: renders take turns.
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

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_CPU_S = 5
DEFAULT_MEMORY_BYTES = 512 << 20


class GuardedRenderer:
    """Renders in a process of its own with limits on memory, processor time and wall time."""

    def __init__(
        self,
        timeout: float = DEFAULT_TIMEOUT_S,
        cpu_seconds: int = DEFAULT_CPU_S,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._timeout = timeout
        self._arguments = [str(memory_bytes), str(cpu_seconds)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GuardedRenderer] | None = None

    def render(
        self, source: str, variables: Mapping[str, Any], max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> str:
        """As :func:`.sandbox.render`; ``variables`` must be JSON values.

        Raises:
            RenderLimit: a size, the time or the memory ran out.
            RenderError: the template is wrong or refused its variables.

        """
        body = json.dumps(
            {"template": source, "variables": dict(variables), "max_output": max_output_chars}
        ).encode()
        with self._lock:
            reply = self._ask(_LENGTH.pack(len(body)) + body)
        if "text" in reply:
            return reply["text"]
        if "limit" in reply:
            raise RenderLimit(reply["limit"])
        raise RenderError(reply.get("error", "the template process gave no answer"))

    def close(self) -> None:
        """End the process; a later render starts another."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> dict[str, str]:
        process = self._started()
        try:
            reply: dict[str, str] = json.loads(_exchange(process, request, self._timeout))
        except TimeoutError:
            reply = {"limit": f"the template took longer than {self._timeout:g} seconds"}
        except (OSError, EOFError):
            reply = {"limit": _why_ended(process)}
        except BaseException:
            self._end()  # an interrupted exchange leaves an answer behind; nobody may read it
            raise
        if "limit" in reply:
            self._end()
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
            [sys.executable, "-P", "-m", f"{__package__}.template_worker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,  # Ctrl-C in a terminal is for the parent
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)
        return process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _why_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        code = 0
    if code < 0:  # by a signal: SIGXCPU, or SIGKILL of a machine without memory
        return "the template used too much processor time or memory"
    return f"the template's process failed with exit code {code}"


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
                else:
                    raise EOFError
    return bytes(answer[_LENGTH.size :])


def _complete(answer: bytearray) -> bool:
    if len(answer) < _LENGTH.size:
        return False
    body: int = _LENGTH.unpack_from(answer)[0]
    return len(answer) == _LENGTH.size + body
