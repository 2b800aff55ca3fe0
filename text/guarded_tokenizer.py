"""A tokenizer that is not plain (:mod:`.plain_tokenizers`), in a process that can be killed.

Whatever its file does, every call returns or raises TokenizerFailed within its time; the process
is replaced after any limit. Thread-safe: calls take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .guarded import GuardedProcess
from .tokenizer_core import AddedToken, TokenizerFailed

TIMEOUT_S = 10.0
CPU_S = 8
MEMORY_BYTES = 2 << 30
"""Address space: the largest vocabularies in use take a quarter of it to load."""


class GuardedTokenizer(GuardedProcess):
    """A :class:`.tokenizer_core.TokenizerCore` whose library runs elsewhere."""

    def __init__(
        self,
        text: str,
        timeout: float = TIMEOUT_S,
        cpu_seconds: int = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Load a ``tokenizer.json``; raises TokenizerFailed."""
        super().__init__("tokenizer_worker", "the tokenizer", timeout, cpu_seconds, memory_bytes)
        self.first_request = {"load": text}
        facts = self._call(None)
        self.vocab_size = int(facts["vocab_size"])
        self.is_byte_level = bool(facts["byte_level"])
        self.added_tokens = [AddedToken(*one) for one in facts["added"]]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        text.encode()  # a lone surrogate raises here as it does in the library
        ids: list[int] = self._call({"encode": text, "special": add_special_tokens})["ids"]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return str(self._call({"decode": list(ids), "skip": skip_special_tokens})["text"])

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""
        found: int | None = self._call({"token": token})["id"]
        return found

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary entry of an id."""
        found: str | None = self._call({"id": index})["token"]
        return found

    def _call(self, request: dict[str, Any] | None) -> dict[str, Any]:
        reply = self.ask(request)
        if "limit" in reply or "error" in reply:
            raise TokenizerFailed(reply.get("limit") or reply["error"])
        return reply
