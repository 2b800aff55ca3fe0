"""``baton doctor``: check this machine and the installation, one line per finding."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton import DISTRIBUTION
from baton.deploy.config import ServeSettings, demo_model_folder
from baton.deploy.local.banner import kernels_warning
from baton.deploy.local.run_folder import socket_in_use
from baton.deploy.messages import counted
from baton.deploy.plan.addresses import free_ports, ipc_path
from baton.deploy.plan.folders import folder_memory
from baton.deploy.plan.memory import PROCESS_BYTES, process_bytes
from baton.deploy.plan.plan import model_folder
from baton.deploy.plan.prepare import sizing_of, visible_gpus_of_children
from baton.deploy.plan.sizing import lines, suggestion
from baton.engine.kernels.load import kernels_title, load_backend
from baton.engine.loading.checkpoint import load_checkpoint, require_tokenizer
from baton.engine.loading.embedding_config import DRAW, GENERATE
from baton.engine.loading.tasks import folder_task
from baton.proto.errors import BatonError, ConfigError
from baton.proto.layout import KV_CHOICES
from baton.proto.wire.endpoints import MAX_IPC_PATH_BYTES
from baton.runtime.net.user_address import default_address
from baton.runtime.process.cores import default_threads, plural, usable_cores
from baton.runtime.process.memory import free_memory, size_text

from .numbers import count

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_MIN_SHM = 64 << 20
_EXTRAS = (
    ("cuda", "cupy", "GPU workers"),
    ("ray", "ray", "clusters of several machines"),
    ("images", "PIL", "images in prompts"),
    ("audio", "av", "speech as MP3, Opus or AAC"),
    ("otel", "opentelemetry", "spans for an OpenTelemetry collector"),
)
"""Name of the extra, a module of it, and its purpose."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``level``: ok, warn or fail. ``advice``: the remedy."""

    level: str
    subject: str
    detail: str
    advice: str = ""

    def line(self) -> str:
        """The finding as one line of output."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{_MARKS[self.level]}  {self.subject:<10} {self.detail}{advice}"


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("doctor", help="check this machine, installation and a model")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="model folder or GGUF file to open as well"
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=count, default=1, metavar="N", help=f"number of {role} workers [1]"
        )
    parser.add_argument(
        "--max-model-len",
        type=count,
        default=0,
        metavar="N",
        help="maximum context length in tokens [the model's]",
    )
    parser.add_argument(
        "--kv-type", choices=KV_CHOICES, default="auto", help="type of keys and values [auto]"
    )
    parser.set_defaults(run=run)


def _settings(arguments: argparse.Namespace) -> ServeSettings:
    return ServeSettings(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        max_model_len=arguments.max_model_len,
        kv_type=arguments.kv_type,
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every finding. Return 1 if any finding is a failure, else 0."""
    findings = [finding for check in CHECKS for finding in check()]
    if arguments.model:
        findings += check_folder(_settings(arguments))
    for finding in findings:
        print(finding.line())
    return int(any(finding.level == "fail" for finding in findings))


def check_python() -> Iterable[Finding]:
    """Python version and platform. Too old a Python cannot import this package at all."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        yield Finding("warn", "python", detail, "only Linux is tested")
    else:
        yield Finding("ok", "python", detail)


def check_packages() -> Iterable[Finding]:
    """Third-party packages that the processes import."""
    found, missing = [], []
    required = importlib.metadata.requires(DISTRIBUTION) or []
    names = [re.split(r"[^\w.-]", one)[0] for one in required if "extra ==" not in one]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        yield Finding("fail", "packages", f"missing: {', '.join(missing)}", advice)
    else:
        yield Finding("ok", "packages", ", ".join(found))


def check_distribution() -> Iterable[Finding]:
    """Another project's distribution with our import name: both install into one folder."""
    for found in importlib.metadata.distributions(name="baton"):
        detail = f"the distribution baton {found.version} uses the import name baton too"
        advice = f"pip uninstall baton, then install {DISTRIBUTION} again"
        yield Finding("warn", "packages", detail, advice)
        return


def check_kernels() -> Iterable[Finding]:
    """The kernels for this machine's processor, and their instruction set."""
    backend = load_backend()
    detail = kernels_title(backend.numerics)
    warning = kernels_warning(ServeSettings())
    yield Finding("warn" if warning else "ok", "kernels", detail, warning)


def check_blas() -> Iterable[Finding]:
    """The BLAS library of NumPy; the speed of the NumPy kernels depends on it."""
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    detail = f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
    if blas.get("found"):
        yield Finding("ok", "blas", f"{detail}, one thread per process")
    else:
        yield Finding("warn", "blas", detail, "NumPy without BLAS is slow; install its wheel")


def check_processors() -> Iterable[Finding]:
    """Number of cores: prefill and decode workers need at least one core each."""
    cores, threads = usable_cores(), default_threads(2)
    detail = (
        f"{cores.title}: {threads.count} compute {plural(threads.count, 'thread')} per worker for "
        "a prefill and a decode worker"
    )
    if cores.count < 2:
        yield Finding("warn", "cores", detail, "prefill and decode workers share one core")
    else:
        yield Finding("ok", "cores", detail)


def check_memory() -> Iterable[Finding]:
    """Free shared memory, which carries KV blocks between workers."""
    shm = Path("/dev/shm")  # noqa: S108 -- the kernel's mount point, not a temporary file
    if not shm.is_dir():
        yield Finding("warn", "shm", "no /dev/shm", "mount a tmpfs there")
    else:
        free = shutil.disk_usage(shm).free
        level = "ok" if free >= _MIN_SHM else "warn"
        advice = "" if level == "ok" else "enlarge it (containers: --shm-size)"
        yield Finding(level, "shm", f"{size_text(free)} free in /dev/shm", advice)


