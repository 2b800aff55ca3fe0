"""Counts the work of a call exactly, so that a test can compare costs without a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def opcodes(call: Callable[[], object]) -> int:
    """Number of Python instructions that ``call`` executes; the same in every run."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection would run the finalizers of other tests' objects
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
