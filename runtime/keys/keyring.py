"""A key folder: the CURVE key pairs of processes, and the list of allowed keys.

A folder holds ``allowed.toml`` (:mod:`.allowed`) and secret files. A process uses the first
secret file that exists of ``NAME.key`` (one worker or router), ``ROLE@HOST.key`` (one host) and
``ROLE.key``. A host needs only the secrets of the processes that run on it.

Invariants: a secret file that other users can read, or a list that they can write, is rejected. A
secret file is replaced atomically, only by a complete new pair, and only this user can ever read
it. A key is listed before its secret file exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import zmq

from baton.proto.errors import BatonError, ConfigError

from ..process.log import get_logger
from .allowed import (
    CLIENT,
    MAX_LIST_BYTES,
    OPERATOR,
    ROLES,
    AllowedKeys,
    KeyEntry,
    is_z85,
    parse_allowed,
    write_allowed,
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


def role_without_key(folder: str, roles: Iterable[str], name: str) -> str:
    """Return the first of the roles that a process could not have here for lack of a key, or ''."""
    for role in roles if folder else ():
        try:
            KeyRing(folder, role, name)
        except ConfigError:
            return role
    return ""


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
    paths = [folder / f"{stem}{KEY_SUFFIX}" for stem in dict.fromkeys(stems)]
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


# ---------------------------------------------------------------- changes of a key folder

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9._@:*?\[\]!-]{1,128}")


def make_folder(folder: Path) -> list[KeyEntry]:
    """Create ``folder`` (mode 0700) with one key pair per role and the list.

    The folder appears complete or not at all. Raises ConfigError if it exists and is not empty.
    """
    refusal = ConfigError(f"{folder} is not empty; existing keys are kept unchanged")
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise refusal
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as problem:
        raise ConfigError(f"cannot make {folder}: {problem.strerror}") from problem
    try:
        entries = [_make_pair(draft, role, ("*",), role) for role in ROLES]
        _write_list(draft, entries)
        draft.rename(folder)  # replaces an empty folder, fails for any other
    except OSError as problem:
        if folder.is_dir() and any(folder.iterdir()):
            raise refusal from problem
        raise ConfigError(f"cannot make {folder}: {problem.strerror}") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return entries


def add_key(folder: Path, role: str, names: list[str], host: str = "") -> KeyEntry:
    """Add a key pair for ``names``, or for ``host`` (without names: any name).

    The file is ``NAME.key`` or ``ROLE@HOST.key``. Raises ConfigError if it exists.
    """
    stem = f"{role}@{host}" if host else (names[0] if names else "")
    if not _STEM.fullmatch(stem) or role not in ROLES:
        raise ConfigError("an additional key needs a role and --host HOST or --name NAME, with"
                          " letters, digits, dots and dashes only")  # fmt: skip
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is not a valid name or pattern of a process")
    with _locked(folder) as entries:
        if stem in ROLES or (folder / f"{stem}{KEY_SUFFIX}").exists():
            raise ConfigError(f"{folder} already has a key {stem}; --rotate {stem} replaces it")
        return _make_pair(folder, role, tuple(names) or ("*",), stem, [*entries])


def rotate(folder: Path, stem: str) -> KeyEntry:
    """Replace a pair; the old public key stays in the list until :func:`retire`."""
    with _locked(folder) as entries:
        old = _of_stem(folder, entries, stem)[-1]
        return _make_pair(folder, old.role, old.names, stem, [*entries])


def retire(folder: Path, stem: str) -> list[KeyEntry]:
    """End a rotation: unlist and return all keys of ``stem`` but the newest."""
    with _locked(folder) as entries:
        struck = _of_stem(folder, entries, stem)[:-1]
        _write_list(folder, [entry for entry in entries if entry not in struck])
        return struck


def revoke(folder: Path, stem: str) -> list[KeyEntry]:
    """Unlist and return all keys of ``stem``, and delete its secret file."""
    with _locked(folder) as entries:
        struck = _of_stem(folder, entries, stem)
        _write_list(folder, [entry for entry in entries if entry not in struck])
        (folder / f"{stem}{KEY_SUFFIX}").unlink(missing_ok=True)
        return struck


def _of_stem(folder: Path, entries: tuple[KeyEntry, ...], stem: str) -> list[KeyEntry]:
    found = [entry for entry in entries if entry.file == stem]
    if not found:
        known = ", ".join(sorted({entry.file for entry in entries if entry.file}))
        raise ConfigError(f"{folder} has no key {stem!r}; it has {known or 'none'}")
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[tuple[KeyEntry, ...]]:
    """Lock the folder for one change of its list; yields the entries."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise ConfigError(f"key folder {folder}: {problem.strerror}") from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield read_allowed(folder / ALLOWED_FILE).entries
    except OSError as problem:
        raise ConfigError(f"cannot change {folder}: {problem.strerror}") from problem
    finally:
        os.close(descriptor)


def _make_pair(
    folder: Path,
    role: str,
    names: tuple[str, ...],
    stem: str,
    listed: list[KeyEntry] | None = None,
) -> KeyEntry:
    """Generate a pair, append it to the list ``listed`` (if given), then write its secret file."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    entry = KeyEntry(public=public, role=role, names=names, file=stem)
    if listed is not None:
        _write_list(folder, [*listed, entry])
    text = (
        "# A CURVE key pair of a Baton cluster, made by baton keygen. Keep it secret.\n"
        f'public = "{public}"\nsecret = "{secret}"\n'
    )
    _replace(folder / f"{stem}{KEY_SUFFIX}", text, 0o600)
    return entry


def _write_list(folder: Path, entries: list[KeyEntry]) -> None:
    _replace(folder / ALLOWED_FILE, write_allowed(entries), 0o644)


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace a file atomically; the new content is on disk before the rename."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
