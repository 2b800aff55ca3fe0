"""Joining a Ray cluster, or raising an error with the reason and the remedy.

``ray.init`` blocks for minutes if the head is gone, and retries forever with a wrong token. So
these conditions are checked first, each check with its own time limit.
A refused connection or token ends the attempt at once. A head that accepts connections and does
not answer is probed again for :data:`PATIENCE` seconds: a head that has just been started on a
busy machine needs longer than one probe.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import platform
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec

from baton.proto.errors import ConfigError, ConnectionLost

RAY_VERSION = "2.60.0"
"""The version that the extra ``ray`` pins, because Baton uses private parts of Ray."""
INSTALL_RAY = "pip install 'baton-serve[ray]'"
NAMESPACE = "baton"
TCP_TIMEOUT = 2.0
"""Seconds for the connection to the head."""
PROBE_TIMEOUT = 7.0
"""Seconds for the first probe of the head; each further probe gets twice as long, because on a
busy machine the probe's own start (importing Ray) can take longer than that."""
PATIENCE = 60.0
"""Seconds for all probes of a head that accepts connections."""
PAUSE = 0.5
"""Seconds between a probe that failed at once and the next one."""
PROBE = ("-m", "baton.deploy.ray.probe")


class HeadFacts(msgspec.Struct, frozen=True):
    """The head's answer: its versions, and the addresses of the live nodes."""

    ray_version: str
    python_version: str
    nodes: list[str]


def import_ray() -> Any:
    """Import ``ray``. Raises ConfigError if it is missing or has another version."""
    try:
        import ray
    except ImportError as problem:
        raise ConfigError(f"Ray is not installed here; install it with: {INSTALL_RAY}") from problem
    if ray.__version__ != RAY_VERSION:
        raise ConfigError(
            f"Ray {ray.__version__} is installed and Baton needs {RAY_VERSION}; "
            f"install it with: {INSTALL_RAY}"
        )
    return ray


def connect(wanted: str = "auto", patience: float = PATIENCE) -> Any:
    """Join this process to the cluster at ``wanted`` (``HOST:PORT`` or ``auto``); return ``ray``.

    Raises ConfigError or ConnectionLost, each with the remedy: after at most ``patience`` seconds
    if the head accepts connections without answering, otherwise within ten seconds.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    address = find_address(wanted)
    facts = ask_head(address, patience)
    check_versions(address, facts)
    check_here(address, facts)
    ray.init(
        address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error"
    )  # fmt: skip
    return ray


def find_address(wanted: str) -> str:
    """Return ``HOST:PORT`` of the head. ``auto``: the Ray cluster of this machine."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address = canonicalize_bootstrap_address(wanted)
    except ValueError as problem:
        raise ConfigError(f"--ray-address {wanted}: {problem}") from problem
    except ConnectionError:
        address = None
    if address is None:
        raise ConnectionLost(
            "no Ray cluster runs on this machine; start it (ray up, or ray start --head), "
            "or give --ray-address HOST:PORT"
        )
    return str(address)


def ask_head(address: str, patience: float = PATIENCE) -> HeadFacts:
    """Return what the head reports; probe it for up to ``patience`` seconds.

    Raises ConnectionLost if nothing listens there or no probe succeeds, ConfigError for the token.
    """
    _require_listener(address)
    began = time.monotonic()
    probes = 0
    while True:
        probes += 1
        left = patience - (time.monotonic() - began)
        try:
            return _probe(address, min(PROBE_TIMEOUT * 2 ** (probes - 1), max(left, 1.0)))
        except ConnectionLost as problem:
            spent = time.monotonic() - began
            if spent + PAUSE >= patience:
                raise ConnectionLost(
                    f"the Ray head at {address} accepts connections but did not answer: probed "
                    f"{probes} times in {spent:.0f} s, last result: {problem}; see ray status and "
                    "gcs_server.out in the logs of the head's Ray session, and run this again. If "
                    "another service listens there, give --ray-address HOST:PORT"
                ) from problem
        if probes == 1:
            sys.stderr.write(
                f"baton: the Ray head at {address} does not answer yet; "
                f"probing it again for up to {patience - spent:.0f} s\n"
            )
        time.sleep(PAUSE)


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), TCP_TIMEOUT).close()
    except (OSError, ValueError, OverflowError) as problem:
        raise ConnectionLost(
            f"no Ray head answers at {address} ({problem}); check that it runs (ray status), "
            "the address, and that the port is open between the hosts"
        ) from problem


def _probe(address: str, limit: float) -> HeadFacts:
    """Ask the head once, for ``limit`` seconds. Raises as :func:`ask_head`."""
    command = [sys.executable, "-P", *PROBE, address, f"{limit:g}"]
    try:
        done = subprocess.run(  # noqa: S603 -- our own interpreter and module
            command, capture_output=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as problem:
        raise ConnectionLost(f"no answer within {limit:.0f} s") from problem
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(done.stdout, type=HeadFacts)
    raise _refused(address, done.stderr.decode("utf-8", "replace"))


def _refused(address: str, output: str) -> ConfigError | ConnectionLost:
    if "AuthenticationError" in output or "authentication token" in output:
        return ConfigError(
            f"the Ray head at {address} requires a token; this process has none or a wrong one; "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's token file"
        )
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no message")
    return ConnectionLost(last.strip()[:300])


def check_versions(address: str, facts: HeadFacts) -> None:
    """Raise ConfigError unless the head has the same Ray and the same minor Python version."""
    mine = platform.python_version()
    if facts.ray_version != RAY_VERSION:
        raise ConfigError(
            f"the head at {address} runs Ray {facts.ray_version or 'of no known version'} and "
            f"this machine {RAY_VERSION}; install the same on all nodes and start Ray again"
        )
    if facts.python_version.split(".")[:2] != mine.split(".")[:2]:
        raise ConfigError(
            f"the head at {address} runs Python {facts.python_version} and this machine {mine}; "
            "give all nodes the same minor version"
        )


def check_here(address: str, facts: HeadFacts) -> None:
    """Raise ConfigError unless this machine is a node: Ray needs a raylet on the same machine."""
    if not any(is_own_address(node) for node in facts.nodes):
        known = ", ".join(sorted(set(facts.nodes))[:8]) or "none"
        raise ConfigError(
            f"this machine is not a node of the Ray cluster at {address} (live nodes: {known}); "
            "run this on its head, as the last of the head's start commands does"
        )


def is_own_address(address: str) -> bool:
    """Whether an interface of this machine has this IP address."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
        return True
    except OSError:
        return False
