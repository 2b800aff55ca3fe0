"""``baton launch --backend ray``: have a controller actor on the head, and only one."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from ...proto.errors import BatonError, ConfigError, ConnectionLost, RequestFailed
from ..admin_client import AdminClient
from ..config import ServeSettings, with_present_names
from ..prepare import check_model
from .actors import CONTROLLER, Controller
from .api import LAST_WORDS, existing, get_value, put_value
from .connect import NAMESPACE, connect, is_own_address
from .controller import ControllerFacts
from .plan import ray_settings

START_TIMEOUT = 60.0
"""Seconds for the controller's actor to start; a busy head takes a few."""
FIRST_LOOK = 5.0
"""Seconds in which what is wrong with settings shows itself."""
END_TIMEOUT = 20.0
"""Seconds for actors to be gone once the controller is told to end."""
_HEAD = {"node:__internal_head__": 0.001}
"""A resource that the head's node alone has."""


def launch(settings: ServeSettings, ray_address: str = "auto") -> tuple[ControllerFacts, bool]:
    """Start the cluster, or find it running; returns where it listens, and whether it ran.

    BatonError when it cannot be: nothing is left of the attempt then.
    """
    check_model(settings)
    ray = connect(ray_address)
    head = _head(ray)
    _check_keys(ray, settings, head)
    ray_settings(settings, head)
    found = CONTROLLER in existing()
    if not found:
        put_value(LAST_WORDS, b"")
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
        _check_same(facts, settings)
    else:
        _watch_start(facts, settings.keys)
    return facts, found


def _watch_start(facts: ControllerFacts, keys: str) -> None:
    """Look on for a moment; RequestFailed when members refuse their settings at once.

    Hosts may join much later, so nobody waits for all of them here.
    """
    until = time.monotonic() + FIRST_LOOK
    while time.monotonic() < until:
        if CONTROLLER not in existing():
            words = (get_value(LAST_WORDS) or b"").decode()
            raise RequestFailed(words or "the cluster was ended while it started")
        with (
            contextlib.suppress(BatonError),
            AdminClient(facts.admin, keys=keys, timeout=1.0) as client,
        ):
            if client.overview().phase == "serving":
                return
        time.sleep(0.2)


def end_actors(ray_address: str = "auto") -> list[str]:
    """End every actor of Baton's at once, also without a controller; returns their names."""
    ray = connect(ray_address)
    names = sorted(existing(), key=lambda name: name != CONTROLLER)  # it would start others anew
    for name in names:
        _end(ray, name)
    until = time.monotonic() + END_TIMEOUT
    while left := existing():
        if time.monotonic() > until:
            raise RequestFailed(f"still there after {END_TIMEOUT:g} s: {', '.join(left)}")
        time.sleep(0.1)
    return names


def _head(ray: Any) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    head = next((n for n in nodes if "node:__internal_head__" in n["Resources"]), None)
    if head is None:
        raise ConnectionLost("the Ray cluster has no live head node")
    return str(head["NodeManagerAddress"])


def _check_keys(ray: Any, settings: ServeSettings, head: str) -> None:
    """Without keys all sockets are on the loopback, which other hosts do not share."""
    others = {n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]} - {head}
    if others and not settings.keys:
        raise ConfigError(
            f"the Ray cluster has nodes on other hosts ({', '.join(sorted(others)[:4])}) and there "
            "are no keys: make them with baton keygen, put the folder on every host and give it "
            "as the setting 'keys'"
        )
    if not is_own_address(head):
        raise ConfigError(f"launch on the head of the Ray cluster, {head}")


def _facts(ray: Any, actor: Any) -> ControllerFacts:
    from ray.exceptions import GetTimeoutError, RayError

    try:
        data = ray.get(actor.facts.remote(), timeout=START_TIMEOUT)
    except GetTimeoutError as problem:
        raise ConnectionLost(
            f"the controller has not started after {START_TIMEOUT:g} s; see ray status and "
            "the logs in the head's Ray session folder"
        ) from problem
    except RayError as problem:
        raise RequestFailed(f"the controller cannot start: {str(problem)[-500:]}") from problem
    facts: ControllerFacts = msgspec.json.decode(data, type=ControllerFacts)
    return facts


def _check_same(facts: ControllerFacts, settings: ServeSettings) -> None:
    wanted = msgspec.to_builtins(settings)
    launched = with_present_names(facts.launched)
    other = [name for name, value in wanted.items() if launched.get(name) != value]
    if other:
        raise ConfigError(
            f"a cluster runs here already, launched with another {', '.join(sorted(other))}; "
            "change it with baton scale or baton rollout, or end it with baton down"
        )


def _end(ray: Any, name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    except ValueError:
        return  # it has gone by itself
