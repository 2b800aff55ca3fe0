"""Which peers this machine can be compared with: packages are imported, not only found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from .lines import Line, skipped
from .stage import Stage

PEERS = {
    "torch": "SDPA, flex_attention and torch.compile",
    "transformers": "the compiled model",
    "flashinfer": "FlashInfer's attention and sampling",
}
"""Modules, and what they are peers of."""
_LIMIT_S = 40.0
_IMPORT = "import sys; m = __import__(sys.argv[1]); print(getattr(m, '__version__', 'there'))"


def peers(_stage: Stage) -> Iterator[Line]:
    """One line per package: its version, or why its comparisons are left out."""
    for name, what in PEERS.items():
        yield peer(name, what)


def peer(name: str, what: str) -> Line:
    """Import ``name`` in another process, which may fail in any way."""
    command = [sys.executable, "-P", "-c", _IMPORT, name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return skipped(what, f"{name} is left out: not imported after {_LIMIT_S:.0f} s")
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        why = lines[-1][:160] if lines else f"exit code {run.returncode}"
        return skipped(what, f"{name} is left out: {why}")
    return Line(what, f"{name} {run.stdout.strip().splitlines()[-1]}")
