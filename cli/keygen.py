"""``baton keygen FOLDER``: make the keys of a cluster; add, rotate or revoke a key."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.proto.errors import ConfigError
from baton.runtime.keys.allowed import ROLES, KeyEntry
from baton.runtime.keys.keyring import (
    KEY_SUFFIX,
    add_key,
    make_folder,
    retire,
    revoke,
    rotate,
)
from baton.runtime.keys.shares import write_share

from .parser import one_of, shown

_EPILOG = """\
Without an option, make FOLDER with one key for each role; existing keys are never changed.
A host needs only allowed.toml and the .key files of the roles that run there: --for ROLE,ROLE --to
NEW-FOLDER makes a folder with just these files (with --host, also the keys made for that host).
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "keygen", help="make the keys of a cluster of several hosts", epilog=_EPILOG
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the key folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--add", type=one_of(ROLES), metavar=shown(ROLES), help="make another key for a role"
    )
    what.add_argument(
        "--rotate", metavar="KEY", help="replace a key; the old key stays valid until --retire"
    )
    what.add_argument("--retire", metavar="KEY", help="revoke the old versions of a rotated key")
    what.add_argument("--revoke", metavar="KEY", help="revoke a key and remove its file")
    what.add_argument(
        "--for",
        dest="roles",
        metavar="ROLES",
        help="copy allowed.toml and the keys of these roles, separated by commas: "
        f"{', '.join(ROLES)}",
    )
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="with --for: the new folder")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="with --add: a process name, such as decode-1, reserved for this key; repeatable",
    )
    parser.add_argument(
        "--host", default="", metavar="HOST", help="with --add and --for: the host of the key"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make or change the key folder, and print the changed files."""
    folder: Path = arguments.folder
    if arguments.name and not arguments.add:
        raise ConfigError("--name needs --add ROLE")
    if arguments.host and not (arguments.add or arguments.roles):
        raise ConfigError("--host needs --add ROLE or --for ROLES")
    if (arguments.to is None) != (arguments.roles is None):
        raise ConfigError("--for ROLES and --to FOLDER need each other")
    if arguments.roles is not None:
        write_share(folder, arguments.to, arguments.roles.split(","), arguments.host)
        print(f"made {arguments.to}: " + " ".join(sorted(p.name for p in arguments.to.iterdir())))
    elif arguments.add:
        entry = add_key(folder, arguments.add, arguments.name, arguments.host)
        print(f"made {_shown(folder, entry)}")
    elif arguments.rotate:
        entry = rotate(folder, arguments.rotate)
        print(f"made {_shown(folder, entry)}")
        print(
            "next: copy allowed.toml to every host, then copy the key; restart its processes; "
            "then run --retire"
        )
    elif arguments.retire:
        _struck(retire(folder, arguments.retire))
    elif arguments.revoke:
        _struck(revoke(folder, arguments.revoke))
    else:
        for entry in make_folder(folder):
            print(f"made {_shown(folder, entry)}")
    return 0


def _shown(folder: Path, entry: KeyEntry) -> str:
    path = folder / f"{entry.file}{KEY_SUFFIX}"
    return f"{path} ({entry.role}, names {' '.join(entry.names)})"


def _struck(entries: list[KeyEntry]) -> None:
    for entry in entries:
        print(f"revoked {entry.public} ({entry.role}, names {' '.join(entry.names)})")
    print("next: copy allowed.toml to every host; processes reload it within about two seconds")
