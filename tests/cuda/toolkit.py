"""NVRTC and nvdisasm of the pip wheels: machine code for real targets, without GPU and driver.

Two releases of NVRTC compile: the newest, and that of CUDA 13.0, whose registers and spills differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import NamedTemporaryFile

# What CuPy passes; ptxas reports registers and spills into the log.
OPTIONS = ("-std=c++17", "-ftz=true", "--ptxas-options=-v")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_MEMORY = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r"|Used (\d+) registers"
)
_SECTION = re.compile(r"^//-+ \.text\.(\w+) +-+$", re.MULTILINE)
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;\n]*)")
_WAIT = "ACQBULK"
"""griddepcontrol.wait."""
_GLOBAL = re.compile(r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UTMALDG|LDL|STL)\b.*")
_PREDICATE = re.compile(r", !?U?P\d+ *$")
FIRST = "13.0.88"
"""The oldest NVRTC that must compile the sources; `make test-cuda` fetches it."""
FIRST_FOLDER = Path(__file__).resolve().parents[2] / f"build/nvrtc-{FIRST}"


class CompileFailed(Exception):
    """NVRTC refused a source; holds its log."""


@dataclass(frozen=True)
class Compiled:
    """One kernel: its figures from ptxas, and how often each instruction occurs.

    An asynchronous copy with a predicate as its last operand ends in ",P". ``early``: accesses to
    global memory that are listed before the first wait for the kernel before; None without a wait.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    opcodes: dict[str, int]
    early: list[str] | None


@cache
def wheel_file(package: str, pattern: str) -> Path | None:
    """Return the installed file of a wheel that matches, or None."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        return None
    found = [Path(str(f.locate())) for f in files if re.fullmatch(pattern, f.name)]
    return found[0] if found else None


@cache
def nvrtc_library(release: str = "newest") -> Path | None:
    """The compiler of a release, "newest" or :data:`FIRST`; None if it is not installed."""
    if release == "newest":
        return wheel_file("nvidia-cuda-nvrtc", r"libnvrtc\.so\.\d+")
    library = FIRST_FOLDER / "nvidia/cu13/lib/libnvrtc.so.13"
    if not library.exists():
        return None
    for beside in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(beside))  # the compiler asks the loader for it by name
    return library


def disassembler() -> Path | None:
    """The disassembler, or None."""
    return wheel_file("nvidia-cuda-nvdisasm", "nvdisasm")


def compile_source(
    text: str, target: str, cache_folder: Path, release: str = "newest"
) -> dict[str, Compiled]:
    """Compile for a target like "sm_90"; return its kernels by name. Kept by content.

    Raises CompileFailed with the compiler's log.
    """
    library = nvrtc_library(release)
    parts = (text, target, *OPTIONS, str(library), Path(__file__).read_text("utf-8"))
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    kept = cache_folder / f"sass-{target}-{digest}.json"
    if kept.exists():
        kept.touch()  # builder.prune() keeps used files
    else:
        log, cubin = _compile(text, target, str(library))
        kernels = {name: asdict(kernel) for name, kernel in _read(log, _disassemble(cubin)).items()}
        work = kept.with_suffix(f".{id(kernels):x}")
        work.write_text(json.dumps(kernels))
        work.replace(kept)
    return {name: Compiled(**fields) for name, fields in json.loads(kept.read_text()).items()}


def _read(log: str, sass: dict[str, list[str]]) -> dict[str, Compiled]:
    """Numbers of a kernel: the worst of itself and of the functions listed with it."""
    kernels = {}
    pieces = _ENTRY.split(log)
    for name, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        registers = stack = spills = 0
        for match in _MEMORY.finditer(piece):
            if match[4]:
                registers = max(registers, int(match[4]))
            else:
                stack = max(stack, int(match[1]))
                spills += int(match[2]) + int(match[3])
        listed = sass[name]
        early = None
        if _WAIT in listed:
            early = [each for each in listed[: listed.index(_WAIT)] if _GLOBAL.fullmatch(each)]
        kernels[name] = Compiled(registers, stack, spills, dict(Counter(listed)), early)
    return kernels


def _disassemble(cubin: bytes) -> dict[str, list[str]]:
    """Return the instructions of each kernel, in the order of the listing."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(disassembler()), "-c", file.name]
        run = subprocess.run(command, capture_output=True, check=True, text=True)
    pieces = _SECTION.split(run.stdout)
    listed: dict[str, list[str]] = {}
    for name, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        found = listed[name] = []
        for mnemonic, operands in _OPCODE.findall(piece):
            predicated = mnemonic.startswith("LDGSTS") and _PREDICATE.search(operands)
            found.append(f"{mnemonic},P" if predicated else mnemonic)
    return listed


def _compile(text: str, target: str, library: str) -> tuple[str, bytes]:
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"source.cu", 0, None, None)
    options = [option.encode() for option in (*OPTIONS, f"-arch={target}")]
    array = (ctypes.c_char_p * len(options))(*options)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    try:
        if failed:
            raise CompileFailed(f"{target}: {log}")
        return log, _output(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
