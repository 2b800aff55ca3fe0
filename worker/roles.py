"""A worker process that can change its role: incarnations of both roles on one loaded model.

The supervisor writes the settings of the other role, then sends
:data:`~baton.runtime.process.supervision.TURN_SIGNAL`. The present incarnation drains, and the next
one has the other role, with an empty cache. The packages of the two roles never import each other,
so the other one is found by its name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from baton.engine.loading.runner_config import with_folder
from baton.engine.pipeline.runner import StepRunner
from baton.proto.errors import ConfigError
from baton.proto.wire.messages import PoolTicket
from baton.runtime.keys.keyring import KeyRing, load_keys
from baton.runtime.process.log import get_logger
from baton.runtime.process.main import (
    EXIT_TURN,
    MakeShell,
    load_settings,
    run_incarnations,
    settings_path,
)

ROLES = ("prefill", "decode")
_log = get_logger()


@dataclass(slots=True, frozen=True)
class Loaded:
    """A loaded text model. ``ticket``: of its pool of KV blocks in shared memory, if it is there.

    A worker that began as a decode worker has a private pool; as a prefill worker it sends its
    KV blocks over sockets.
    """

    runner: StepRunner
    ticket: PoolTicket | None = None


class RoleModule(Protocol):
    """The main module of a role."""

    CONFIG: type[msgspec.Struct]

    @staticmethod
    def shells(config: Any, loaded: Loaded) -> MakeShell:
        """Return what makes incarnations of this role on a loaded model."""
        ...


def serve_roles(config: Any, loaded: Loaded, keys: KeyRing | None) -> int:
    """Run incarnations of the role of ``config``, then of the roles that follow it.

    ``keys``: of the first role. Raises ConfigError if this host has no key of a later one.
    """
    while True:
        code = run_incarnations(keys, _module(config.role).shells(config, loaded))
        if code != EXIT_TURN:
            return code
        config = _next_settings()
        keys = load_keys(config.keys, config.role, config.worker_id)
        _log.info("worker.turns", to=config.role)


class _Named(msgspec.Struct, frozen=True):
    role: str


def _next_settings() -> Any:
    """Read the settings that the supervisor wrote for the next role. Raises ConfigError."""
    path = settings_path()
    try:
        role = msgspec.json.decode(Path(path).read_bytes(), type=_Named).role
    except OSError as problem:
        raise ConfigError(f"cannot read settings {path}: {problem.strerror}") from None
    except msgspec.DecodeError as problem:
        raise ConfigError(f"cannot read settings {path}: {problem}") from None
    config: Any = load_settings(path, _module(role).CONFIG)
    return msgspec.structs.replace(config, runner=with_folder(config.runner))


def _module(role: str) -> RoleModule:
    if role not in ROLES:
        raise ConfigError(f"no role {role[:40]!r}; roles: {', '.join(ROLES)}")
    return cast(RoleModule, importlib.import_module(f"baton.{role}_worker.__main__"))
