"""The native client of the router socket.

::

    from baton.client import Client

    with Client("ipc:///run/baton/router") as client:
        for output in client.generate("Once upon a time"):
            print(output.text, end="", flush=True)

:class:`Client` is for threads, :class:`AsyncClient` for asyncio programs. Names are loaded on
first use, so that importing the package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_client import AsyncClient
    from .async_generation import AsyncGeneration
    from .client import Client, Generation
    from .description import Description
    from .logprobs import TokenLogprob
    from .options import GenerationOptions, RequestOptions
    from .output import Output
    from .pictures import Picture, PictureOptions
    from .result import Completion, Result, Usage
    from .speech import AudioPrompt

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "AudioPrompt",
    "Client",
    "Completion",
    "Description",
    "Generation",
    "GenerationOptions",
    "Output",
    "Picture",
    "PictureOptions",
    "RequestOptions",
    "Result",
    "TokenLogprob",
    "Usage",
]

_HOME = {
    "AsyncClient": "async_client",
    "AsyncGeneration": "async_generation",
    "AudioPrompt": "speech",
    "Client": "client",
    "Completion": "result",
    "Description": "description",
    "Generation": "client",
    "GenerationOptions": "options",
    "Output": "output",
    "Picture": "pictures",
    "PictureOptions": "pictures",
    "RequestOptions": "options",
    "Result": "result",
    "TokenLogprob": "logprobs",
    "Usage": "result",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
