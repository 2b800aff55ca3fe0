"""Builds a `.cu` source into a library of this machine, once for each content.

The key of a build is everything that goes into it: the source, all headers, the compiler and its
options. A finished library is moved into place, so several processes may build the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "engine/kernels/csrc"
COMPILER = "g++"
OPTIONS = (
    "-std=c++17", "-Og", "-fPIC", "-fvisibility=hidden", "-fno-exceptions",
    "-fno-rtti", "-fno-threadsafe-statics",
    "-fno-strict-aliasing", "-fstack-clash-protection", "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern", "-w",
)  # fmt: skip
VARIANTS = {
    "plain": (),
    "races": ("-DBATON_RACES", "-Og", "-g1", "-fsanitize=thread"),
    "sanitized": ("-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
KERNEL = re.compile(
    r"BATON_GLOBAL\s+void\s+(?:BATON_BOUNDS\s*\(((?:[^()]|\([^()]*\))*)\)\s*)?(\w+)\s*\("
)
LAUNCHER = """\
#include "cuda_host.h"
#include "{source}"
static const cuda_host::Kernel kernels[] = {{
{rows}}};
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT unsigned baton_kernel_count() {{ return sizeof kernels / sizeof kernels[0]; }}
EXPORT const char* baton_kernel_name(unsigned i) {{ return kernels[i].name; }}
EXPORT const char* baton_kernel_signature(unsigned i) {{ return kernels[i].signature; }}
EXPORT unsigned baton_kernel_threads(unsigned i) {{ return kernels[i].max_threads; }}
EXPORT char* baton_stacks(char* shared) {{ return cuda_host::use_stacks(shared); }}
EXPORT const char* baton_launch(unsigned i, const unsigned* grid, const unsigned* block,
                                size_t shared_bytes, void** values, uint64_t seed,
                                double seconds) {{
    return cuda_host::launch(kernels[i], grid, block, shared_bytes, values, seed, seconds);
}}
"""


class BuildFailed(Exception):
    """The compiler refused a source; holds its messages."""


@cache
def compiler() -> str | None:
    """What the compiler calls itself, or None without one."""
    if shutil.which(COMPILER) is None:
        return None
    run = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[0]


def why_not() -> str | None:
    """Why this machine cannot execute kernels, in one sentence; None when it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the CUDA kernels are executed on the CPU of x86-64 Linux alone"
    if compiler() is None:
        return f"the CUDA kernels are executed on the CPU by {COMPILER}, which is not there"
    return None


def prune(cache_folder: Path, days: float = 7) -> None:
    """Drop what no run has used for some days."""
    oldest = time.time() - days * 86_400
    for path in cache_folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()


def sanitizer() -> Path | None:
    """The address sanitizer's library, which must be loaded first, or None."""
    if why_not() is not None:
        return None
    command = [COMPILER, "-print-file-name=libasan.so"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    path = Path(run.stdout.strip())
    return path if path.is_absolute() else None


def _inputs(source: Path) -> list[Path]:
    """Return the files that a build of ``source`` may read."""
    headers = {*HERE.glob("*.h"), *source.parent.glob("*.cuh"), *CSRC.glob("*.cuh")}
    return [source, *sorted(headers)]


def mentioned(source: Path, defines: Sequence[str]) -> tuple[str, ...]:
    """Return those defines (``NAME`` or ``NAME=VALUE``) that a build of ``source`` may read."""
    text = "".join(path.read_text("utf-8") for path in _inputs(source))
    return tuple(one for one in defines if one.partition("=")[0] in text)


def build(
    source: Path,
    cache_folder: Path,
    variant: str = "plain",
    defines: Sequence[str] = (),
    suffix: str = "",
) -> Path:
    """Return the library of `source` for a variant and planted defines; builds it when new.

    It has the kernels whose names end with ``suffix``. Raises BuildFailed with the compiler's
    words.
    """
    options = [*OPTIONS, *VARIANTS[variant], *(f"-D{name}" for name in defines)]
    digest = hashlib.blake2b(digest_size=16)
    for part in (compiler() or "", *options, suffix):
        digest.update(part.encode() + b"\0")
    for path in [*_inputs(source), HERE / "builder.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    library = cache_folder / f"{source.stem}-{variant}-{digest.hexdigest()}.so"
    if library.exists():
        library.touch()  # prune() keeps used files
    else:
        _compile(source, library, options, suffix)
    return library


def _compile(source: Path, library: Path, options: Sequence[str], suffix: str) -> None:
    include = [f"-I{HERE}", f"-I{source.parent}", f"-I{CSRC}"]
    unique = f"{library.stem}-{id(library):x}"
    work = library.with_name(unique)
    work.mkdir(parents=True)
    try:
        macros = [option for option in options if option.startswith("-D")]
        scan = ["-DBATON_SCAN", "-include", "cuda_host.h", "-E", "-P", "-x", "c++", str(source)]
        text = _run([*include, *macros, *scan])
        rows = "".join(
            f'    cuda_host::kernel("{name}", &{name}, cuda_host::bounds({bounds})),\n'
            for bounds, name in KERNEL.findall(text)
            if name.endswith(suffix)
        )
        launcher = work / "launcher.cc"
        launcher.write_text(LAUNCHER.format(source=source, rows=rows))
        _run([*options, *include, "-c", str(launcher), "-o", str(work / "launcher.o")])
        # What -fsanitize=thread calls is in the host header, not in g++'s library.
        linked = [option for option in options if option != "-fsanitize=thread"]
        _run([*linked, "-shared", str(work / "launcher.o"), "-o", str(work / "library.so")])
        (work / "library.so").replace(library)
    finally:
        shutil.rmtree(work)


def _run(arguments: Sequence[str]) -> str:
    # Under the sanitizers' library, which a sanitized run loads into every process, g++ takes six
    # times as long.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = subprocess.run(
        [COMPILER, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if run.returncode:
        raise BuildFailed(run.stderr[:8000])
    return run.stdout
