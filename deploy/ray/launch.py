"""``baton launch --backend ray``: start a cluster by its one controller actor on the head."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import time
from collections.abc import Container
from typing import Any

import msgspec

from baton.proto.errors import BatonError, ConfigError, ConnectionLost, RequestFailed

from ..config import ServeSettings
from ..controller.admin_client import AdminClient
from ..plan.plan import extension_folder
from ..plan.prepare import check_extensions, check_model
from .actors import CONTROLLER, Controller
from .api import LAST_WORDS, existing, get_value, put_value
from .connect import NAMESPACE, connect, is_own_address
from .controller import ControllerFacts
from .plan import ray_settings, with_worker_per_ray_gpu

START_TIMEOUT = 60.0
"""Seconds for the controller's actor to start; on a busy head this takes several."""
FIRST_LOOK = 5.0
"""Seconds after the start in which errors of the settings are reported."""
END_TIMEOUT = 20.0
"""Seconds for the actors to end after they were killed."""
_NUMBERS = ("prefill", "decode")
_HEAD = {"node:__internal_head__": 0.001}
"""A resource of the head's node only."""


def launch(
    settings: ServeSettings, ray_address: str = "auto", *, per_gpu: bool = False
) -> tuple[ControllerFacts, bool]:
    """Start the cluster, or find it running; return its facts, and whether it was running before.

    ``per_gpu``: the GPUs that the Ray cluster has now decide the numbers of workers. Raises
    BatonError if the cluster cannot start; the controller's actor is removed then.
    """
    check_extensions(settings)  # first: a model family reads the folder
    check_model(settings)
    # The actors have other working directories.
    settings = msgspec.structs.replace(settings, extensions=extension_folder(settings))
    ray = connect(ray_address)
    head = _head(ray)
    _check_keys(ray, settings, head)
    ray_settings(settings, head)
    found = CONTROLLER in existing()
    if not found:
        put_value(LAST_WORDS, b"")
        if per_gpu:
            settings = with_worker_per_ray_gpu(settings, ray.cluster_resources())
    actor = ray.remote(Controller).options(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        resources=_HEAD,
    )
    facts = _facts(ray, actor.remote(msgspec.json.encode(settings)))
    if facts.refusal:
        _end(ray, CONTROLLER)
        raise ConfigError(facts.refusal)
    if found:
        _check_same(facts, settings, _NUMBERS if per_gpu else ())
    else:
        _watch_start(facts, settings.keys)
    return facts, found


def _watch_start(facts: ControllerFacts, keys: str) -> None:
    """Watch the start for :data:`FIRST_LOOK` seconds. Raises RequestFailed if it fails.

    It does not wait until the cluster serves, because hosts may join much later.
    """
    until = time.monotonic() + FIRST_LOOK
    while time.monotonic() < until:
        if CONTROLLER not in existing():
            words = (get_value(LAST_WORDS) or b"").decode()
            raise RequestFailed(words or "the cluster was shut down while it started")
        with (
            contextlib.suppress(BatonError),
            AdminClient(facts.admin, keys=keys, timeout=1.0) as client,
        ):
            if client.overview().phase == "serving":
                return
        time.sleep(0.2)


def end_actors(ray_address: str = "auto") -> list[str]:
    """Kill all of Baton's actors at once, even without a controller; return their names.

    Raises RequestFailed if some still exist after :data:`END_TIMEOUT` seconds.
    """
    ray = connect(ray_address)
    # The controller first, or it would restart the members.
    names = sorted(existing(), key=lambda name: name != CONTROLLER)
    for name in names:
        _end(ray, name)
    until = time.monotonic() + END_TIMEOUT
    while left := existing():
        if time.monotonic() > until:
            raise RequestFailed(f"still running after {END_TIMEOUT:g} s: {', '.join(left)}")
        time.sleep(0.1)
    return names


def _head(ray: Any) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    head = next((n for n in nodes if "node:__internal_head__" in n["Resources"]), None)
    if head is None:
        raise ConnectionLost("the Ray cluster has no live head node")
    return str(head["NodeManagerAddress"])


def _check_keys(ray: Any, settings: ServeSettings, head: str) -> None:
    """Raise ConfigError for nodes on other hosts without keys, and if this is not the head.

    Without keys all sockets listen on the loopback address.
    """
    others = {n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]} - {head}
    if others and not settings.keys:
        raise ConfigError(
            f"the Ray cluster has nodes on other hosts ({', '.join(sorted(others)[:4])}), which "
            "need keys: create them with baton keygen, copy the folder to every host and give it "
            "as the setting 'keys'"
        )
    if not is_own_address(head):
        raise ConfigError(f"run baton launch on the head of the Ray cluster, {head}")


def _facts(ray: Any, actor: Any) -> ControllerFacts:
    from ray.exceptions import GetTimeoutError, RayError

    try:
        data = ray.get(actor.facts.remote(), timeout=START_TIMEOUT)
    except GetTimeoutError as problem:
        raise ConnectionLost(
            f"the controller did not start within {START_TIMEOUT:g} s; see ray status and "
            "the logs in the head's Ray session folder"
        ) from problem
    except RayError as problem:
        raise RequestFailed(f"the controller cannot start: {str(problem)[-500:]}") from problem
    facts: ControllerFacts = msgspec.json.decode(data, type=ControllerFacts)
    return facts


def _check_same(facts: ControllerFacts, settings: ServeSettings, free: Container[str] = ()) -> None:
    """Raise ConfigError if the running cluster has other settings. ``free``: any value will do."""
    wanted = msgspec.to_builtins(settings)
    launched = facts.launched
    other = [
        name for name, value in wanted.items() if name not in free and launched.get(name) != value
    ]
    if other:
        raise ConfigError(
            f"a cluster is already running with other settings: {', '.join(sorted(other))}; "
            "change it with baton scale or baton rollout, or end it with baton down"
        )


def _end(ray: Any, name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    except ValueError:
        return  # the actor has ended already
