"""``python -m baton.decode_worker --config FILE``."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

import msgspec

from baton.engine.audio.chunks import AudioDecoder, load_audio
from baton.engine.audio.codec_kernels import codec_kernels
from baton.engine.loading.embedding_config import DRAW
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import with_folder
from baton.engine.loading.tasks import folder_task
from baton.engine.pipeline.runner import StepRunner
from baton.proto.limits import MAX_KV_FRAME_BYTES
from baton.runtime.keys.allowed import DECODE, OPERATOR, PREFILL, ROUTER
from baton.runtime.keys.keyring import load_keys
from baton.runtime.keys.zap import Doorkeeper, door
from baton.runtime.net.channel import ChannelOptions
from baton.runtime.net.sockets import RouterChannel
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
from baton.worker.kv_publisher import kv_publisher
from baton.worker.roles import Loaded, serve_roles

from .config import DecodeWorkerConfig
from .job import with_local_prompts
from .shell import DecodeShell

_log = get_logger()


def data_address(config: DecodeWorkerConfig) -> str:
    """Return the address for KV frames: the configured one, or one next to the control endpoint."""
    if config.data_endpoint:
        return config.data_endpoint
    if config.endpoint.startswith("ipc://"):
        return config.endpoint + "-data"
    return config.endpoint.rpartition(":")[0] + ":0"


def serve(config: DecodeWorkerConfig) -> int:
    """Load the model, register with the routers, run until drained or terminated."""
    config = msgspec.structs.replace(config, runner=with_folder(config.runner))
    keys = load_keys(config.keys, DECODE, config.worker_id)
    if folder_task(config.runner.model, config.runner.task) == DRAW:
        return run_incarnations(keys, shells(config, Loaded(_load_denoiser(config))))
    return serve_roles(config, Loaded(_load_text(config)), keys)


CONFIG = DecodeWorkerConfig


def shells(config: DecodeWorkerConfig, loaded: Loaded) -> MakeShell:
    """Return what makes incarnations of a decode worker on a loaded model."""
    runner, audio = loaded.runner, None
    if runner.card.audio is not None:
        audio = load_audio(config.runner.model, codec_kernels(runner.backend))[1]

    def make(wiring: Wiring, doors: Doorkeeper | None) -> DecodeShell:
        return _shell(config, runner, audio, wiring, doors)

    return make


def _load_text(config: DecodeWorkerConfig) -> StepRunner:
    return load_runner(config.runner, LoadProgress(), weights=weights_memory())


def _load_denoiser(config: DecodeWorkerConfig) -> StepRunner:
    from baton.engine.pictures.loading import load_denoiser  # a tenth of a second

    return load_denoiser(config.runner, LoadProgress())


def _shell(
    config: DecodeWorkerConfig,
    runner: StepRunner,
    audio: AudioDecoder | None,
    wiring: Wiring,
    doors: Doorkeeper | None,
) -> DecodeShell:
    """Create the sockets and the core of a new incarnation."""
    context = wiring.context
    control = RouterChannel(
        context, config.endpoint, keys=door(doors, "control", PREFILL, ROUTER, OPERATOR)
    )
    data = RouterChannel(
        context,
        data_address(config),
        keys=door(doors, "data", PREFILL),
        options=ChannelOptions(
            max_frame_bytes=MAX_KV_FRAME_BYTES,
            max_frames=2,
            backlog_bytes=2 * config.credit_budget,  # senders keep to their credit
        ),
    )
    publisher = kv_publisher(
        config.kv_events, config.kv_events_topic, config.worker_id, runner.card,
        on_host=runner.backend.on_host,
    )  # fmt: skip
    card = with_local_prompts(runner.card, vision=config.runner.vision)
    member = new_member(
        config, card, runner.backend, control.endpoint, config.max_batch, doors, publisher
    )
    shell = DecodeShell(config, runner, member, control, data, wiring, audio)
    shell.publish(publisher, shell.core.cache)
    _log.info(
        "worker.ready", endpoint=control.endpoint, data_endpoint=data.endpoint,
        kv_blocks=runner.num_blocks, numerics=runner.card.numerics,
        device=member.identity.device, max_length=runner.card.max_length,
    )  # fmt: skip
    return shell


def main() -> None:
    """Entry point."""
    leave(run_process("decode", DecodeWorkerConfig, serve))


if __name__ == "__main__":
    main()
