"""Transfer of a member's settings from the controller to the member's node.

The controller sends the settings that are equal on all nodes. The node adds its own values: its
address, its free memory, and the path of the embedded model. The format is JSON, not pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.decode_worker.config import DecodeWorkerConfig
from baton.engine.loading.embedding_config import DRAW
from baton.engine.loading.runner_config import DEFAULT_KV_BYTES, RunnerConfig, with_folder
from baton.gateway.config import GatewayConfig
from baton.prefill_worker.config import PrefillWorkerConfig
from baton.proto.errors import BatonError, ConfigError
from baton.router.config import RouterConfig
from baton.runtime.process.memory import free_memory

from ..config import demo_model_folder
from ..controller.backend import MemberSpec
from ..plan.folders import folder_memory
from ..plan.memory import PROCESS_BYTES, kv_share, picture_share
from ..roles import DECODE, GATEWAY, PREFILL, ROUTER
from ..supervise.process import ProcessSpec

CONFIGS: dict[str, type[msgspec.Struct]] = {
    ROUTER: RouterConfig,
    PREFILL: PrefillWorkerConfig,
    DECODE: DecodeWorkerConfig,
    GATEWAY: GatewayConfig,
}
LOOPBACK = "127.0.0.1"


class Order(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The transferred form of a :class:`MemberSpec`.

    ``head``: address of the routers' node. ``json_log``: of the :class:`ProcessSpec`.
    """

    name: str
    role: str
    revision: int
    module: str
    config: msgspec.Raw
    head: str
    json_log: bool = False


def order_of(spec: MemberSpec, head: str) -> bytes:
    """Return the argument for a member's actor, an :class:`Order` as JSON.

    The path of the embedded model is left out, because it differs between nodes.
    """
    config = _without_demo_model(spec.process.config)
    order = Order(
        name=spec.name,
        role=spec.role,
        revision=spec.revision,
        module=spec.process.module,
        config=msgspec.Raw(msgspec.json.encode(config)),
        head=head,
        json_log=spec.process.json_log,
    )
    return msgspec.json.encode(order)


def _without_demo_model(config: Any) -> Any:
    here = str(demo_model_folder())
    if getattr(config, "model_folder", "") == here:
        return msgspec.structs.replace(config, model_folder="")
    runner = getattr(config, "runner", None)
    if runner is None or runner.model != here:
        return config
    return msgspec.structs.replace(config, runner=msgspec.structs.replace(runner, model=""))


def read_order(data: bytes) -> Order:
    """Decode the result of :func:`order_of`. Raises ConfigError for other data."""
    try:
        return msgspec.json.decode(data, type=Order)
    except msgspec.DecodeError as problem:
        raise ConfigError(f"a member's settings cannot be read: {problem}") from problem


def place(order: Order, host: str, kv_bytes: int = 0) -> ProcessSpec:
    """Return the process to run on the node with address ``host``.

    ``kv_bytes``: KV memory of the worker that takes another role; 0: sized by free memory. Raises
    ConfigError for unreadable settings, and for a node on another host than the routers if there
    are no keys.
    """
    try:
        config: Any = msgspec.json.decode(order.config, type=CONFIGS[order.role])
    except (msgspec.DecodeError, KeyError) as problem:
        raise ConfigError(f"settings of {order.name} cannot be read here: {problem}") from problem
    if not config.keys and host != order.head:
        raise ConfigError(
            f"the routers are on {order.head} and this node is {host}: connections between hosts "
            "need keys; create them with baton keygen and give the folder as the setting 'keys'"
        )
    if config.keys:
        config = msgspec.structs.replace(config, keys=str(Path(config.keys).expanduser()))
    if order.role == ROUTER:
        folder = config.model_folder or str(demo_model_folder())
        config = msgspec.structs.replace(config, model_folder=folder)
    elif order.role != GATEWAY:
        here = host if config.keys else LOOPBACK
        runner = _runner(config, kv_bytes)
        config = msgspec.structs.replace(config, endpoint=f"tcp://{here}:0", runner=runner)
    return ProcessSpec(
        name=order.name,
        role=order.role,
        module=order.module,
        config=config,
        json_log=order.json_log,
    )


def _runner(config: Any, kv_bytes: int) -> RunnerConfig:
    """Set the model's folder and the GPU, and size the KV memory by the free memory of this node.

    Ray gives each worker one GPU and hides the others by CUDA_VISIBLE_DEVICES, so that the worker's
    own is always device 0.
    """
    runner: RunnerConfig = config.runner
    model = runner.model or str(demo_model_folder())
    on_gpu = runner.backend == "cuda"
    memory = runner.kv_bytes or (0 if runner.num_blocks else kv_bytes)
    if not (memory or runner.num_blocks or on_gpu):
        memory = _kv_memory(model, runner, config)
    pictures = runner.picture_bytes or _picture_memory(model, runner, config, memory)
    return msgspec.structs.replace(
        runner,
        model=model,
        ordinal=0,
        kv_bytes=memory,
        device_sharers=1,
        picture_bytes=pictures,
    )


def _kv_memory(model: str, runner: RunnerConfig, config: Any) -> int:
    free = free_memory()
    if free is None:
        return DEFAULT_KV_BYTES
    try:
        model = with_folder(msgspec.structs.replace(runner, model=model)).model
        needs = folder_memory(model, runner.max_length, runner.block_size, runner.kv_type)
    except BatonError:
        return DEFAULT_KV_BYTES  # the worker will report the model's problem
    batch = getattr(config, "max_batch", 0) or getattr(config, "max_active", 1)
    return kv_share(free, 1, batch, needs)


def _picture_memory(model: str, runner: RunnerConfig, config: Any, kv: int) -> int:
    """Return the default memory for pictures of a decode worker on this node, else 0."""
    free = free_memory()
    if not isinstance(config, DecodeWorkerConfig) or runner.task != DRAW or free is None:
        return 0
    try:
        needs = folder_memory(model, 1, runner.block_size)
    except BatonError:
        return 0  # the worker will report the model's problem
    blocks = runner.num_blocks * runner.block_size * needs.context or kv
    return picture_share(free, PROCESS_BYTES + needs.drawing + blocks, 1, needs)
