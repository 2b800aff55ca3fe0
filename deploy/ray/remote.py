"""What is done on a host over ssh: look whether it can be a node, and end what runs there.

The options are those of Ray's own command runner (no host keys, since `ray up` does not check
them either; see docs/operations), plus bounds: no call here waits for a person or for long.
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
"""How long a host may take to accept a connection."""
CHECK_SECONDS = 8
_PROBLEM = 3
_SSH_FAILED = 255
_AT_ONCE = 16


class Login(NamedTuple):
    """How to reach hosts: ``key`` may be empty for what ssh finds by itself."""

    user: str
    key: str = ""


class Unreachable(Exception):
    """ssh could not run anything on the host; the text says why."""


class HostProblem(Exception):
    """The host answered, and something is wrong there; the text says what to do."""


def check_host(login: Login, host: str, python: str, version: str, ray: str, venv: str) -> None:
    """Raise Unreachable or HostProblem unless the host can become a node.

    ``version``: of Python, "3.11"; ``ray``: of Ray, "2.60.0"; both must be those of the head.
    """
    _run_script(login, host, "check_host.sh", (python, version, ray, venv), CHECK_SECONDS)


def stop_host(login: Login, host: str, grace: int) -> str:
    """End the host's Ray and Baton processes and make sure of it; returns what was done."""
    limit = CONNECT_SECONDS + grace + 10
    return _run_script(login, host, "stop_host.sh", (host, str(grace)), limit)


def host_name(login: Login, host: str) -> str:
    """What the host calls itself. Raises as :func:`check_host`."""
    return _run(login, host, "uname -n", b"", CHECK_SECONDS)


def for_all(
    hosts: Iterable[str], call: Callable[[str], object]
) -> dict[str, Unreachable | HostProblem | None]:
    """Do the same on all hosts at once; the problem of each, in the order of the hosts."""

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
    """What a command there said; ``given``: its input, ``name``: what to call it."""
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
    """``ssh`` with all options up to the command."""
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
    """The last line that says something."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
