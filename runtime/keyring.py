"""A process's own CURVE pair and the list of keys it deals with, from a key folder.

A folder holds ``allowed.toml`` (:mod:`.allowed_keys`) and secret files, of which a process takes
the first it finds: ``NAME.key`` (of this worker or router alone), ``ROLE@HOST.key`` (of this
machine), ``ROLE.key``. A host needs no other secret than its own.

Invariant: a secret that others may read, or a list that others may write, is not used.
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

from ..proto.errors import BatonError, ConfigError
from .allowed_keys import (
    CLIENT,
    MAX_LIST_BYTES,
    OPERATOR,
    AllowedKeys,
    KeyEntry,
    is_z85,
    parse_allowed,
)
from .log import get_logger
from .security import CurveKeys

ALLOWED_FILE = "allowed.toml"
KEY_SUFFIX = ".key"
MAX_KEY_BYTES = 4096
REREAD_S = 1.0
"""How often the list's file is looked at, at most."""

_log = get_logger()


class KeyPair:
    """The content of a secret file, both in z85."""

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
    """What one process knows. Raises ConfigError where the folder cannot be used.

    ``name``: the worker's or router's; empty for clients.
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
        """Find ourselves: what others would refuse is better said here, at once."""
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
                f"the key of {self.file} may not be used by {name!r}: {self._list} lets it be "
                f"{patterns}, or gives that name to another key"
            )
        return entry

    @property
    def pair(self) -> CurveKeys:
        """The pair, to listen with."""
        return CurveKeys(public=self.public, secret=self._secret)

    def connecting(self, role: str, name: str = "") -> CurveKeys:
        """The pair and whom to expect, to connect to a ``role`` (called ``name``) with.

        Raises ConfigError when the list has no such key.
        """
        self.refresh()
        servers = self.allowed.servers(role, name)
        if not servers:
            who = f"{role} {name!r}" if name else role
            raise ConfigError(f"{self._list} has no key of a {who}; see baton keygen")
        return CurveKeys(public=self.public, secret=self._secret, server=servers)

    def refresh(self) -> bool:
        """Read the list again if its file changed; whether it did.

        A list that cannot be read changes nothing and is reported once.
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
    """The keys of a process with this setting; None for the empty text. Raises ConfigError."""
    return KeyRing(folder, role, name) if folder else None


Keys = CurveKeys | KeyRing
"""What a connection is made with: a pair given by hand, or a folder that was read."""


GivenKeys = Keys | str | Path | None
"""What users give: those, or the folder, or nothing (the empty text as well)."""
CONTROLLER = "controller"
"""The name under which a cluster's controller uses the key of an operator."""


def client_keys(keys: GivenKeys) -> Keys | None:
    """What a client was given; of a folder the operator's key if it is there, else the client's.

    Raises ConfigError where the folder cannot be used, TypeError for another type.
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
    """What to connect to ``endpoint`` with; None where no keys are used: not tcp, or none given.

    Raises ConfigError when the list has no key of such a peer.
    """
    if keys is None or not endpoint.startswith("tcp://"):
        return None
    return keys.connecting(role, name) if isinstance(keys, KeyRing) else keys


def keys_for(
    keys: Keys | None, endpoint: str, role: str, name: str = ""
) -> Callable[[], CurveKeys | None]:
    """:func:`keys_to` as it is whenever it is asked; for connections that outlive a rotation."""
    return lambda: keys_to(keys, endpoint, role, name)


# ---------------------------------------------------------------------------------- files


def read_pair(path: Path) -> KeyPair:
    """Read a secret file. Raises ConfigError: permissions, owner, content, pair that is none."""
    text = _read(path, MAX_KEY_BYTES, secret=True)
    try:
        file = msgspec.convert(tomllib.loads(text), _PairFile)
        pair = KeyPair(file.public, file.secret)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError):
        pair = KeyPair("", "")  # the parser's message could quote the secret
    if not (is_z85(pair.public) and is_z85(pair.secret)):
        raise ConfigError(f"{path} is damaged: it must hold public and secret, 40 characters each")
    try:
        matching = zmq.curve_public(pair.secret.encode())
    except (zmq.ZMQError, ValueError):
        matching = b""
    if matching != pair.public.encode():
        raise ConfigError(f"{path} is damaged: its public and secret keys are no pair")
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
    raise ConfigError(f"no {names} in {folder}: make them with baton keygen, or copy them here")


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless it is a folder of ours that others cannot write to."""
    try:
        status = folder.stat()
    except OSError as problem:
        raise ConfigError(
            f"key folder {folder}: {problem.strerror}; make one with baton keygen {folder}"
        ) from problem
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"key folder {folder} is no folder")
    _check_status(folder, status, 0o022, "others may write to it", "chmod 700")


def _read(path: Path, limit: int, *, secret: bool) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is no regular file")
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
        raise ConfigError(f"{path} is no text") from problem


def _check_status(path: Path, status: os.stat_result, bad: int, why: str, repair: str) -> None:
    """Ours or root's, and nothing of ``bad`` in its mode."""
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
