"""``python -m baton.router --config FILE``: run one router until a stop signal."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

import zmq

from baton.proto.ids import new_incarnation
from baton.runtime.keys.allowed import ROUTER
from baton.runtime.keys.keyring import load_keys
from baton.runtime.keys.zap import Doorkeeper
from baton.runtime.metrics.families import Family
from baton.runtime.metrics.listener import MetricsListener
from baton.runtime.metrics.vllm import vllm_families
from baton.runtime.net.loop import Loop
from baton.runtime.process.garbage import collect_rarely
from baton.runtime.process.log import get_logger
from baton.runtime.process.main import favor_event_loop, run_process
from baton.runtime.process.os_settings import on_stop_signal

from .config import RouterConfig
from .describe import read_text_files
from .shell import RouterShell


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
    metrics = _metrics(config, loop, shell)
    on_stop_signal(loop, shell.stop)
    get_logger().info(
        "router.listening", clients=shell.clients.endpoint, workers=shell.workers.endpoint
    )
    collect_rarely()
    if config.metrics_port or config.otlp_endpoint:
        favor_event_loop()
    try:
        loop.run()
    finally:
        if metrics is not None:
            metrics.close()
        shell.close()
        if doors is not None:
            doors.close()
        context.term()
    return shell.exit_code


def _metrics(config: RouterConfig, loop: Loop, shell: RouterShell) -> MetricsListener | None:
    """Serve the router's metrics, if a port is set."""
    if not config.metrics_port:
        return None

    def families() -> list[Family]:
        own = shell.core.families(loop.now())
        compatible = vllm_families(own) if config.metrics_compat else []
        return [*own, *compatible, *shell.own_families([*own, *compatible])]

    listener = MetricsListener(
        loop.asyncio_loop, config.metrics_host, (config.metrics_port,), families,
        config.metrics_keys, allowed_hosts=config.allowed_hosts,
    )  # fmt: skip
    listener.start()
    return listener


def main() -> int:
    """Entry point."""
    return run_process("router", RouterConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
