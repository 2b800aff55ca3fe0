"""``baton keygen FOLDER``: make the keys of a cluster, add one, replace one, withdraw one."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..proto.errors import ConfigError
from ..runtime import keyfiles
from ..runtime.allowed_keys import ROLES, KeyEntry
from ..runtime.keyring import KEY_SUFFIX
from ..runtime.keyshares import write_share
from .parser import one_of, shown

_EPILOG = """\
Without an option it makes FOLDER with a key for each role, and never touches one that is there.
A host needs allowed.toml and the .key files of what runs there, no others: --for ROLE,ROLE --to
NEW-FOLDER makes a folder of just these (with --host also the keys made for that host).
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "keygen", help="make the keys that let a cluster span hosts", epilog=_EPILOG
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--add", type=one_of(ROLES), metavar=shown(ROLES), help="make a further key of a role"
    )
    what.add_argument(
        "--rotate", metavar="KEY", help="replace a key; the old one is let in until --retire"
    )
    what.add_argument("--retire", metavar="KEY", help="let in only the newest of a replaced key")
    what.add_argument("--revoke", metavar="KEY", help="let a key in no more and remove its file")
    what.add_argument(
        "--for",
        dest="roles",
        metavar="ROLES",
        help=f"copy the list and the keys of these roles, with commas between: {', '.join(ROLES)}",
    )
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="with --for: where to")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="with --add: whom the key is for, as decode-1; then nobody else may use that name",
    )
    parser.add_argument(
        "--host", default="", metavar="HOST", help="with --add and --for: whose key it is"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make or change the folder, and say what is where."""
    folder: Path = arguments.folder
    if arguments.name and not arguments.add:
        raise ConfigError("--name goes with --add ROLE")
    if arguments.host and not (arguments.add or arguments.roles):
        raise ConfigError("--host goes with --add ROLE or --for ROLES")
    if (arguments.to is None) != (arguments.roles is None):
        raise ConfigError("--for ROLES and --to FOLDER go together")
    if arguments.roles is not None:
        write_share(folder, arguments.to, arguments.roles.split(","), arguments.host)
        print(f"made {arguments.to}: " + " ".join(sorted(p.name for p in arguments.to.iterdir())))
    elif arguments.add:
        entry = keyfiles.add_key(folder, arguments.add, arguments.name, arguments.host)
        print(f"made {_shown(folder, entry)}")
    elif arguments.rotate:
        entry = keyfiles.rotate(folder, arguments.rotate)
        print(f"made {_shown(folder, entry)}")
        print("copy allowed.toml to every host, then the key; restart who uses it; then --retire")
    elif arguments.retire:
        _struck(keyfiles.retire(folder, arguments.retire))
    elif arguments.revoke:
        _struck(keyfiles.revoke(folder, arguments.revoke))
    else:
        for entry in keyfiles.make_folder(folder):
            print(f"made {_shown(folder, entry)}")
    return 0


def _shown(folder: Path, entry: KeyEntry) -> str:
    path = folder / f"{entry.file}{KEY_SUFFIX}"
    return f"{path} ({entry.role}, names {' '.join(entry.names)})"


def _struck(entries: list[KeyEntry]) -> None:
    for entry in entries:
        print(f"struck {entry.public} ({entry.role}, names {' '.join(entry.names)})")
    print("copy allowed.toml to every host; processes read it again within a second or two")
