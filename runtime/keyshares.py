"""A host's share of a key folder: the list, and the secrets of what runs there.

Invariant: a share has no secret of another role, none that was made for another host, and none
that the list does not know.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from ..proto.errors import ConfigError
from .allowed_keys import ROLES
from .keyring import ALLOWED_FILE, KEY_SUFFIX, check_folder, read_allowed, read_pair


def secrets_for(folder: Path, roles: Collection[str], host: str | None = "") -> list[Path]:
    """Secret files of ``folder`` that a host needs whose processes have these roles.

    ``host``: its name, by which keys of one host are known (``decode@gpu7.key``); None: of any
    host, for one that hands them on. What a file is for says the list, not the file's name.
    Raises ConfigError where the folder or a file of it cannot be used.
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
    """:func:`secrets_for`, of every role at least one; ConfigError names the role that has none."""
    secrets = secrets_for(folder, roles, host)
    allowed = read_allowed(folder / ALLOWED_FILE)
    entries = (allowed.get(read_pair(path).public.encode()) for path in secrets)
    missing = set(roles) - {entry.role for entry in entries if entry is not None}
    if missing:
        raise ConfigError(f"{folder} has no {min(missing)} key for this host")
    return secrets


def write_share(folder: Path, target: Path, roles: Collection[str], host: str | None = "") -> None:
    """Make ``target`` (mode 0700) a key folder of :func:`secrets_for` and the list.

    It appears whole or not at all. Raises ConfigError also when ``target`` is there and not
    empty, or when there is nothing to give.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no role; there are {', '.join(ROLES)}")
    secrets = check_share(folder, roles, host)
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty; what is there is kept as it is")
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
