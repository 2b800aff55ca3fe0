"""The life of a worker process: settings in, exit code out.

Exit codes: 0 drained or stopped, 1 a setting or model is wrong (a restart would not help),
:data:`EXIT_RESTART` this incarnation is over and a new one is welcome.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ..proto.errors import BatonError
from . import lifecycle
from .config import load
from .log import configure, get_logger, never_block

EXIT_RESTART = 4
TICK_S = 0.05
"""How often a worker's core evaluates its timers."""

Config = TypeVar("Config", bound=msgspec.Struct)
_log = get_logger()


def run_process(role: str, kind: type[Config], serve: Callable[[Config], int]) -> int:
    """Parse ``--config FILE [--parent PID]``, prepare the process, serve.

    A :class:`BatonError`, or too little memory, ends it with one line and exit code 1, no
    traceback.
    """
    lifecycle.limit_blas_threads(1)
    lifecycle.recycle_large_buffers()
    parser = argparse.ArgumentParser(prog=f"baton-{role}")
    parser.add_argument("--config", required=True, help="settings file (JSON or TOML)")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    options = parser.parse_args()
    configure(role)
    if options.parent:
        # Nothing supervises us then: going on, even to drain, would leave an orphan.
        lifecycle.die_with_parent(options.parent, signal.SIGKILL)
        never_block()
    try:
        config = load(options.config, kind)
        process = str(getattr(config, "worker_id", getattr(config, "name", "")))
        human = getattr(config, "log_format", "json") == "text"
        configure(role, process, level=getattr(config, "log_level", "info"), human=human)
        code = serve(config)
    except BatonError as error:
        _log.error("process.failed", code=error.code, error=str(error))
        return 1
    except MemoryError as error:
        _log.error("process.failed", code="capacity", error=f"not enough memory: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


class LoadProgress:
    """Reports how far a checkpoint is loaded, a few times a second."""

    def __init__(self, interval: float = 0.2) -> None:
        self._interval = interval
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are packed."""
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + self._interval
            _log.report("load.progress", bytes_done=done, bytes_total=total)


def settle() -> None:
    """After loading: what lives now lives long, so the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def leave(code: int) -> None:
    """End the process without waiting for a compute thread that may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
