"""Lifecycle of router and worker processes, from settings to exit code.

Settings are a frozen msgspec struct; unknown keys are rejected.

Exit codes: 0 drained or stopped; 1 invalid setting or model (a restart does not help);
:data:`EXIT_RESTART` the incarnation ended and the process may be restarted. A paused worker that
was declared dead starts its next incarnation itself, with its model still loaded.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
from msgspec.structs import replace

from baton.proto.errors import BatonError, ConfigError

from ..keys.keyring import KeyRing
from ..keys.zap import Doorkeeper
from ..net.descriptors import raise_open_files
from ..net.loop import Loop
from ..net.wiring import Wiring
from . import os_settings
from .garbage import end_of_imports, settle
from .log import configure, get_logger, never_block
from .os_settings import on_stop_signal
from .supervision import SIGN_OF_LIFE, TURN_SIGNAL

EXIT_RESTART = 4
"""The incarnation ended; the process may start another one or be restarted."""
EXIT_TURN = 5
"""The incarnation was drained for a change of role; the process starts one of the other role."""
TICK_S = 0.05
"""Seconds between two timer evaluations of a worker's core."""
SIGN_EVERY_S = 1.0
MAX_OWN_ERRORS = 3
"""Incarnations in a row that an own exception ended, after which the process itself is replaced."""
OWN_ERRORS_APART_S = 60.0
"""An incarnation that served so long does not count as one in a row."""
SWITCH_S = 0.0005
"""Seconds that another thread may keep Python's lock while the event loop waits for it."""

Config = TypeVar("Config", bound=msgspec.Struct)
_log = get_logger()
_supervised = False
_seal = b""
_weights = -1
_settings_path = ""


