"""``baton serve``: run a cluster on this machine until it is interrupted."""

from __future__ import annotations

import argparse
import os
import typing
from collections.abc import Callable, Container, Sequence
from functools import partial

import msgspec

from baton.deploy.config import CHOICES, OPEN_CHOICES, OWN, ServeSettings
from baton.deploy.local.cluster import LocalCluster
from baton.deploy.local.service import READY, STOPPING, notify
from baton.deploy.local.terminal import terminal
from baton.deploy.plan.hub import with_local_model
from baton.deploy.plan.plan import describe_plan
from baton.deploy.plan.prepare import check_start, make_plan, sizing_of, with_worker_per_gpu
from baton.extend import is_extension
from baton.proto.errors import RequestFailed

from .numbers import count, http_port, seconds
from .parser import one_of, shown, warn
from .settings import ENV_PREFIX, GROUPS, HELP, flag, resolve

EPILOG = (
    "Precedence of settings: flag, then environment variable "
    f"({ENV_PREFIX} and the setting's name in capitals), then --config FILE (TOML, the same "
    "names), then default."
)


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("serve", help="serve a model until interrupted", epilog=EPILOG)
    add_settings(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and exit")
    parser.set_defaults(run=run)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the positional MODEL, and one flag per setting in groups."""
    parser.usage = "%(prog)s [OPTIONS] [MODEL]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=HELP["model"])
    types = typing.get_type_hints(ServeSettings)
    defaults = ServeSettings()
    for title, fields in GROUPS.items():
        group = parser.add_argument_group(title)
        for field in fields:
            default = getattr(defaults, field)
            text = f"{HELP[field]} [{default}]" if default != "" else HELP[field]
            if field in ("strict_parameters", "enforce_disaggregation"):
                group.add_argument(flag(field), action="store_const", const="on", help=text)
                continue
            group.add_argument(
                flag(field),
                dest=field,
                type=_type(field, types[field]),
                metavar=_metavar(field, types[field]),
                help=text.replace("%", "%%"),
            )
        if "gateways" in fields:
            group.add_argument(
                "--no-http",
                dest="gateways",
                action="store_const",
                const=0,
                help="serve no HTTP, as --gateways 0",
            )


def _type(field: str, kind: type) -> Callable[[str], object]:
    """Return the function that converts a flag's text, and raises ArgumentTypeError."""
    if field in OPEN_CHOICES:
        return one_of_or_own(CHOICES[field])
    if field in CHOICES:
        return one_of(CHOICES[field])
    if field == "http_port":
        return http_port
    return {int: count, float: seconds}.get(kind, str)


def one_of_or_own(choices: Sequence[str]) -> Callable[[str], str]:
    """Return the type function of an option that takes one of ``choices``, or a user's class."""
    known = one_of((*choices, OWN))
    return lambda text: text if is_extension(text) else known(text)


def _metavar(field: str, kind: type) -> str:
    if field in CHOICES:
        return shown((*CHOICES[field], OWN) if field in OPEN_CHOICES else CHOICES[field])
    if field in ("decider", "metric", "kv_transport", "model_family"):
        return OWN
    if field == "kv_events_topic":
        return "TOPIC"
    if field == "labels":
        return "NAME=VALUE"
    if field.endswith("_memory"):
        return "SIZE"
    if field in ("run_dir", "keys", "extensions"):
        return "FOLDER"
    if field in ("api_key_file", "ssl_certfile", "ssl_keyfile"):
        return "FILE"
    if field == "served_model_name":
        return "NAME"
    if field == "device_ids":
        return "N,N"
    if field == "gpu_memory_utilization":
        return "X"
    return {int: "N", float: "SECONDS"}.get(kind, "ADDRESS")


Adapt = Callable[[ServeSettings, Container[str]], ServeSettings]
"""Changes merged settings; it also gets the names of the settings that the user has given."""


def settings_of(arguments: argparse.Namespace, adapt: Adapt = with_worker_per_gpu) -> ServeSettings:
    """Merge and check the settings of flags, environment and file. Raises ConfigError.

    ``adapt``: by default the GPUs of this machine decide how many workers there are.
    """
    flags = {name: getattr(arguments, name, None) for name in ServeSettings.__struct_fields__}

    def spell(field: str) -> str:
        return "MODEL" if field == "model" else flag(field)

    return resolve(flags, os.environ, arguments.config, spell, warn, adapt)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or print the plan for ``--dry-run``."""
    settings = with_local_model(settings_of(arguments), terminal, fetch=not arguments.dry_run)
    check_start(settings)
    if arguments.dry_run:
        plan = describe_plan(make_plan(settings, folder=None))
        plan["sizing"] = msgspec.to_builtins(sizing_of(settings))
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
        return 0
    cluster = LocalCluster(settings, terminal)
    cluster.on_ready(partial(notify, READY))
    cluster.on_stopping(partial(notify, STOPPING))
    return run_cluster(cluster)


def run_cluster(cluster: LocalCluster) -> int:
    """Run a cluster until it ends, and return its exit code. Raises RequestFailed if it failed."""
    try:
        code = cluster.run()
    finally:
        terminal.flush()
    if cluster.failure:
        raise RequestFailed(cluster.failure)
    return code
