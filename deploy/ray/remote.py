"""Commands on a host over ssh: check whether it can be a node, and stop its processes.

The options are those of Ray's command runner (no host keys, since `ray up` does not check them
either; see docs/operations), plus time limits. No call prompts for input.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CONNECT_SECONDS = 4
"""Seconds for a host to accept a connection."""
CHECK_SECONDS = 8
_PROBLEM = 3
_SSH_FAILED = 255
_AT_ONCE = 16


class Login(NamedTuple):
    """The login for hosts. ``key``: private key file; empty: ssh's default keys."""

    user: str
    key: str = ""


class Unreachable(Exception):
    """ssh could not run a command on the host; the text gives the reason."""


class HostProblem(Exception):
    """The host answered, but has a problem; the text gives the remedy."""


def check_host(login: Login, host: str, python: str, version: str, ray: str, venv: str) -> None:
    """Raise Unreachable or HostProblem unless the host can become a node.

    ``version``: of Python, "3.11"; ``ray``: of Ray, "2.60.0"; both must be those of the head.
    """
    _run_script(login, host, "check_host.sh", (python, version, ray, venv), CHECK_SECONDS)


def stop_host(login: Login, host: str, grace: int) -> str:
    """Stop the host's Ray and Baton processes and verify it. Returns a description."""
    limit = CONNECT_SECONDS + grace + 10
    return _run_script(login, host, "stop_host.sh", (host, str(grace)), limit)


def host_name(login: Login, host: str) -> str:
    """Return the host's own name. Raises as :func:`check_host`."""
    return _run(login, host, "uname -n", b"", CHECK_SECONDS)


def for_all(
    hosts: Iterable[str], call: Callable[[str], object]
) -> dict[str, Unreachable | HostProblem | None]:
    """Run ``call`` for all hosts in parallel. Returns each host's problem, in order."""

    def one(host: str) -> Unreachable | HostProblem | None:
        try:
            call(host)
        except (Unreachable, HostProblem) as problem:
            return problem
        return None

    listed = list(hosts)
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return dict(zip(listed, pool.map(one, listed), strict=True))


def _run_script(
    login: Login, host: str, script: str, arguments: tuple[str, ...], limit: float
) -> str:
    text = (Path(__file__).parent / script).read_bytes()
    return _run(login, host, shlex.join(["sh", "-s", "--", *arguments]), text, limit, script)


def _run(login: Login, host: str, command: str, given: bytes, limit: float, name: str = "") -> str:
    """Run a command and return its output. ``given``: its input, ``name``: its name in errors."""
    try:
        done = subprocess.run(  # noqa: S603 -- arguments, no shell here
            [*ssh_command(login, host), command],
            input=given,
            capture_output=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"ssh {host} gave no answer within {limit:g} s") from None
    except OSError as problem:
        raise Unreachable(f"ssh cannot be run: {problem.strerror}") from None
    words = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == _PROBLEM:
        raise HostProblem(words)
    if done.returncode == _SSH_FAILED:
        raise Unreachable(last_line(done.stderr) or "ssh failed")
    if done.returncode:
        raise HostProblem(f"{name or command} failed there: {last_line(done.stderr) or words}")
    return words


def ssh_command(login: Login, host: str) -> list[str]:
    """Return the ssh command line with all options, without the remote command."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_SECONDS),
        "ConnectionAttempts": "1",
        "ControlPath": "none",
        "IdentitiesOnly": "yes" if login.key else "no",
        "LogLevel": "ERROR",
        "ServerAliveCountMax": "3",
        "ServerAliveInterval": "5",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": os.devnull,
    }
    key = ["-i", str(Path(login.key).expanduser())] if login.key else []
    chosen = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *key, *chosen, "--", f"{login.user}@{host}" if login.user else host]


def last_line(output: bytes) -> str:
    """Return the last line that is not blank."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
