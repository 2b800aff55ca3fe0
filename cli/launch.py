"""``baton launch``: start a cluster in the background. Idempotent."""

from __future__ import annotations

import argparse
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

import msgspec

from baton.client.routers import separated
from baton.deploy.config import ServeSettings
from baton.deploy.controller.admin import Overview
from baton.deploy.controller.admin_client import AdminClient, listens
from baton.deploy.local.banner import dashboard_of, kernels_warning, metrics_of
from baton.deploy.local.cluster import LocalCluster
from baton.deploy.local.daemon import Daemon
from baton.deploy.local.terminal import terminal
from baton.deploy.plan.addresses import admin_address, claim_admin, client_addresses, ipc_path
from baton.deploy.plan.hub import is_hub_name, with_local_model
from baton.deploy.plan.plan import key_folder, model_path, router_names
from baton.deploy.plan.prepare import check_start, gpus_decide, with_task
from baton.proto.errors import ConfigError, ConnectionLost, RequestFailed
from baton.runtime.keys.api_keys import KEY_VARIABLE

from .output import say
from .parser import one_of, shown, warn
from .serve import add_settings, run_cluster, settings_of

EPILOG = """\
A running cluster is not changed: the exit code is 0 if it has the same settings, else 1.
Precedence of settings: as for baton serve.
"""
BACKENDS = ("local", "ray")
_PATIENCE_S = 5.0
_TCP_PATIENCE_S = 1.0
"""Seconds to wait for a controller's answer over TCP, where listening cannot be checked first."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("launch", help="start a cluster in the background", epilog=EPILOG)
    add_settings(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument(
        "--backend",
        dest="where",
        type=one_of(BACKENDS),
        metavar=shown(BACKENDS),
        default="local",
        help="process manager: this machine, or the Ray cluster whose head is this machine [local]",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        default="auto",
        help="head of the Ray cluster [the Ray cluster of this machine]",
    )
    parser.add_argument(
        "--detach",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="return after the cluster serves; --no-detach stays in the foreground as baton serve",
    )
    parser.add_argument("--log", metavar="FILE", help="log file of a detached cluster")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the cluster, unless it runs already."""
    if arguments.where == "ray":
        return on_ray(arguments)
    settings = absolute(with_local_model(settings_of(arguments), terminal))
    check_start(settings)
    running = running_cluster(settings)
    if running is not None:
        return already(settings, running)
    if not arguments.detach:
        return run_cluster(LocalCluster(settings, terminal))
    chosen = client_addresses(settings.address, router_names(settings), keyed=bool(settings.keys))
    address = ",".join(chosen.values())
    if warning := kernels_warning(settings):
        warn(warning)
    log = Path(arguments.log).absolute() if arguments.log else log_beside(address)
    settings = msgspec.structs.replace(settings, address=address)
    daemon = Daemon(settings, log)
    try:
        daemon.wait_ready()
    except RequestFailed:
        running = running_cluster(settings)  # another launch was first
        if running is None:
            raise
        return already(settings, running)
    say(f"serving at {address} (pid {daemon.pid}, log {log})")
    running = running_cluster(settings)
    _print_urls("" if running is None else running.http, metrics_of(settings))
    return 0


def _print_urls(http: str, metrics: str) -> None:
    """Print where the gateways and the dashboard are, and the metrics; empty: nowhere."""
    for what, url in (("HTTP", http), ("dashboard", dashboard_of(http)), ("metrics", metrics)):
        if url:
            say(f"{what} at {url}")


def on_ray(arguments: argparse.Namespace) -> int:
    """Start a controller on Ray's head. Ray starts the other processes as hosts become free."""
    per_gpu = False

    def note(settings: ServeSettings, given: Container[str]) -> ServeSettings:
        nonlocal per_gpu
        per_gpu = gpus_decide(settings, given)
        return settings

    settings = settings_of(arguments, note)
    if is_hub_name(settings.model):
        raise ConfigError(
            f"{settings.model} is a name on the Hugging Face hub, and not here; under Ray each "
            "host reads the model from a folder or GGUF file: download it to the same path on all "
            "hosts, and give that path"
        )
    if not arguments.detach:
        raise ConfigError("--no-detach cannot be combined with --backend ray")
    if settings.gateways and not settings.api_key_file and os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"{KEY_VARIABLE} does not reach the gateways under Ray; give --api-key-file instead, a "
            "file on the head"
        )
    from baton.deploy.ray.launch import launch  # Ray is an extra

    facts, found = launch(absolute(settings), arguments.ray_address, per_gpu=per_gpu)
    print(f"{'already running' if found else 'launched'} at {facts.address}")
    _print_urls(facts.http, "")
    print(f"wait for it with: baton wait-ready --address {facts.address}")
    return 0


def absolute(settings: ServeSettings) -> ServeSettings:
    """Make paths absolute, for a process with another working folder."""
    changes: dict[str, Any] = {}
    if settings.model:
        changes["model"] = model_path(settings)
    if settings.keys:
        changes["keys"] = key_folder(settings)
    for name in ("run_dir", "api_key_file", "ssl_certfile", "ssl_keyfile"):
        if getattr(settings, name):
            changes[name] = str(Path(getattr(settings, name)).absolute())
    return msgspec.structs.replace(settings, **changes)


def running_cluster(settings: ServeSettings) -> Overview | None:
    """Return the cluster at the address of these settings, or None. Raises ConnectionLost."""
    address = settings.admin or admin_address(settings.address)
    if not listens(address):
        return None
    patience = _PATIENCE_S if address.startswith("ipc://") else _TCP_PATIENCE_S
    with AdminClient(address, keys=settings.keys, timeout=patience) as client:
        try:
            return client.overview()
        except ConnectionLost:
            if address.startswith("ipc://"):  # a controller listens, but does not answer
                raise
            return None


def already(settings: ServeSettings, running: Overview) -> int:
    """Print that the cluster runs. Raises RequestFailed with the first setting that differs."""
    wanted = msgspec.to_builtins(with_task(settings))
    present, launched = running.settings, running.launched
    for name, value in wanted.items():
        known = (present.get(name), launched.get(name))
        if name not in ("address", "admin", "task") and value not in known:
            raise RequestFailed(
                f"a cluster runs at {running.address}, whose {name} is {known[0]!r}, not "
                f"{value!r}: change it with baton scale or rollout, or end it with baton down"
            )
    say(f"already running at {running.address} (pid {running.pid})")
    return 0


def log_beside(address: str) -> Path:
    """Return the log file's path: beside the first client socket, else in the private folder."""
    path = ipc_path(separated(address)[0])
    if path is None:
        admin = admin_address(address)
        claim_admin(admin)
        path = Path(admin.removeprefix("ipc://")).with_suffix("")
    return Path(f"{path}.log")