def check_ipc() -> Iterable[Finding]:
    """Unix sockets in the temporary folder: length of their paths, and permission to bind."""
    path = Path(tempfile.gettempdir()) / f"baton-run-{'x' * 8}" / "prefill-00.data.sock"
    if len(str(path).encode()) > MAX_IPC_PATH_BYTES:
        yield Finding("fail", "ipc", f"{path} is too long", "set TMPDIR to a shorter folder")
        return
    trial = Path(tempfile.gettempdir()) / f"baton-{uuid.uuid4().hex[:8]}.sock"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(trial))
        yield Finding("ok", "ipc", f"sockets work in {tempfile.gettempdir()}")
    except OSError as problem:
        yield Finding("fail", "ipc", str(problem), "set TMPDIR to a writable folder")
    finally:
        trial.unlink(missing_ok=True)


def check_ports() -> Iterable[Finding]:
    """Loopback TCP, for --transport tcp."""
    try:
        yield Finding("ok", "tcp", f"127.0.0.1 has free ports, such as {free_ports(1)[0]}")
    except OSError as problem:
        yield Finding("warn", "tcp", str(problem), "use ipc addresses")


def check_cluster() -> Iterable[Finding]:
    """Whether this user's cluster runs at the default address."""
    path = ipc_path(default_address())
    if path is not None and path.exists() and socket_in_use(path):
        yield Finding("ok", "cluster", f"running at {default_address()}")
    else:
        yield Finding("ok", "cluster", f"none at {default_address()}; start with baton serve")


def check_model() -> Iterable[Finding]:
    """The embedded model."""
    folder = demo_model_folder()
    try:
        checkpoint = load_checkpoint(folder)
        require_tokenizer(folder)
        yield Finding("ok", "model", f"embedded {checkpoint.config.architecture}")
    except BatonError as problem:
        yield Finding("fail", "model", str(problem), "install baton again")


def check_folder(settings: ServeSettings) -> Iterable[Finding]:
    """A model: family, size, memory of the pools, speed, and what fits into the free memory."""
    try:
        folder = model_folder(settings)
        task = folder_task(folder)
        if task == DRAW:
            yield from _check_pictures(folder)
            return
        checkpoint = load_checkpoint(folder)
        require_tokenizer(folder)
        found = sizing_of(settings)
    except BatonError as problem:
        advice = "give a folder in the Hugging Face layout, or a GGUF file"
        yield Finding("fail", "model", str(problem), advice)
        return
    yield Finding("ok", "model", f"{folder}: {checkpoint.architecture}")
    if found is None:
        return
    for subject, text in lines(found):
        yield Finding("ok", subject, text)
    length = settings.max_model_len or checkpoint.config.rope.default_length()
    need = found.weights_bytes if found.shares else 0
    each = (0 if found.shares else found.weights_bytes) + length * found.kv_token_bytes
    each += process_bytes(checkpoint.config.vocab_size)
    workers = yield from _fits(need, each, f"{length} tokens")
    if found.speed is not None and task == GENERATE:
        yield Finding("ok", "try", suggestion(found.speed, usable_cores().count, fits=workers))


def _check_pictures(folder: str) -> Iterator[Finding]:
    memory = folder_memory(folder, 0, ServeSettings().block_size)
    weights = memory.weights + memory.drawing
    detail = f"{folder}: picture model, {size_text(weights)} of weights"
    detail += f", {size_text(memory.context)} of KV memory per picture"
    yield Finding("ok", "model", detail)
    yield from _fits(0, weights + memory.context + PROCESS_BYTES, "one picture")


def _fits(need: int, each: int, context: str) -> Generator[Finding, None, int]:
    """Yield how many workers fit into the free memory, and return it.

    ``need``: bytes that all workers need together; ``each``: bytes of each.
    """
    free = free_memory()
    if free is None:
        return 2
    workers = max(0, free - need) // max(1, each)
    text = f"{counted(workers, 'worker')} with {context} each fit into "
    text += f"{size_text(free)} of free memory"
    advice = "" if workers > 1 else "prefill and decode need a worker each; see --max-model-len"
    yield Finding("ok" if workers > 1 else "warn", "fits", text, advice)
    return workers


def check_optional() -> Iterable[Finding]:
    """The packages of Baton's extras."""
    for extra, module, purpose in _EXTRAS:
        present = importlib.util.find_spec(module) is not None
        command = f"pip install '{DISTRIBUTION}[{extra}]'"
        absent = f"not installed; only needed for {purpose} ({command})"
        yield Finding("ok", extra, "present" if present else absent)


def check_gpus() -> Iterable[Finding]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, if CuPy is installed."""
    if importlib.util.find_spec("cupy") is None:
        return
    try:
        for gpu in visible_gpus_of_children():
            yield Finding("ok", "gpu", f"{gpu.device}, {gpu.name}")
    except ConfigError as problem:
        yield Finding("warn", "gpu", str(problem), "only --device cuda needs a GPU")


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    check_python,
    check_packages,
    check_distribution,
    check_kernels,
    check_blas,
    check_processors,
    check_memory,
    check_ipc,
    check_ports,
    check_model,
    check_cluster,
    check_optional,
    check_gpus,
)
