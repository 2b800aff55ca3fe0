"""The CUDA sources for the compiler: one text per kernel file, without includes."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_ONCE = "#pragma once\n"


@cache
def cuda_source(name: str) -> str:
    """Return ``csrc/name`` with its headers inserted, each once.

    CuPy's cache of compiled kernels is keyed by the source alone, so a changed header outside of it
    would go unnoticed. Line numbers in messages are those of the files.
    """
    return _inline(name, set())


def _inline(name: str, seen: set[str]) -> str:
    text = files("baton.engine.kernels").joinpath("csrc", name).read_text("utf-8")
    parts, end = [f'#line 1 "{name}"\n'], 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end() + 1
        if match[1] not in seen:
            seen.add(match[1])
            parts.append(_inline(match[1], seen))
        line = text.count("\n", 0, end) + 1
        parts.append(f'#line {line} "{name}"\n')
    parts.append(text[end:])
    return "".join(parts).replace(_ONCE, "\n")
