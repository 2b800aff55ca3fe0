"""Creation and changes of a key folder; :mod:`.keyring` reads it.

Invariant: a secret file is replaced atomically, only by a complete new pair, and only this user can
ever read it. A key is listed before its secret file exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zmq

from ...proto.errors import ConfigError
from .allowed import ROLES, KeyEntry, write_allowed
from .keyring import ALLOWED_FILE, KEY_SUFFIX, read_allowed

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
