"""``baton serve``: a cluster on this machine until it is interrupted."""

from __future__ import annotations

import argparse
import os
import typing
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from ..deploy.config import ServeSettings
from ..deploy.local import LocalCluster, check_model, make_plan
from ..deploy.plan import describe_plan
from ..deploy.terminal import terminal
from ..proto.errors import RequestFailed
from .settings import ENV_PREFIX, HELP, resolve

EPILOG = (
    "Precedence of settings: flag, then environment variable "
    f"({ENV_PREFIX} and the setting's name in capitals), then --config FILE (TOML, the same "
    "names), then default."
)


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("serve", help="serve a model until interrupted", epilog=EPILOG)
    add_settings(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and end")
    parser.set_defaults(run=run)


def add_settings(
    parser: argparse.ArgumentParser, renamed: Mapping[str, str] = MappingProxyType({})
) -> None:
    """One flag per setting, of its name or another, and the positional MODEL."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=HELP["model"])
    types = typing.get_type_hints(ServeSettings)
    defaults = ServeSettings()
    for field in ServeSettings.__struct_fields__:
        if field == "model":
            continue
        default = getattr(defaults, field)
        shown = f"{HELP[field]} [{default}]" if default != "" else HELP[field]
        parser.add_argument(
            f"--{renamed.get(field, field).replace('_', '-')}",
            dest=field,
            type=types[field],
            metavar={int: "N", float: "SECONDS"}.get(types[field], "TEXT"),
            help=shown.replace("%", "%%"),
        )


def settings_of(arguments: argparse.Namespace) -> ServeSettings:
    """The checked settings of all layers."""
    flags = {field: getattr(arguments, field) for field in ServeSettings.__struct_fields__}
    return resolve(flags, os.environ, arguments.config)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or print the plan."""
    settings = settings_of(arguments)
    if arguments.dry_run:
        plan = make_plan(settings, folder=None)
        print(msgspec.json.format(msgspec.json.encode(describe_plan(plan)), indent=2).decode())
        return 0
    check_model(settings)
    return run_cluster(LocalCluster(settings, terminal))


def run_cluster(cluster: LocalCluster) -> int:
    """Run it to its end; a failure becomes the error the command ends with."""
    try:
        code = cluster.run()
    finally:
        terminal.flush()
    if cluster.failure:
        raise RequestFailed(cluster.failure)
    return code
