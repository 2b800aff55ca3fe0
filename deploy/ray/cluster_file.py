"""Cluster files for `ray up`: writing a file for fixed hosts, and checking any file before use.

A file is made from ``on-premises.yaml`` beside this module: the example values are replaced, and
the comments stay. The check uses Ray's schema and preparation and adds Baton's rules. No host is
contacted.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.proto.errors import ConfigError
from baton.runtime.small_files import check_file

from ..roles import POOLS
from .certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from .hosts import check_node_types, check_pools, provider_settings
from .key_copies import TURN
from .plan import CLIENT_PORT

TEMPLATE = "on-premises.yaml"
PROVIDER = "baton.deploy.ray.provider.FixedHosts"
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable, read by all its processes: seconds to wait for a lost head."""
MAX_RECONNECT = 10**6  # seconds; Ray's timers are 32 bits of milliseconds
_EXAMPLE_WHEEL = "baton_serve-0.1.0-cp311-cp311-linux_x86_64.whl"


class FixedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a cluster file for fixed hosts.

    ``head``, ``prefill`` and ``decode``: IP addresses. The first ``..._min`` hosts of each pool are
    always in use; the others are added on demand. ``wheel``, ``keys`` and ``token``: files and a
    folder on the machine where `ray up` runs. ``idle_minutes``: minutes before an unused host is
    removed. ``reconnect``: seconds that the cluster keeps serving without Ray's head before it
    stops. ``tls``: folder of certificates (:mod:`.certificates`); empty: no TLS between Ray's
    processes. ``launch``: more arguments for `baton launch`. ``turn``: give the workers' hosts the
    keys of both pools, so that workers can change their role.
    """

    head: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    wheel: str
    name: str = "baton"
    prefill_min: int = 1
    decode_min: int = 1
    user: str = "baton"
    ssh_key: str = "~/.ssh/baton-cluster"
    token: str = "~/.ray/auth_token"  # noqa: S105 -- a path
    keys: str = "~/.baton/keys"
    python: str = "python3.11"
    idle_minutes: float = 1.0
    reconnect: int = 3600
    tls: str = ""
    launch: str = ""
    turn: bool = False


def write_cluster_file(cluster: FixedCluster) -> str:
    """Return the text of a cluster file. Raises ConfigError with the wrong host or bound."""
    pools = {"head": (cluster.head,), "prefill": cluster.prefill, "decode": cluster.decode}
    check_pools(pools)
    bounds = {
        "head": {},
        "prefill": {"min_workers": cluster.prefill_min},
        "decode": {"min_workers": cluster.decode_min},
    }
    check_node_types(pools, bounds, "head")
    if not 1 <= cluster.reconnect <= MAX_RECONNECT:
        raise ConfigError(f"reconnect is {cluster.reconnect}, not 1 to {MAX_RECONNECT} seconds")
    text = (Path(__file__).parent / TEMPLATE).read_text()
    for old, new in _replacements(cluster):
        if old not in text:
            raise ConfigError(f"{TEMPLATE} has no '{old}'; reinstall Baton")
        text = text.replace(old, new)
    return text


def _replacements(cluster: FixedCluster) -> list[tuple[str, str]]:
    workers = len(cluster.prefill) + len(cluster.decode)
    return [
        ("cluster_name: baton\n", f"cluster_name: {_text(cluster.name)}\n"),
        ("\nmax_workers: 2 ", f"\nmax_workers: {workers} "),
        ("idle_timeout_minutes: 1.0 ", f"idle_timeout_minutes: {cluster.idle_minutes:g} "),
        (f"{RECONNECT_VARIABLE}=3600 ", f"{RECONNECT_VARIABLE}={cluster.reconnect} "),
        ("head: [10.0.0.1]", f"head: {_list((cluster.head,))}"),
        ("tcp://10.0.0.1:7070", router_address(cluster.head)),
        ("--prefill 1 --decode 1 ", f"{_launch_words(cluster)} "),
        ("prefill: [10.0.0.2]", f"prefill: {_list(cluster.prefill)}"),
        ("decode: [10.0.0.3]", f"decode: {_list(cluster.decode)}"),
        *_pool_bounds("prefill", cluster.prefill_min, len(cluster.prefill)),
        *_pool_bounds("decode", cluster.decode_min, len(cluster.decode)),
        ("ssh_user: baton", f"ssh_user: {_text(cluster.user)}"),
        ("ssh_private_key: ~/.ssh/baton-cluster", f"ssh_private_key: {_text(cluster.ssh_key)}"),
        ("auth_token: ~/.ray/auth_token", f"auth_token: {_text(cluster.token)}"),
        ("keys: ~/.baton/keys", f"keys: {_text(cluster.keys)}"),
        (f": dist/{_EXAMPLE_WHEEL}", f": {_text(cluster.wheel)}"),
        (_EXAMPLE_WHEEL, Path(cluster.wheel).name),
        ("python: python3.11", f"python: {_text(cluster.python)}"),
        ("|| python3.11 -m", f"|| {cluster.python} -m"),
        *(_tls(cluster.tls) if cluster.tls else []),
        *((f'"{pool}": 1}}', f'"{pool}": 1, "{TURN}": 1}}') for pool in POOLS if cluster.turn),
    ]


def _tls(folder: str) -> list[tuple[str, str]]:
    """Return Ray's environment variables for TLS, with the paths of the certificate files."""
    place = "~/.baton/ray-tls"
    variables = (
        f"RAY_USE_TLS=1 RAY_TLS_CA_CERT={place}/{CA_FILE} "
        f"RAY_TLS_SERVER_CERT={place}/{CERTIFICATE_FILE} RAY_TLS_SERVER_KEY={place}/{KEY_FILE}"
    )
    return [
        ("\ninitialization_commands:", f"  {place}: {_text(folder)}\n\ninitialization_commands:"),
        (" RAY_AUTH_MODE=token ", f" RAY_AUTH_MODE=token {variables} "),
    ]


