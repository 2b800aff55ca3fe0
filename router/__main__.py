"""``python -m baton.router --config FILE``: run one router until a stop signal."""

from __future__ import annotations

import gc
import sys

import zmq

from ..proto.ids import new_incarnation
from ..runtime.keys.allowed import ROUTER
from ..runtime.keys.keyring import load_keys
from ..runtime.keys.zap import Doorkeeper
from ..runtime.net.loop import Loop
from ..runtime.process.log import get_logger
from ..runtime.process.main import run_process, settle, show_life
from ..runtime.process.os_settings import on_stop_signal
from .config import RouterConfig
from .describe import read_text_files
from .shell import RouterShell

GC_THRESHOLDS = (50_000, 50, 100)
"""Thresholds of the garbage collector: rare collections, since each pause adds latency."""


def serve(config: RouterConfig) -> int:
    """Run the router and return the exit code."""
    keys = load_keys(config.keys, ROUTER, config.name)
    files = read_text_files(config.model_folder, config.max_described_bytes)
    loop = Loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    doors = None if keys is None else Doorkeeper(context, keys)
    shell = RouterShell(config, files, new_incarnation(), loop, context, doors)
    if doors is not None:
        doors.attach(loop)
    shell.start()
    on_stop_signal(loop, shell.stop)
    get_logger().info(
        "router.listening", clients=shell.clients.endpoint, workers=shell.workers.endpoint
    )
    gc.set_threshold(*GC_THRESHOLDS)
    settle()
    loop.call_later(0.0, lambda: show_life(loop))
    try:
        loop.run()
    finally:
        shell.close()
        if doors is not None:
            doors.close()
        context.term()
    return 0


def main() -> int:
    """Entry point."""
    return run_process("router", RouterConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
