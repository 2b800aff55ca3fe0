"""A process's CURVE key pair and the list of allowed keys, read from a key folder.

A folder holds ``allowed.toml`` (:mod:`.allowed`) and secret files. A process uses the first
secret file that exists of ``NAME.key`` (one worker or router), ``ROLE@HOST.key`` (one host) and
``ROLE.key``. A host needs only the secrets of its own processes.

Invariant: a secret file that other users can read, or a list that they can write, is rejected.
"""

from __future__ import annotations

import os
import socket
import stat
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ...proto.errors import BatonError, ConfigError
from ..process.log import get_logger
from .allowed import (
    CLIENT,
    MAX_LIST_BYTES,
    OPERATOR,
    AllowedKeys,
    KeyEntry,
    is_z85,
    parse_allowed,
)
from .curve import CurveKeys

ALLOWED_FILE = "allowed.toml"
KEY_SUFFIX = ".key"
MAX_KEY_BYTES = 4096
REREAD_S = 1.0
"""Minimum seconds between two checks of the list's file for changes."""

_log = get_logger()


class KeyPair:
    """The content of a secret file: public and secret key, in z85."""

    __slots__ = ("public", "secret")

    def __init__(self, public: str, secret: str) -> None:
        self.public = public
        self.secret = secret

    def __repr__(self) -> str:
        """Without the secret, which must not reach a log."""
        return f"KeyPair(public={self.public!r})"


class _PairFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: str
    secret: str


class KeyRing:
    """The keys of one process. Raises ConfigError if the folder is unusable.

    ``name``: name of the worker or router; empty for clients.
    """

    def __init__(self, folder: str | Path, role: str, name: str = "") -> None:
        self.folder = Path(folder)
        self.role = role
        check_folder(self.folder)
        self.file = _choose(self.folder, role, name)
        pair = read_pair(self.file)
        self.public, self._secret = pair.public.encode(), pair.secret.encode()
        self._list = self.folder / ALLOWED_FILE
        self._stamp = _stamp(self._list)
        self.allowed = read_allowed(self._list)
        self.entry = self._own_entry(name)
        self._looked = time.monotonic()

    def __repr__(self) -> str:
        """Without the secret, which must not reach a log."""
        return f"KeyRing({str(self.file)!r}, role={self.role!r})"

    def _own_entry(self, name: str) -> KeyEntry:
        """Check our own entry now, since peers would refuse a wrong key only later."""
        entry = self.allowed.get(self.public)
        if entry is None:
            raise ConfigError(
                f"the key of {self.file} is not in {self._list}: copy the newest list here, "
                "or make a key with baton keygen"
            )
        if entry.role != self.role:
            raise ConfigError(
                f"the key of {self.file} is for role {entry.role} in {self._list}, not {self.role}"
            )
        if name and not self.allowed.may_be(entry, self.role, name):
            patterns = ", ".join(entry.names)
            raise ConfigError(
                f"the key of {self.file} may not be used by {name!r}: {self._list} allows it for "
                f"{patterns}, or reserves that name for another key"
            )
        return entry

    @property
    def pair(self) -> CurveKeys:
        """The key pair, for listening sockets."""
        return CurveKeys(public=self.public, secret=self._secret)

    def connecting(self, role: str, name: str = "") -> CurveKeys:
        """Return the pair and the server keys for a connection to a ``role`` (named ``name``).

        Raises ConfigError if the list has no key of such a process.
        """
        self.refresh()
        servers = self.allowed.servers(role, name)
        if not servers:
            who = f"{role} {name!r}" if name else role
            raise ConfigError(f"{self._list} has no key for {who}; see baton keygen")
        return CurveKeys(public=self.public, secret=self._secret, server=servers)

    def refresh(self) -> bool:
        """Reload the list if its file changed; return whether it was reloaded.

        An unreadable list is logged once, and the old list stays in effect.
        """
        now = time.monotonic()
        if now - self._looked < REREAD_S:
            return False
        self._looked = now
        stamp = _stamp(self._list)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.allowed = read_allowed(self._list)
        except BatonError as problem:
            _log.error("keys.list_not_read", error=str(problem), kept=len(self.allowed.entries))
            return False
        _log.info("keys.list_read", file=str(self._list), keys=len(self.allowed.entries))
        return True


def load_keys(folder: str, role: str, name: str = "") -> KeyRing | None:
    """Read the key folder of a process; None for an empty setting. Raises ConfigError."""
    return KeyRing(folder, role, name) if folder else None


