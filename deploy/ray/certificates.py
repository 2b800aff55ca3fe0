"""Certificates for Ray's TLS (``RAY_USE_TLS``): an authority, and one certificate for all hosts.

With TLS, Ray's processes close a connection without a certificate of this authority before they
read a message. One certificate for all hosts is enough: a host with the certificate also has Ray's
token, which is the same on all hosts and gives full access. The authority's key is never copied.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.proto.errors import ConfigError

AUTHORITY_KEY, AUTHORITY = "authority.key", "authority.crt"
SHARE = "nodes"
"""Sub-folder to copy to every host."""
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "node.crt", "node.key"
DAYS = 3650
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Make the certificate for hosts at these addresses in ``folder/nodes``, replacing files there.

    An existing authority in ``folder`` is used again, so that hosts with earlier certificates
    accept the new one. Raises ConfigError for an invalid address, a missing ``openssl``, or a
    folder with other files.
    """
    names = ["DNS:localhost", *(f"IP:{_address(host)}" for host in ["127.0.0.1", "::1", *hosts])]
    _prepare(folder)
    if not (folder / AUTHORITY_KEY).exists():
        _make_authority(folder)
    share = folder / SHARE
    share.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as draft:
        made = Path(draft)
        (made / "names").write_text(
            f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        _openssl(made, "req", "-new", *_KEY, "-subj", "/CN=Ray of Baton",
                 "-keyout", KEY_FILE, "-out", "request")  # fmt: skip
        _openssl(made, "x509", "-req", "-in", "request", "-days", str(DAYS), "-extfile", "names",
                 "-CA", "../authority.crt", "-CAkey", "../authority.key", "-CAserial", "serial",
                 "-CAcreateserial", "-out", CERTIFICATE_FILE)  # fmt: skip
        (made / CA_FILE).write_bytes((folder / AUTHORITY).read_bytes())
        for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
            (made / name).chmod(0o600)
            (made / name).rename(share / name)


def holds_certificates(folder: Path) -> bool:
    """Whether ``folder`` looks like ``folder/nodes`` of :func:`make_certificates`."""
    return any((folder / name).exists() for name in (CA_FILE, CERTIFICATE_FILE))


def check_certificates(folder: Path, hosts: Sequence[str] = ()) -> None:
    """Raise ConfigError unless ``folder`` is private to this user and valid for these hosts."""
    how = "make it with baton ray-certs"
    for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}; {how}")
    if (folder / AUTHORITY_KEY).exists():
        raise ConfigError(f"{folder} has the authority's key, which no host needs; give {SHARE}/")
    if (folder / KEY_FILE).stat().st_mode & 0o077:
        raise ConfigError(f"others can read {folder / KEY_FILE}; chmod 600 {folder / KEY_FILE}")
    expired = "will expire" in _openssl(
        folder, "x509", "-in", CERTIFICATE_FILE, "-noout", "-checkend", "0", may_fail=True
    )
    if expired:
        raise ConfigError(f"the certificate in {folder} has expired; {how} again")
    for host in hosts:
        output = _openssl(
            folder, "x509", "-in", CERTIFICATE_FILE, "-noout", "-checkip", host, may_fail=True
        )
        if "does match" not in output:
            raise ConfigError(f"the certificate in {folder} is not for {host}; {how} for all hosts")


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"{text!r} is not an IP address") from None


def _prepare(folder: Path) -> None:
    ours = {AUTHORITY_KEY, AUTHORITY, SHARE}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        strange = [path.name for path in folder.iterdir() if path.name not in ours]
    except OSError as problem:
        raise ConfigError(f"{folder}: {problem.strerror}") from None
    if strange:
        raise ConfigError(f"{folder} holds other files ({min(strange)}); use another folder")
    if folder.stat().st_mode & 0o077:
        raise ConfigError(f"others can read {folder}; chmod 700 {folder}")


def _make_authority(folder: Path) -> None:
    _openssl(folder, "req", "-x509", *_KEY, "-days", str(DAYS), "-subj", "/CN=Authority of Baton",
             "-addext", "basicConstraints=critical,CA:TRUE",
             "-addext", "keyUsage=critical,keyCertSign,cRLSign",
             "-keyout", AUTHORITY_KEY, "-out", AUTHORITY)  # fmt: skip
    (folder / AUTHORITY_KEY).chmod(0o600)


def _openssl(folder: Path, *words: str, may_fail: bool = False) -> str:
    """Run openssl in ``folder`` and return its output. Raises ConfigError."""
    try:
        done = subprocess.run(  # noqa: S603 -- arguments, no shell
            ["openssl", *words],  # noqa: S607 -- the user's own, as ssh is
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, umask=0o077, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError("openssl is not installed here; install it") from None
    if done.returncode and not may_fail:
        last = (done.stdout.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"openssl {words[0]} failed: {last}")
    return done.stdout
