"""The helper process of :mod:`.guarded_tokenizer`: an untrusted tokenizer under kernel limits.

``python -m baton.text.tokenizer_worker MEMORY_BYTES CPU_SECONDS``; messages and limits as in
:mod:`.template_worker`. The first request loads the file. A failure is answered ``{"error"}``.
"""

from __future__ import annotations

import sys
from typing import Any

from .template_worker import limit_process, serve
from .tokenizer_core import LocalCore, TokenizerFailed


class TokenizerServer:
    """Answers requests for one tokenizer."""

    def __init__(self) -> None:
        self._core: LocalCore | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request: ``{"error"}`` if the library fails."""
        try:
            if "load" in request:
                return self._load(request["load"])
            if self._core is None:
                return {"error": "no tokenizer is loaded"}
            return self._call(self._core, request)
        except (TokenizerFailed, UnicodeEncodeError, TypeError, MemoryError) as error:
            return {"error": str(error) or type(error).__name__}

    def _load(self, text: str) -> dict[str, Any]:
        core = self._core = LocalCore(text)
        added = [[one.index, one.content, one.special] for one in core.added_tokens]
        return {"vocab_size": core.vocab_size, "byte_level": core.is_byte_level, "added": added}

    @staticmethod
    def _call(core: LocalCore, request: dict[str, Any]) -> dict[str, Any]:
        if "encode" in request:
            ids = core.encode(request["encode"], add_special_tokens=request["special"])
            return {"ids": ids}
        if "decode" in request:
            return {"text": core.decode(request["decode"], skip_special_tokens=request["skip"])}
        if "token" in request:
            return {"id": core.token_to_id(request["token"])}
        return {"token": core.id_to_token(request["id"])}


if __name__ == "__main__":
    limit_process(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2]), TokenizerServer().answer)
