"""The helper process of :mod:`.guarded`: an untrusted template or tokenizer under kernel limits.

``python -m baton.text.guarded_worker (template | tokenizer) MEMORY_BYTES CPU_SECONDS``. Requests
and answers are JSON objects. The process cannot write files, and SIGXCPU ends a request that
exceeds its CPU seconds. A process loads only one of the two libraries, because both are large.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

from baton.runtime.process.helper import limit_process, serve

if TYPE_CHECKING:
    from .tokenizer_core import LocalCore

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def renderer() -> Answer:
    """Load the template library. The answers are ``{"text"}``, ``{"limit"}`` or ``{"error"}``."""
    from .render_errors import RenderError, RenderLimit
    from .sandbox import render

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            variables, limit = request["variables"], request["max_output"]
            return {"text": render(request["template"], variables, limit)}
        except RenderLimit as error:
            return {"limit": str(error)}
        except RenderError as error:
            return {"error": str(error)}

    return answer


def tokenizer() -> Answer:
    """Load the tokenizer library. The first request loads the file.

    The answer to a request that fails is ``{"error"}``.
    """
    from .stated_tokens import StatedToken
    from .tokenizer_core import LocalCore, TokenizerFailed

    core: LocalCore | None = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal core
        try:
            if "load" in request:
                core = LocalCore(request["load"], [StatedToken(*one) for one in request["stated"]])
                return _facts(core)
            if core is None:
                return {"error": "no tokenizer is loaded"}
            return _call(core, request)
        except (TokenizerFailed, UnicodeEncodeError, TypeError, MemoryError) as error:
            return {"error": str(error) or type(error).__name__}

    return answer


def _facts(core: LocalCore) -> dict[str, Any]:
    added = [[one.index, one.content, one.special] for one in core.added_tokens]
    return {"vocab_size": core.vocab_size, "byte_level": core.is_byte_level, "added": added}


def _call(core: LocalCore, request: dict[str, Any]) -> dict[str, Any]:
    if "encode" in request:
        return {"ids": core.encode(request["encode"], add_special_tokens=request["special"])}
    if "decode" in request:
        return {"text": core.decode(request["decode"], skip_special_tokens=request["skip"])}
    if "token" in request:
        return {"id": core.token_to_id(request["token"])}
    return {"token": core.id_to_token(request["id"])}


def main(kind: str, memory_bytes: str, cpu_seconds: str) -> None:
    """Entry point."""
    answer = {"template": renderer, "tokenizer": tokenizer}[kind]()
    limit_process(int(memory_bytes))
    serve(lambda request: json.dumps(answer(json.loads(request))).encode(), int(cpu_seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
