"""``baton ray-certs FOLDER HOSTS``: make the certificates of Ray's TLS for a cluster's hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..deploy.ray.certificates import DAYS, SHARE, make_certificates

_EPILOG = f"""\
FOLDER gets an authority, whose key stays there, and FOLDER/{SHARE} with one certificate for all
hosts. Give `baton ray-config --tls FOLDER/{SHARE}`. For more hosts give all of them again: the same
authority signs a new certificate. It is valid for {DAYS} days. Needs openssl.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "ray-certs", help="make certificates that encrypt Ray's own connections", epilog=_EPILOG
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("hosts", metavar="IP", nargs="+", help="address of a host of the cluster")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make them, and print what to do next."""
    folder: Path = arguments.folder
    make_certificates(folder, arguments.hosts)
    print(f"{folder / SHARE}: for {', '.join(arguments.hosts)}")
    print(f"next: baton ray-config --tls {folder / SHARE} ...")
    return 0