Keys = CurveKeys | KeyRing
"""Keys for connections: an explicit pair, or a key folder that was read."""


GivenKeys = Keys | str | Path | None
"""The ``keys`` argument of a client: keys, a key folder, or none (None or ``""``)."""
CONTROLLER = "controller"
"""The name that a cluster's controller uses with an operator's key."""


def client_keys(keys: GivenKeys) -> Keys | None:
    """Return a client's keys; a folder with ``operator.key`` gives operator keys, else client keys.

    Raises ConfigError if the folder is unusable, TypeError for another type.
    """
    if keys is None or isinstance(keys, (CurveKeys, KeyRing)):
        return keys
    if not isinstance(keys, (str, Path)):
        raise TypeError(f"keys must be a folder or CurveKeys, not {type(keys).__name__}")
    if not str(keys):
        return None
    folder = Path(keys)
    is_operator = os.path.lexists(folder / f"{OPERATOR}{KEY_SUFFIX}")
    return KeyRing(folder, OPERATOR if is_operator else CLIENT)


def keys_to(keys: Keys | None, endpoint: str, role: str, name: str = "") -> CurveKeys | None:
    """Return the keys for a connection to ``endpoint``; None without keys or without tcp.

    Raises ConfigError if the list has no key of such a peer.
    """
    if keys is None or not endpoint.startswith("tcp://"):
        return None
    return keys.connecting(role, name) if isinstance(keys, KeyRing) else keys


def keys_for(
    keys: Keys | None, endpoint: str, role: str, name: str = ""
) -> Callable[[], CurveKeys | None]:
    """Return a function that evaluates :func:`keys_to`, for connections that outlive a rotation."""
    return lambda: keys_to(keys, endpoint, role, name)


# ---------------------------------------------------------------------------------- files


def read_pair(path: Path) -> KeyPair:
    """Read a secret file. Raises ConfigError for wrong permissions, owner, content or pair."""
    text = _read(path, MAX_KEY_BYTES, secret=True)
    try:
        file = msgspec.convert(tomllib.loads(text), _PairFile)
        pair = KeyPair(file.public, file.secret)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError):
        pair = KeyPair("", "")  # do not chain the parser's error: it may quote the secret
    if not (is_z85(pair.public) and is_z85(pair.secret)):
        raise ConfigError(f"{path} is damaged: it must hold public and secret, 40 characters each")
    try:
        matching = zmq.curve_public(pair.secret.encode())
    except (zmq.ZMQError, ValueError):
        matching = b""
    if matching != pair.public.encode():
        raise ConfigError(f"{path} is damaged: its public and secret keys do not match")
    return pair


def read_allowed(path: Path) -> AllowedKeys:
    """Read the list of a folder. Raises ConfigError."""
    return parse_allowed(_read(path, MAX_LIST_BYTES, secret=False), str(path))


def _choose(folder: Path, role: str, name: str) -> Path:
    stems = [*([name] if name and "/" not in name else []), f"{role}@{socket.gethostname()}", role]
    paths = [folder / f"{stem}{KEY_SUFFIX}" for stem in stems]
    for path in paths:
        if os.path.lexists(path):
            return path
    names = " or ".join(path.name for path in paths)
    raise ConfigError(f"no {names} in {folder}: create it with baton keygen, or copy it here")


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless ``folder`` is a folder of this user that others cannot write to."""
    try:
        status = folder.stat()
    except OSError as problem:
        raise ConfigError(
            f"key folder {folder}: {problem.strerror}; create it with baton keygen {folder}"
        ) from problem
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"key folder {folder} is not a folder")
    _check_status(folder, status, 0o022, "others may write to it", "chmod 700")


def _read(path: Path, limit: int, *, secret: bool) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a regular file")
            if secret:
                _check_status(path, status, 0o077, "others may use it", "chmod 600")
            else:
                _check_status(path, status, 0o022, "others may write to it", "chmod 644")
            data = file.read(limit + 1)
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    if len(data) > limit:
        raise ConfigError(f"{path} has more than {limit} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not UTF-8 text") from problem


def _check_status(path: Path, status: os.stat_result, bad: int, why: str, repair: str) -> None:
    """Raise ConfigError unless this user or root owns it and its mode has no bit of ``bad``."""
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}): chown it"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & bad:
        raise ConfigError(f"{path} has mode {mode:04o}, {why}: {repair} {path}")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
