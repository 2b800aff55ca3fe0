"""Whether everything works on this machine's GPU: ``make gpu-check``.

Ends in a table and a JSON file; each part runs in a separate process with a time limit. A call
takes at most nine minutes, and ``--rest`` runs the parts that are left.
"""

from __future__ import annotations

import sys

from .parts import Part
from .verb import run_verb

_HERE = "baton.benchmarks.gpu"
PARTS = (
    Part("compile", f"{_HERE}.compiling:compiling", 90),
    Part("probes", f"{_HERE}.probes:probes", 90),
    Part("smoke", f"{_HERE}.smoke:smoke", 60, together=True),
    Part("values", f"{_HERE}.values:values", 120, together=True),
    Part("attention", f"{_HERE}.suite:attention", 200, together=True),
    Part("blocks", f"{_HERE}.suite:blocks", 200, together=True),
    Part("sampling", f"{_HERE}.suite:sampling", 200, together=True),
    Part("others", f"{_HERE}.suite:others", 200, together=True),
    Part("oracle", f"{_HERE}.oracle:oracle", 120, together=True),
    Part("kinds", f"{_HERE}.suite:kinds", 120, together=True),
    Part("serving", f"{_HERE}.serving:serving", 120),
    Part("handoffs", f"{_HERE}.handoffs:handoffs", 90),
    Part("leaks", f"{_HERE}.leaks:leaks", 90),
    Part("memcheck", f"{_HERE}.sanitizer:memcheck", 120, together=True),
    Part("racecheck", f"{_HERE}.sanitizer:racecheck", 120, together=True),
    Part("words", f"{_HERE}.suite:words", 90),
)


if __name__ == "__main__":
    sys.exit(run_verb("gpu-check", PARTS, __doc__ or ""))
