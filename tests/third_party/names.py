"""Registers ``baton.proto`` under the module names that code written for the pages imports.

Every module gets every name: which of them a page's module had is not for this to check, and a
name that ``baton.proto`` lacks is an ImportError where it is asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

import baton.proto

MODULES = (
    "max",
    "max.interfaces",
    "max.interfaces.context",
    "max.interfaces.generation",
    "max.interfaces.request",
    "max.interfaces.request.open_responses",
    "max.interfaces.status",
    "max.interfaces.tokens",
    "max.interfaces.utils",
    "max.interfaces.utils.serialization",
    "max.pipelines",
    "max.pipelines.core",
    "max.pipelines.core.context",
)
"""Parents first."""


@dataclass
class SpecDecodingState:
    """Younger than the pages; files that import it also hold cases that do not use it."""


class ImageDetail(StrEnum):
    """Values of ``OutputImageContent.detail``, which is text here."""

    low = "low"
    high = "high"
    auto = "auto"


def reference_names() -> dict[str, Any]:
    """What the modules hold: all of ``baton.proto``, and what the pages call otherwise."""
    names = {name: getattr(baton.proto, name) for name in baton.proto.__all__}
    return names | {
        "TextGenerationContext": baton.proto.TextContext,
        "VLMTextGenerationContext": baton.proto.TextAndVisionContext,
        "PixelGenerationContext": baton.proto.PixelContext,
        "SpecDecodingState": SpecDecodingState,
        "ImageDetail": ImageDetail,
    }


def register() -> None:
    """Make the modules importable in this process, before anything imports the real ones."""
    names = reference_names()
    for path in MODULES:
        module = ModuleType(path, "baton.proto under another name")
        module.__path__ = []
        module.__dict__.update(names)
        sys.modules[path] = module
        parent, _, leaf = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
