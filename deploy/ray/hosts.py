"""The fixed hosts of a cluster: the hosts of each pool, and the hosts in use as nodes.

Pure except for :class:`HostBook`, the file with the nodes. Invariants: a host is in one pool and is
at most one node; a node's id is never reused, as Ray requires. So the id is the address with the
launch number: ``10.0.0.3@2``.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import ALLOWED_FILE, KEY_SUFFIX
from baton.runtime.keys.shares import check_share

from .certificates import check_certificates, holds_certificates
from .key_copies import HEAD_ROLES

Pools = Mapping[str, tuple[str, ...]]


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``provider`` of a cluster file.

    ``pools``: addresses of the hosts of each node type; the head's type has one host. ``python``:
    command on each host that creates its virtual environment ``venv``. ``grace``: seconds between
    SIGTERM and SIGKILL for a host's processes. ``ssh_user`` and ``ssh_private_key`` are copied from
    ``auth``.
    """

    type: str
    module: str
    pools: dict[str, tuple[str, ...]]
    use_internal_ips: bool = True
    python: str = "python3.11"
    venv: str = "~/.baton/venv"
    state: str = "~/.baton/nodes"
    grace: int = 10
    ssh_user: str = ""
    ssh_private_key: str = ""


def provider_settings(section: Mapping[str, Any]) -> ProviderSettings:
    """Return the validated section. Raises ConfigError for an unknown key, wrong type or host."""
    # Ray adds keys that begin with an underscore.
    told = {key: value for key, value in section.items() if not key.startswith("_")}
    try:
        settings = msgspec.convert(told, ProviderSettings)
    except msgspec.ValidationError as problem:
        raise ConfigError(f"provider: {problem}") from None
    if settings.grace < 0:
        raise ConfigError("provider.grace must not be negative")
    check_pools(settings.pools)
    return settings


def check_pools(pools: Pools) -> None:
    """Raise ConfigError unless every host is an IP address in only one pool."""
    seen: dict[str, str] = {}
    for pool, hosts in pools.items():
        for host in hosts:
            try:
                ipaddress.ip_address(host)
            except ValueError:
                raise ConfigError(
                    f"provider.pools.{pool}: '{host}' is not an IP address; Ray identifies nodes "
                    "by address, so give the address instead of a name"
                ) from None
            if host in seen:
                raise ConfigError(
                    f"provider.pools: {host} is in {seen[host]} and {pool}; a host can be only one "
                    "node"
                )
            seen[host] = pool


def check_node_types(pools: Pools, node_types: Mapping[str, Any], head_type: str) -> None:
    """Raise ConfigError if node types and pools differ, or need more workers than hosts."""
    for name in [*node_types, *pools]:
        if name not in pools or name not in node_types:
            where = "provider.pools" if name not in pools else "available_node_types"
            raise ConfigError(f"node type '{name}' is missing from {where}")
    if len(pools[head_type]) != 1:
        raise ConfigError(f"provider.pools.{head_type} needs exactly one host")
    for name, node_type in node_types.items():
        if name != head_type:
            _check_bounds(name, node_type, len(pools[name]))


def _check_bounds(name: str, node_type: Mapping[str, Any], hosts: int) -> None:
    least, most = node_type.get("min_workers", 0), node_type.get("max_workers", hosts)
    if node_type.get("node_config"):
        raise ConfigError(f"{name}: node_config must be {{}}, since fixed hosts have no options")
    if not 0 <= least <= most:
        raise ConfigError(
            f"{name}: min_workers {least} and max_workers {most}; needs 0 <= min <= max"
        )
    if most > hosts:
        raise ConfigError(
            f"{name}: max_workers {most}, but provider.pools.{name} has {hosts} "
            f"host{'s' * (hosts != 1)}; add hosts or lower it"
        )


def check_mounts(paths: Iterable[str]) -> None:
    """Raise ConfigError if a file for the hosts is missing, or other users can read a secret.

    Secrets are Ray's token, the files of a key folder, and the key in a folder of certificates. A
    key folder must have keys of all roles of a cluster.
    """
    for text in paths:
        path = Path(text).expanduser()
        if not path.exists():
            raise ConfigError(
                f"file_mounts: {text} does not exist; create keys with `baton keygen`, Ray's token "
                "with `ray get-auth-token --generate`"
            )
        if path.is_dir():
            if holds_certificates(path):
                check_certificates(path)
            elif (path / ALLOWED_FILE).exists() or any(path.glob(f"*{KEY_SUFFIX}")):
                check_share(path, HEAD_ROLES, None)
        elif path.suffix != ".whl" and path.stat().st_mode & 0o077:
            raise ConfigError(f"others can read {path}; chmod 600 {path}")


def node_id(host: str, launch: int) -> str:
    """Return the id of the node on ``host`` with this launch number."""
    return f"{host}@{launch}"


def host_of(node: str) -> str:
    """Return the host of a node id."""
    return node.rpartition("@")[0]


class Nodes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of the file: the number of launches, and the tags of the existing nodes.

    ``session``: the `ray start` of the head that the workers belong to.
    """

    launches: int = 0
    session: str = ""
    nodes: dict[str, dict[str, str]] = {}

    def used_hosts(self) -> set[str]:
        """Return the hosts in use as nodes."""
        return {host_of(node) for node in self.nodes}

    def launch(self, host: str, tags: Mapping[str, str]) -> str:
        """Add a node on a free host; return its id."""
        self.launches += 1
        node = node_id(host, self.launches)
        self.nodes[node] = dict(tags)
        return node

    def matching(self, filters: Mapping[str, str]) -> list[str]:
        """Return the ids of the nodes with all of these tags."""
        wanted = filters.items()
        return [node for node, tags in self.nodes.items() if wanted <= tags.items()]


class HostBook:
    """The file of :class:`Nodes`, for any number of threads and processes.

    A lock file serialises access. The file is replaced atomically, so a reader never sees a partial
    file, even after a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def open(self) -> Iterator[Nodes]:
        """Yield the nodes; changes are saved unless the block raises."""
        lock = os.open(self.path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._read()
            nodes = _decode(before, self.path)
            yield nodes
            after = msgspec.json.format(msgspec.json.encode(nodes), indent=2)
            if after != before:
                self._write(after)
        finally:
            os.close(lock)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def _write(self, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).rename(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _decode(content: bytes, path: Path) -> Nodes:
    if not content:
        return Nodes()
    try:
        return msgspec.json.decode(content, type=Nodes)
    except msgspec.DecodeError as problem:
        raise ConfigError(f"{path} is damaged ({problem}); remove it") from None