def run_process(role: str, kind: type[Config], serve: Callable[[Config], int]) -> int:
    """Parse ``--config FILE [--parent PID --seal HEX --weights FD]``, then call ``serve``.

    Prepares the process and returns the exit code. A :class:`BatonError` or MemoryError gives one
    log line without a traceback, and exit code 1.
    """
    global _supervised, _seal, _weights, _settings_path
    end_of_imports()
    os_settings.limit_blas_threads(1)
    os_settings.recycle_large_buffers()
    raise_open_files()
    parser = argparse.ArgumentParser(prog=f"baton-{role}")
    parser.add_argument("--config", required=True, help="settings file (JSON or TOML)")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    computes = "runner" in kind.__struct_fields__
    if computes:
        parser.add_argument("--threads", type=int, help="compute threads (default: of --config)")
        parser.add_argument("--weights", type=int, default=-1, help="see weights_memory")
    parser.add_argument("--seal", type=bytes.fromhex, default=b"", help="see process_seal")
    options = parser.parse_args()
    configure(role)
    _seal = options.seal
    _weights = options.weights if computes else -1
    if options.parent:
        # SIGKILL, not a drain: after the supervisor's death this process would be an orphan.
        os_settings.die_with_parent(options.parent, signal.SIGKILL)
        never_block()
        _supervised = True
    _settings_path = options.config
    try:
        config = load_settings(options.config, kind)
        if computes and options.threads is not None:
            config = _with_threads(config, options.threads)
        process = str(getattr(config, "worker_id", getattr(config, "name", "")))
        human = getattr(config, "log_format", "json") == "text"
        configure(role, process, level=getattr(config, "log_level", "info"), human=human)
        code = serve(config)
    except BatonError as error:
        _log.error("process.failed", code=error.code, error=str(error))
        return 1
    except MemoryError as error:
        _log.error("process.failed", code="capacity", error=f"not enough memory: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _with_threads(config: Any, threads: int) -> Any:
    """Set the compute threads of a worker's settings."""
    return replace(config, runner=replace(config.runner, threads=threads))


def settings_path() -> str:
    """Return the path of this process's settings file, which a change of role rewrites."""
    return _settings_path


def process_seal() -> bytes:
    """Return the hash of the secret by which the supervisor certifies this process's end.

    Empty without a supervisor.
    """
    return _seal


def weights_memory() -> int:
    """Return the descriptor of the memory in which the supervisor's workers share weights.

    -1 without a supervisor, or if the settings forbid it.
    """
    return _weights


def say_alive(turns: int) -> None:
    """Log :data:`SIGN_OF_LIFE`, if the process is supervised. ``turns``: completed ones so far."""
    if _supervised:
        _log.report(SIGN_OF_LIFE, turns=turns)


class Shell(Protocol):
    """One incarnation of a worker: its core, sockets and threads."""

    exit_code: int
    own_error: bool
    """Whether an exception of the worker's own code ended it."""

    @property
    def turning(self) -> bool:
        """Whether an incarnation of another role is to follow, however this one ends."""
        ...

    def start(self) -> None:
        """Listen and start the timers."""
        ...

    def drain(self) -> None:
        """Finish all requests, then stop the loop."""
        ...

    def turn(self) -> None:
        """Finish all requests, then stop the loop with :data:`EXIT_TURN`."""
        ...

    def close(self) -> bool:
        """Close the sockets; return whether another incarnation can use the loaded model.

        It cannot while a step still runs, or after its device failed.
        """
        ...


MakeShell = Callable[[Wiring, Doorkeeper | None], Shell]


def run_incarnations(keys: KeyRing | None, make: MakeShell) -> int:
    """Run a worker until it is drained, stopped or refused; return the exit code.

    ``make`` creates a shell with a new incarnation on the loaded model. It is called again after
    the routers declared an incarnation dead, unless the model cannot be used again. An incarnation
    that an exception of the worker's own code ended is followed by another one too, with empty
    books; after :data:`MAX_OWN_ERRORS` of them in a row the process ends, because then the error is
    not in the books. :data:`EXIT_TURN`: the caller can start an incarnation of the other role.
    """
    in_a_row = 0
    while True:
        settle()  # also frees descriptors, maps and buffers of the last incarnation
        began = time.monotonic()
        code, ended, own_error = _run_one(keys, make)
        if code != EXIT_RESTART or not ended:
            return code if ended or code != EXIT_TURN else EXIT_RESTART
        served = time.monotonic() - began
        in_a_row = 0 if not own_error or served >= OWN_ERRORS_APART_S else in_a_row + 1
        if in_a_row >= MAX_OWN_ERRORS:
            return code
        _log.warning("worker.registers_again")


def _run_one(keys: KeyRing | None, make: MakeShell) -> tuple[int, bool, bool]:
    """Run one incarnation.

    Return its exit code, whether its model can be used again, and whether an own error ended it.
    """
    loop, context = Loop(), zmq.Context[zmq.Socket[bytes]]()
    doors = None if keys is None else Doorkeeper(context, keys)
    shell = make(Wiring(loop, context, keys), doors)
    on_stop_signal(loop, partial(_stop, loop, shell))
    loop.on_signal(TURN_SIGNAL, shell.turn)
    if doors is not None:
        doors.attach(loop)
    shell.start()
    loop.run()
    ended = shell.close()
    context.destroy(linger=0)
    code = shell.exit_code
    if code == EXIT_RESTART and shell.turning:  # an error or a death while it drained
        code = EXIT_TURN
    return code, ended, shell.own_error


def _stop(loop: Loop, shell: Shell, times: int) -> None:
    if times == 1:
        shell.drain()
    else:
        loop.stop()


class LoadProgress:
    """Logs the loading progress of a checkpoint every ``interval`` seconds."""

    def __init__(self, interval: float = 0.2) -> None:
        self._interval = interval
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` bytes are loaded."""
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + self._interval
            _log.report("load.progress", bytes_done=done, bytes_total=total)


def favor_event_loop() -> None:
    """Let the event loop wait at most :data:`SWITCH_S` for a thread that keeps Python's lock.

    For processes that encode metrics or spans in a thread. Call once, at the process's start.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


def leave(code: int) -> None:
    """Exit the process without waiting for a compute thread that may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------- settings


def parse_json(text: str | bytes, kind: type[Config], source: str = "settings") -> Config:
    """Parse a JSON object as ``kind``. Raises ConfigError with the invalid key."""
    try:
        return from_mapping(msgspec.json.decode(text), kind, source)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from error


def parse_toml(text: str, kind: type[Config], source: str = "settings") -> Config:
    """Parse a TOML document as ``kind``. Raises ConfigError with the invalid key."""
    try:
        return from_mapping(tomllib.loads(text), kind, source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error


def load_settings(path: str | Path, kind: type[Config]) -> Config:
    """Read ``kind`` from a ``.json`` or ``.toml`` file. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read settings {path}: it is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"cannot read settings {path}: {error.strerror}") from error
    parse = parse_toml if path.suffix == ".toml" else parse_json
    return parse(text, kind, str(path))


def from_mapping(values: Any, kind: type[Config], source: str = "settings") -> Config:
    """Convert a decoded object to ``kind``. Raises ConfigError with the invalid key."""
    unknown = _unknown_keys(values, kind)
    if unknown:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; known: {known}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def dump_settings(config: msgspec.Struct) -> str:
    """Return a config as JSON, for a child process."""
    return msgspec.json.encode(config).decode()


def _unknown_keys(values: Any, kind: type[msgspec.Struct]) -> list[str]:
    """Return the keys of ``values`` that ``kind`` or its nested structs lack, as dotted paths."""
    if not isinstance(values, dict):
        return []
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    unknown = [str(key) for key in values if key not in fields]
    for key in values.keys() & fields.keys():
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            unknown += [f"{key}.{name}" for name in _unknown_keys(values[key], inner)]
    return unknown
