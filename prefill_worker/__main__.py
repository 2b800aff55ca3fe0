"""``python -m baton.prefill_worker --config FILE``."""

from __future__ import annotations

import os

import zmq

from ..engine.runner import load_runner
from ..proto.ids import new_incarnation
from ..runtime.lifecycle import on_stop_signal
from ..runtime.log import get_logger
from ..runtime.loop import Loop
from ..runtime.membership import Membership, WorkerIdentity
from ..runtime.process import LoadProgress, leave, run_process, settle
from ..runtime.sockets import RouterChannel
from .config import PrefillWorkerConfig
from .shell import PrefillShell

_log = get_logger()


def serve(config: PrefillWorkerConfig) -> int:
    """Load the model, join the cluster, run until drained or told to stop."""
    runner = load_runner(config.runner, LoadProgress())
    loop = Loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = RouterChannel(context, config.endpoint)
    identity = WorkerIdentity(
        worker=config.worker_id,
        role="prefill",
        incarnation=new_incarnation(),
        pid=os.getpid(),
        endpoint=control.endpoint,
        pool=config.pool,
        model=runner.card,
        max_batch=config.max_active,
    )
    member = Membership(identity, tuple(config.routers))
    shell = PrefillShell(config, runner, member, control, loop, context)
    on_stop_signal(loop, lambda times: shell.drain() if times == 1 else loop.stop())
    settle()
    shell.start()
    _log.info(
        "worker.ready", endpoint=control.endpoint, kv_blocks=runner.num_blocks,
        numerics=runner.card.numerics,
        max_length=runner.card.max_length,
    )  # fmt: skip
    loop.run()
    shell.close()
    context.destroy(linger=0)
    return shell.exit_code


def main() -> None:
    """Entry point."""
    leave(run_process("prefill", PrefillWorkerConfig, serve))


if __name__ == "__main__":
    main()
