"""Whether this process may still open files and start threads. libzmq aborts it at a limit."""

from __future__ import annotations

import os
import resource
import threading

from baton.proto.errors import CapacityError

MORE_FILES = "raise the limit on open files (ulimit -n)"
MORE_THREADS = "raise the limit on processes (ulimit -u, pids.max of the container)"


def require_room(files: int, threads: int) -> None:
    """Raise CapacityError unless this process can open and start so many more."""
    opened: list[int] = []
    started: list[threading.Thread] = []
    end = threading.Event()
    try:
        while len(opened) < files:
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
        while len(started) < threads:
            thread = threading.Thread(target=end.wait, name="room", daemon=True)
            thread.start()
            started.append(thread)
    except OSError as problem:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"cannot connect: {problem.strerror} ({limit}); close some, or {MORE_FILES}"
        raise CapacityError(text, retry_after=1.0) from None
    except RuntimeError as problem:
        text = f"cannot connect: {problem}; {MORE_THREADS}"
        raise CapacityError(text, retry_after=1.0) from None
    finally:
        end.set()
        for thread in started:
            thread.join()
        for descriptor in opened:
            os.close(descriptor)
