"""Baton: a disaggregated serving cluster with separate prefill and decode pools.

::

    from baton import Client, SamplingParams

    with Client() as client:  # this user's cluster, as started by `baton serve`
        for output in client.generate("Once upon a time", SamplingParams(max_new_tokens=64)):
            print(output.text, end="", flush=True)

:class:`Client` is for threads, :class:`AsyncClient` for asyncio programs. :class:`LLM` starts a
new cluster and answers lists of prompts. docs/python.md has more.
Names are loaded on first use, so that importing the package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import AsyncClient, Client, Completion, Output, RequestOptions, Result, Usage
    from .offline.llm import LLM
    from .proto.errors import BatonError, CapacityError, InputError
    from .proto.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncClient",
    "BatonError",
    "CapacityError",
    "Client",
    "Completion",
    "InputError",
    "Output",
    "RequestOptions",
    "Result",
    "SamplingParams",
    "Usage",
]
__version__ = "0.1.0"
DISTRIBUTION = "baton-serve"
"""What ``pip`` calls it; the distribution ``baton`` is another project's."""

_HOME = {
    "AsyncClient": "client",
    "BatonError": "proto.errors",
    "CapacityError": "proto.errors",
    "Client": "client",
    "Completion": "client",
    "InputError": "proto.errors",
    "LLM": "offline.llm",
    "Output": "client",
    "RequestOptions": "client",
    "Result": "client",
    "SamplingParams": "proto.sampling",
    "Usage": "client",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
