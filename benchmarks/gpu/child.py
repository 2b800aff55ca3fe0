"""Runs one part in a separate process and writes its lines as they come.

``python -m baton.benchmarks.gpu.child MODULE:FUNCTION --stage MODULE:FUNCTION --out FILE
--shared FOLDER``. What a part has found out is kept when it fails, hangs or takes the process with
it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from baton.runtime.process.os_settings import die_with_parent

from ..scratch import scratch_folder
from .lines import Line, to_json
from .stage import Stage

Part = Callable[[Stage], Iterable[Line]]


def named(place: str) -> Any:
    """The object that ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> int:
    """Run the part; 1 when it raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shared", required=True, type=Path)
    options = parser.parse_args()
    die_with_parent(os.getppid())
    with scratch_folder() as folder, options.out.open("w") as out:
        try:
            part: Part = named(options.part)
            stage = named(options.stage)(folder)
            stage.shared = options.shared
            for line in part(stage):
                out.write(to_json(line) + "\n")
                out.flush()
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
