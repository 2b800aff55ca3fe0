"""``python -m baton.prefill_worker --config FILE``."""

from __future__ import annotations

import gc
from functools import partial

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

import msgspec
import numpy as np
import numpy.typing as npt

from baton.engine.kernels.memory import aligned_zeros
from baton.engine.loading.embedding_config import DRAW, EMBED
from baton.engine.loading.loader import EmbeddingRunner, load_embedder, load_runner
from baton.engine.loading.runner_config import with_folder
from baton.engine.loading.tasks import folder_task
from baton.engine.pipeline.runner import StepRunner
from baton.kv_transfer.shared_pool import PoolOwner, can_share
from baton.proto.wire.messages import DeviceTicket
from baton.runtime.keys.allowed import OPERATOR, PREFILL, ROUTER
from baton.runtime.keys.keyring import load_keys
from baton.runtime.keys.zap import Doorkeeper, door
from baton.runtime.net.sockets import Context, RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.log import get_logger
from baton.runtime.process.main import (
    LoadProgress,
    MakeShell,
    leave,
    run_incarnations,
    run_process,
    weights_memory,
)
from baton.worker.identity import new_member
from baton.worker.kv_publisher import KvPublisher, kv_publisher
from baton.worker.membership import Membership
from baton.worker.roles import Loaded, serve_roles

from .config import PrefillWorkerConfig
from .embed_shell import EmbedShell
from .shell import PrefillShell

_log = get_logger()


def serve(config: PrefillWorkerConfig) -> int:
    """Load the model, register with the routers, run until drained or terminated."""
    config = msgspec.structs.replace(config, runner=with_folder(config.runner))
    keys = load_keys(config.keys, PREFILL, config.worker_id)
    task = folder_task(config.runner.model, config.runner.task)
    if task == EMBED:
        return run_incarnations(keys, _load_embedder(config))
    loaded = _load_steps(config, task)
    if task == DRAW:
        return run_incarnations(keys, shells(config, loaded))
    return serve_roles(config, loaded, keys)


def _load_steps(config: PrefillWorkerConfig, task: str) -> Loaded:
    """Load a text model, or the text encoders of a picture model."""
    owner = PoolOwner()
    shared = config.share_pool and can_share()
    allocate = partial(_shared_or_own, owner) if shared else aligned_zeros
    runner: StepRunner
    if task == DRAW:
        from baton.engine.pictures.loading import load_encoder  # a tenth of a second

        runner = load_encoder(config.runner, LoadProgress(), allocate)
    else:
        runner = load_runner(config.runner, LoadProgress(), allocate, weights=weights_memory())
    return Loaded(runner, owner.ticket)


CONFIG = PrefillWorkerConfig


def shells(config: PrefillWorkerConfig, loaded: Loaded) -> MakeShell:
    """Return what makes incarnations of a prefill worker on a loaded model."""
    runner = loaded.runner
    ticket = loaded.ticket if runner.backend.on_host else _device_ticket(config, runner)

    def make(wiring: Wiring, doors: Doorkeeper | None) -> PrefillShell:
        control = _control(config, wiring.context, doors)
        publisher = kv_publisher(
            config.kv_events, config.kv_events_topic, config.worker_id, runner.card,
            on_host=runner.backend.on_host,
        )  # fmt: skip
        member = _member(config, runner, control, doors, publisher)
        shell = PrefillShell(config, runner, member, control, wiring, ticket)
        shell.publish(publisher, shell.core.cache)
        _ready(member, runner.num_blocks)
        return shell

    return make


def _device_ticket(config: PrefillWorkerConfig, runner: StepRunner) -> DeviceTicket | None:
    """Return the ticket by which decode workers of this host can map the pool on the GPU.

    None if sharing is off or the GPU cannot share its memory.
    """
    if not config.share_pool:
        return None
    try:
        return runner.backend.pool_ticket(runner.pool)
    except OSError as error:
        _log.warning("pool.not_shared", error=str(error))
        return None


def _shared_or_own(owner: PoolOwner, nbytes: int) -> npt.NDArray[np.uint8]:
    """Allocate shareable memory, or private memory if a sandbox forbids sharing."""
    try:
        return owner.allocate(nbytes)
    except OSError as error:
        _log.warning("pool.not_shared", error=str(error))
        return aligned_zeros(nbytes)


def _load_embedder(config: PrefillWorkerConfig) -> MakeShell:
    runner = load_embedder(config.runner, LoadProgress(), weights_memory())

    def make(wiring: Wiring, doors: Doorkeeper | None) -> EmbedShell:
        control = _control(config, wiring.context, doors)
        member = _member(config, runner, control, doors)
        shell = EmbedShell(config, runner, member, control, wiring)
        _ready(member, 0)
        return shell

    return make


def _control(
    config: PrefillWorkerConfig, context: Context, doors: Doorkeeper | None
) -> RouterChannel:
    """Bind the control socket. Every cluster process except clients may send a Probe there."""
    keys = door(doors, "control", PREFILL, ROUTER, OPERATOR)
    return RouterChannel(context, config.endpoint, keys=keys)


def _member(
    config: PrefillWorkerConfig,
    runner: StepRunner | EmbeddingRunner,
    control: RouterChannel,
    doors: Doorkeeper | None,
    publisher: KvPublisher | None = None,
) -> Membership:
    return new_member(
        config, runner.card, runner.backend, control.endpoint, config.max_active, doors, publisher
    )


def _ready(member: Membership, kv_blocks: int) -> None:
    card = member.identity.model
    _log.info(
        "worker.ready", endpoint=member.identity.endpoint, kv_blocks=kv_blocks, task=card.task,
        numerics=card.numerics, device=member.identity.device,
        max_length=card.max_length,
    )  # fmt: skip


def main() -> None:
    """Entry point."""
    leave(run_process("prefill", PrefillWorkerConfig, serve))


if __name__ == "__main__":
    main()
