"""``baton rollout``: replace every process, one at a time, while the cluster serves."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from baton.deploy.config import ServeSettings
from baton.deploy.controller.admin import RollOut
from baton.deploy.controller.admin_client import AdminClient
from baton.deploy.plan.plan import model_path
from baton.deploy.plan.prepare import check_tokenizer
from baton.deploy.supervise.core import Phase
from baton.proto.errors import ConfigError

from .operator import add_operator, assignments, carry_out, operator
from .output import say
from .parser import did_you_mean
from .settings import read_file

EPILOG = """\
Replaces the workers, then the routers at the same addresses, then the gateways at the same port.
Each worker's replacement starts before the old worker stops, so a pool needs room for one more
worker; --in-place stops the old worker first. If a replacement does not become ready, the rollout
stops and the remaining processes keep their settings. If the cluster is still starting, wait up to
--timeout.
"""
_PAUSE = 0.1


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("rollout", help="replace every process, one at a time", epilog=EPILOG)
    parser.add_argument("changes", metavar="SETTING=VALUE", nargs="*", help="a setting to change")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings to change")
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="stop each worker before its replacement starts: for pools without a spare host",
    )
    add_operator(parser)
    parser.add_argument("--wait", action="store_true", help="return after the rollout has ended")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Order the rollout. The changed settings are checked before any process is replaced."""
    changes: dict[str, Any] = {}
    if arguments.config:
        changes = read_file(arguments.config)
    changes |= assignments(arguments.changes)
    unknown = sorted(set(changes) - set(ServeSettings.__struct_fields__))
    if unknown:
        where = f" (file {arguments.config})" if arguments.config else ""
        near = did_you_mean(unknown[0], ServeSettings.__struct_fields__)
        raise ConfigError(f"no setting {unknown[0]!r}{where}{near or '; see baton serve --help'}")
    for name, value in changes.items():
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"{name} must be a string or a number")
    _check_tokenizer(changes)
    with operator(arguments) as client:
        wait_started(client, arguments.timeout)
        text = carry_out(
            client, RollOut(changes=changes, in_place=arguments.in_place), wait=arguments.wait
        )
    say(f"rollout {'finished' if arguments.wait else 'begun'}: {text}")
    return 0


def _check_tokenizer(changes: dict[str, Any]) -> None:
    """Load the tokenizer of a new model folder, as at a start; CheckpointError if that fails.

    Here and not in the controller, whose loop would stand still meanwhile. A folder that only the
    controller's host has is not checked.
    """
    settings = ServeSettings(model=str(changes.get("model", "")))
    if settings.model and Path(model_path(settings)).exists():
        check_tokenizer(settings)


def wait_started(client: AdminClient, timeout: float) -> None:
    """Wait until the cluster serves, for at most ``timeout`` seconds.

    After a timeout, the controller's answer to the order gives the reason. Routers may register
    the last worker shortly before the controller does. So the cluster can still be starting after
    ``baton wait-ready`` has returned.
    """
    until = time.monotonic() + timeout
    while client.overview().phase == Phase.STARTING.value and time.monotonic() < until:
        time.sleep(_PAUSE)
