"""A router, worker or gateway with planted exceptions: ``--config FOLDER/ROLE-NUMBER.json``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from .planted import plant

PROGRAMS = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}

if __name__ == "__main__":
    role = Path(sys.argv[sys.argv.index("--config") + 1]).stem.split("-")[0]
    plant(role)
    program = importlib.import_module(f"baton.{PROGRAMS.get(role, role)}.__main__")
    sys.exit(program.main())
