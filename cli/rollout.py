"""``baton rollout``: replace every process, one by one, while the cluster serves."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..deploy.admin import RollOut
from ..deploy.admin_client import AdminClient
from ..deploy.config import ServeSettings
from ..deploy.core import Phase
from ..proto.errors import ConfigError
from .operator import add_operator, assignments, carry_out, operator
from .settings import read_file

EPILOG = """\
Workers are replaced with one more on top, then the routers at their addresses. It stops when a
new one does not become ready; the others go on with the settings they have. A cluster that still
starts is waited for, as long as --timeout says.
"""
_PAUSE = 0.1


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("rollout", help="replace every process, one by one", epilog=EPILOG)
    parser.add_argument(
        "changes", metavar="SETTING=VALUE", nargs="*", help="a setting that becomes another"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings that change")
    add_operator(parser)
    parser.add_argument("--wait", action="store_true", help="return when it is over")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Give the order; settings are checked before anything is touched."""
    changes: dict[str, Any] = read_file(arguments.config) if arguments.config else {}
    changes |= assignments(arguments.changes)
    unknown = sorted(set(changes) - set(ServeSettings.__struct_fields__))
    if unknown:
        where = f" (file {arguments.config})" if arguments.config else ""
        raise ConfigError(f"no setting {unknown[0]!r}{where}; see baton serve --help")
    for name, value in changes.items():
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"{name} must be a text or a number")
    with operator(arguments) as client:
        wait_started(client, arguments.timeout)
        text = carry_out(client, RollOut(changes=changes), wait=arguments.wait)
    print(f"rollout {'finished' if arguments.wait else 'begun'}: {text}")
    return 0


def wait_started(client: AdminClient, timeout: float) -> None:
    """Wait until the cluster has served, or the time is over: then the controller says why not.

    Its routers may know every worker a moment before it does, so ``baton wait-ready`` can be over
    while it still starts.
    """
    until = time.monotonic() + timeout
    while client.overview().phase == Phase.STARTING.value and time.monotonic() < until:
        time.sleep(_PAUSE)
