"""The helper process of :mod:`.guarded`: renders templates under hard limits of the kernel.

``python -m baton.text.template_worker MEMORY_BYTES CPU_SECONDS``. Requests arrive on standard
input and answers go to standard output, both as a 4-byte big-endian length and a JSON object.
The process ends with its input, so it never outlives its parent. It cannot write files, and
SIGXCPU ends a rendering that exceeds its CPU seconds.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from .sandbox import RenderError, RenderLimit, render

LENGTH = struct.Struct(">I")


def limit_process(memory_bytes: int) -> None:
    """Limit the address space; forbid file writes and core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_cpu_seconds(seconds: int) -> None:
    """Allow this process ``seconds`` of CPU time in addition to the time used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return ``{"text"}``, ``{"limit"}`` or ``{"error"}``."""
    try:
        return {"text": render(request["template"], request["variables"], request["max_output"])}
    except RenderLimit as error:
        return {"limit": str(error)}
    except RenderError as error:
        return {"error": str(error)}


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes, or fewer at the end of the stream."""
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(
    requests: BinaryIO,
    answers: BinaryIO,
    cpu_seconds: int,
    respond: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Answer requests until the input ends."""
    while len(head := read_exactly(requests, LENGTH.size)) == LENGTH.size:
        allow_cpu_seconds(cpu_seconds)
        request = json.loads(read_exactly(requests, *LENGTH.unpack(head)))
        body = json.dumps(respond(request)).encode()
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    limit_process(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2]), answer)