def router_address(head: str) -> str:
    """Return the client address of the router on this head."""
    return f"tcp://[{head}]:{CLIENT_PORT}" if ":" in head else f"tcp://{head}:{CLIENT_PORT}"


def _launch_words(cluster: FixedCluster) -> str:
    words = f"--prefill {max(cluster.prefill_min, 1)} --decode {max(cluster.decode_min, 1)}"
    if "\n" in cluster.launch or " #" in cluster.launch:
        raise ConfigError("launch must be one line of `baton launch` arguments, without a comment")
    return f"{words} {cluster.launch}".strip()


def _pool_bounds(pool: str, least: int, most: int) -> list[tuple[str, str]]:
    labels = f'    labels: {{"pool": "{pool}"}}\n    node_config: {{}}\n'
    return [
        (
            f"{labels}    min_workers: 1\n    max_workers: 1\n",
            f"{labels}    min_workers: {least}\n    max_workers: {most}\n",
        )
    ]


def _text(value: str) -> str:
    """Write a string for YAML: plain if that is safe, else quoted as JSON, which is valid YAML."""
    plain = value and all(c.isalnum() or c in "._-/~" for c in value) and value[0] not in "-."
    return value if plain and not value.isdigit() else json.dumps(value)


def _list(values: tuple[str, ...]) -> str:
    return f"[{', '.join(_text(value) for value in values)}]"


# ------------------------------------------------------------------------------- checking


def read_cluster_file(path: Path) -> dict[str, Any]:
    """Read a cluster file. Raises ConfigError if it is unreadable or not a mapping."""
    import yaml  # type: ignore[import-untyped]  # of Ray

    try:
        check_file(path)
        content = yaml.safe_load(path.read_text())
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not valid YAML: {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a mapping of settings")
    return content


def check_cluster(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check a configuration and return it as Ray prepares it. Raises ConfigError.

    Ray's schema rejects unknown keys at the top level, in ``auth`` and in node types. In the
    provider's section Ray accepts any key, so this function checks that section.
    """
    from ray.autoscaler._private.util import (  # pyright: ignore[reportMissingImports]
        prepare_config,
        validate_config,
    )

    given = copy.deepcopy(dict(config))
    _check_schema(validate_config, {"cluster_synced_files": [], **given})
    try:
        with _silenced():
            prepared = prepare_config(given)
    except (KeyError, ValueError, AssertionError) as problem:
        raise ConfigError(f"Ray cannot prepare this file: {problem!r}") from None
    _check_schema(validate_config, prepared)
    if prepared["provider"].get("module") == PROVIDER:
        settings = provider_settings(prepared["provider"])
        check_node_types(
            settings.pools, prepared["available_node_types"], prepared["head_node_type"]
        )
    return dict(prepared)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress Ray's warnings about keys that Ray itself adds and drops during preparation."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _check_schema(validate: Any, config: Mapping[str, Any]) -> None:
    import jsonschema  # type: ignore[import-untyped]  # of Ray

    try:
        validate(config)
    except jsonschema.ValidationError as problem:
        where = ".".join(str(part) for part in problem.absolute_path) or "the file"
        raise ConfigError(f"{where}: {problem.message}") from None
    except (ValueError, RuntimeError) as problem:
        raise ConfigError(str(problem)) from None
