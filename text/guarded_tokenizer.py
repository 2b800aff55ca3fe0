"""An untrusted tokenizer in a killable process, for files outside :mod:`.plain_tokenizers`.

Whatever the file does, every call returns or raises TokenizerFailed within its time limit. After
an exceeded limit the process is replaced. Thread-safe: calls run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .guarded import GuardedProcess
from .tokenizer_core import AddedToken, TokenizerFailed

TIMEOUT_S = 10.0
CPU_S = 8
MEMORY_BYTES = 2 << 30
"""Limit of the address space; the largest vocabularies in use need a quarter of it to load."""


class GuardedTokenizer(GuardedProcess):
    """A :class:`.tokenizer_core.TokenizerCore` whose library runs in another process."""

    def __init__(
        self,
        text: str,
        timeout: float = TIMEOUT_S,
        cpu_seconds: int = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Load a ``tokenizer.json``. Raises TokenizerFailed."""
        super().__init__("tokenizer_worker", "the tokenizer", timeout, cpu_seconds, memory_bytes)
        self.first_request = {"load": text}
        facts = self._call(None)
        self.vocab_size = int(facts["vocab_size"])
        self.is_byte_level = bool(facts["byte_level"])
        self.added_tokens = [AddedToken(*one) for one in facts["added"]]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        text.encode()  # raises for a lone surrogate, as the library does
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
