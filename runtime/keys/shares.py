"""A host's share of a key folder: the list, and the secrets of the host's processes.

Invariant: a share contains only listed secrets of the given roles, and none of another host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from baton.proto.errors import ConfigError

from .allowed import ROLES
from .keyring import ALLOWED_FILE, KEY_SUFFIX, check_folder, read_allowed, read_pair


def secrets_for(folder: Path, roles: Collection[str], host: str | None = "") -> list[Path]:
    """Return the secret files that a host needs for processes with these roles.

    ``host``: the host's name, as in ``decode@gpu7.key``; None: keys of all hosts, for a host that
    distributes them. The list determines a file's role, not the file's name. Raises ConfigError if
    the folder or one of its files is unusable.
    """
    check_folder(folder)
    allowed = read_allowed(folder / ALLOWED_FILE)
    found = []
    for path in sorted(folder.glob(f"*{KEY_SUFFIX}")):
        entry = allowed.get(read_pair(path).public.encode())
        _, at, owner = path.stem.partition("@")
        if entry is not None and entry.role in roles and (not at or host in (None, owner)):
            found.append(path)
    return found


def check_share(folder: Path, roles: Collection[str], host: str | None = "") -> list[Path]:
    """Return :func:`secrets_for`. Raises ConfigError for a role without a secret."""
    secrets = secrets_for(folder, roles, host)
    allowed = read_allowed(folder / ALLOWED_FILE)
    entries = (allowed.get(read_pair(path).public.encode()) for path in secrets)
    missing = set(roles) - {entry.role for entry in entries if entry is not None}
    if missing:
        raise ConfigError(f"{folder} has no {min(missing)} key for this host")
    return secrets


def write_share(folder: Path, target: Path, roles: Collection[str], host: str | None = "") -> None:
    """Create key folder ``target`` (mode 0700) with the list and :func:`secrets_for`.

    The folder appears complete or not at all. Raises ConfigError if ``target`` exists and is not
    empty, for an unknown role, and for a role without a secret.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ConfigError(f"unknown role {unknown[0]!r}; roles: {', '.join(ROLES)}")
    secrets = check_share(folder, roles, host)
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty; its content is kept unchanged")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))  # mode 0700
    except OSError as problem:
        raise ConfigError(f"cannot make {target}: {problem.strerror}") from problem
    try:
        for path in [folder / ALLOWED_FILE, *secrets]:
            shutil.copy2(path, draft / path.name)  # with its mode
        draft.rename(target)
    except OSError as problem:
        raise ConfigError(f"cannot make {target}: {problem.strerror}") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)
