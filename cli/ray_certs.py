"""``baton ray-certs FOLDER HOSTS``: make the TLS certificates of a Ray cluster's hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.deploy.ray.certificates import DAYS, SHARE, make_certificates

_EPILOG = f"""\
Writes a certificate authority to FOLDER, and one certificate for all hosts to FOLDER/{SHARE}. The
authority's key stays in FOLDER. Next: `baton ray-config --tls FOLDER/{SHARE}`. To add hosts, run
this again with all hosts: the same authority signs a new certificate. Certificates are valid for
{DAYS} days. Needs openssl.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "ray-certs", help="make certificates that encrypt Ray's own connections", epilog=_EPILOG
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder of the authority and the certificate"
    )
    parser.add_argument("hosts", metavar="IP", nargs="+", help="address of a host of the cluster")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the certificates, and print the next step."""
    folder: Path = arguments.folder
    make_certificates(folder, arguments.hosts)
    print(f"{folder / SHARE}: for {', '.join(arguments.hosts)}")
    print(f"next: baton ray-config --tls {folder / SHARE} ...")
    return 0
