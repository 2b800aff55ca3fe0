"""A member's settings on their way from the controller to the node it runs on.

The head says what is the same everywhere; the node fills in what only it knows: its address, its
free memory, where the embedded model lies. They travel as JSON, never as Python objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...decode_worker.config import DecodeWorkerConfig
from ...engine.loading.checkpoint import load_checkpoint
from ...engine.loading.loader import DEFAULT_KV_BYTES, RunnerConfig
from ...prefill_worker.config import PrefillWorkerConfig
from ...proto.errors import BatonError, ConfigError
from ...router.config import RouterConfig
from ..config import demo_model_folder
from ..launcher import DECODE, PREFILL, ROUTER, MemberSpec
from ..memory import free_memory, kv_share, model_memory
from ..processes import ProcessSpec

CONFIGS: dict[str, type[msgspec.Struct]] = {
    ROUTER: RouterConfig,
    PREFILL: PrefillWorkerConfig,
    DECODE: DecodeWorkerConfig,
}
LOOPBACK = "127.0.0.1"
DEVICE_SHARE = 0.9
"""Of a GPU's memory for its one worker: the rest is for the driver and for what kernels take."""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A :class:`MemberSpec` as it travels.

    ``head``: address of the node the routers are on.
    """

    name: str
    role: str
    revision: int
    module: str
    config: msgspec.Raw
    head: str


def order_of(spec: MemberSpec, head: str) -> bytes:
    """The bytes a member's actor is made with.

    Where the embedded model lies is the node's to know.
    """
    config = _without_demo_model(spec.process.config)
    order = Order(
        name=spec.name,
        role=spec.role,
        revision=spec.revision,
        module=spec.process.module,
        config=msgspec.Raw(msgspec.json.encode(config)),
        head=head,
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
    """The other way; ConfigError for what is none."""
    try:
        return msgspec.json.decode(data, type=Order)
    except msgspec.DecodeError as problem:
        raise ConfigError(f"a member's settings cannot be read: {problem}") from problem


def place(order: Order, host: str) -> ProcessSpec:
    """What to run on the node of this address.

    ConfigError when it cannot work here: without keys everything must be one host.
    """
    try:
        config: Any = msgspec.json.decode(order.config, type=CONFIGS[order.role])
    except (msgspec.DecodeError, KeyError) as problem:
        raise ConfigError(f"settings of {order.name} cannot be read here: {problem}") from problem
    if not config.keys and host != order.head:
        raise ConfigError(
            f"the routers are on {order.head} and this node is {host}: between hosts keys are "
            "needed; make them with baton keygen and give them as the setting 'keys'"
        )
    if config.keys:
        config = msgspec.structs.replace(config, keys=str(Path(config.keys).expanduser()))
    if order.role == ROUTER:
        folder = config.model_folder or str(demo_model_folder())
        config = msgspec.structs.replace(config, model_folder=folder)
    else:
        here = host if config.keys else LOOPBACK
        runner = _runner(config)
        config = msgspec.structs.replace(config, endpoint=f"tcp://{here}:0", runner=runner)
    return ProcessSpec(name=order.name, role=order.role, module=order.module, config=config)


def _runner(config: Any) -> RunnerConfig:
    """The model's folder and the KV memory, by what is free on this node."""
    runner: RunnerConfig = config.runner
    model = runner.model or str(demo_model_folder())
    on_gpu = runner.backend == "cuda"
    memory = runner.kv_bytes
    if not (memory or runner.num_blocks or on_gpu):
        memory = _kv_memory(model, runner.max_length, config)
    share = DEVICE_SHARE if on_gpu else runner.device_share
    return msgspec.structs.replace(runner, model=model, kv_bytes=memory, device_share=share)


def _kv_memory(model: str, max_length: int, config: Any) -> int:
    free = free_memory()
    if free is None:
        return DEFAULT_KV_BYTES
    try:
        needs = model_memory(load_checkpoint(model), max_length)
    except BatonError:
        return DEFAULT_KV_BYTES  # the worker says what is wrong
    batch = getattr(config, "max_batch", 0) or getattr(config, "max_active", 1)
    return kv_share(free, 1, batch, needs)
