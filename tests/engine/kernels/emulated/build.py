"""Build the kernels for AMX with ``instructions.h`` in place of the tile instructions.

Only the sources with tile instructions and the Python interface are compiled; all other kernels
are those of the extension that is installed, with which the library is linked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[3] / "engine/kernels/csrc"
SOURCES = ("cpu_module", "isa_amx", "attention_amx", "quantized_vnni512")
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16")
"""What these sources use of the processor beside the tiles, as Linux names it."""
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "gcc")[0]
OPTIONS = (
    "-O1", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-fPIC",
    "-DPy_LIMITED_API=0x030B0000", f"-I{sysconfig.get_path('include')}",
)  # fmt: skip
EMULATED = f'-DTILE_INSTRUCTIONS="{HERE / "instructions.h"}"'


@cache
def why_not() -> str | None:
    """Why this machine cannot execute the kernels, in one sentence; None if it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the kernels for AMX run on x86-64 Linux alone"
    if shutil.which(COMPILER) is None:
        return f"there is no compiler {COMPILER}"
    if not _compiler_has_tiles():
        return f"the compiler {COMPILER} lacks the tile instructions"
    if installed() is None:
        return "the C kernels are not installed"
    if missing := sorted({*NEEDED} - processor_flags()):
        return f"the kernels for AMX use {', '.join(missing)} beside tiles, not of this processor"
    return None


def _compiler_has_tiles() -> bool:
    headers = "#if !__has_include(<amxbf16intrin.h>) || !__has_include(<amxint8intrin.h>)\n#error\n"
    command = [COMPILER, "-E", "-x", "c", "-"]
    run = subprocess.run(
        command, input=f"{headers}#endif", capture_output=True, text=True, check=False
    )
    return run.returncode == 0


def installed() -> Path | None:
    """The extension that is installed."""
    spec = importlib.util.find_spec("baton.engine.kernels._cpu")
    return Path(spec.origin) if spec and spec.origin else None


def processor_flags() -> set[str]:
    """Return what Linux says of the first processor's abilities."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def build_probe(folder: Path, *, emulated: bool) -> Path:
    """Return a library of single instructions, computed ones or those of the processor."""
    library = folder / f"probe-{'emulated' if emulated else 'own'}.so"
    options = (*OPTIONS, EMULATED) if emulated else OPTIONS
    subprocess.run([COMPILER, *options, "-shared", HERE / "probe.c", "-o", library], check=True)
    return library


def build(folder: Path) -> Path:
    """Return the extension with emulated tiles; build it if a source has changed."""
    other = installed()
    assert other is not None
    digest = hashlib.blake2b(repr((COMPILER, OPTIONS, EMULATED)).encode(), digest_size=16)
    headers = [*CSRC.glob("*.h"), HERE / "instructions.h"]
    for path in [*(CSRC / f"{name}.c" for name in SOURCES), *sorted(headers), other]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    library = folder / f"{digest.hexdigest()}.so"
    if not library.exists():
        _compile(library, other)
    return library


def _compile(library: Path, other: Path) -> None:
    """Compile the sources at the same time, and link them with the other kernels."""
    work = Path(tempfile.mkdtemp(dir=library.parent))
    try:
        objects = [work / f"{name}.o" for name in SOURCES]
        compilers = [
            subprocess.Popen([COMPILER, *OPTIONS, EMULATED, "-c", CSRC / f"{name}.c", "-o", to])
            for name, to in zip(SOURCES, objects, strict=True)
        ]
        codes = [compiler.wait() for compiler in compilers]
        if any(codes):
            raise RuntimeError("the kernels for AMX could not be compiled with emulated tiles")
        made = work / "library.so"
        subprocess.run([COMPILER, "-shared", "-pthread", *objects, other, "-o", made], check=True)
        made.replace(library)
    finally:
        shutil.rmtree(work)
