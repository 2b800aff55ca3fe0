"""The library's tokenizer, with an interface that a separate process can also implement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .stated_tokens import StatedToken

if TYPE_CHECKING:
    import tokenizers


MAX_STATED_TOKENS = 1 << 14
"""Limit of the tokens that other files add; the library's time to add them grows as its square."""


class TokenizerFailed(Exception):
    """The library failed or exceeded a limit; the message names the cause."""


@dataclass(slots=True, frozen=True)
class AddedToken:
    """A token that the tokenizer extracts from a text before splitting the rest."""

    index: int
    content: str
    special: bool


class TokenizerCore(Protocol):
    """The interface that :class:`.tokenizer.Tokenizer` uses; methods may raise TokenizerFailed."""

    vocab_size: int
    added_tokens: list[AddedToken]
    is_byte_level: bool

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, or None."""

    def id_to_token(self, index: int) -> str | None:
        """Return the vocabulary entry of an id, or None."""

    def close(self) -> None:
        """Release resources."""


class LocalCore:
    """The library, running in this process."""

    def __init__(self, text: str, stated: Sequence[StatedToken] = ()) -> None:
        """Read a ``tokenizer.json`` and add the ``stated`` tokens. Raises TokenizerFailed."""
        # A prompt is tokenized by one thread; the library's own threads would also warn on fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        with typed_failures():
            core: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text)
            core.no_truncation()
            core.no_padding()
            _add(core, stated)
            self._core = core
            self.vocab_size = int(core.get_vocab_size(with_added_tokens=True))
            decoder = core.decoder
            self.is_byte_level = decoder is not None and _is_byte_level(decoder.__getstate__())
            self.added_tokens = [
                AddedToken(index, token.content, token.special)
                for index, token in core.get_added_tokens_decoder().items()
            ]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        with typed_failures():
            return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        with typed_failures():
            return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""
        found: int | None = self._core.token_to_id(token)
        return found

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary entry of an id."""
        found: str | None = self._core.id_to_token(index)
        return found

    def close(self) -> None:
        """Do nothing: this core holds no resources."""


def _add(core: tokenizers.Tokenizer, stated: Sequence[StatedToken]) -> None:
    """Add the tokens that the tokenizer lacks or has with other flags."""
    import tokenizers

    known = {
        token.content: (
            token.single_word, token.lstrip, token.rstrip, token.normalized, token.special
        )
        for token in core.get_added_tokens_decoder().values()
    }  # fmt: skip
    fresh = [token for token in stated if known.get(token.content) != token[2:]]
    if len(fresh) > MAX_STATED_TOKENS:
        raise TokenizerFailed(
            f"other files add {len(fresh)} tokens, the limit is {MAX_STATED_TOKENS}"
        )
    made = []
    for content, _, single_word, lstrip, rstrip, normalized, special in fresh:
        flags = {"single_word": single_word, "lstrip": lstrip, "rstrip": rstrip}
        flags |= {"normalized": normalized, "special": special}
        made.append(tokenizers.AddedToken(content, **flags))
    core.add_tokens(made)


def _is_byte_level(state: bytes) -> bool:
    """True if a decoder, given as JSON, joins the bytes of the tokens and does nothing else."""
    decoder = json.loads(state)
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    return kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}


@contextmanager
def typed_failures() -> Iterator[None]:
    """Convert the library's exceptions and panics into TokenizerFailed.

    A panic does not derive from Exception, so ordinary handlers would miss it. Errors about
    invalid text pass through: they are the caller's.
    """
    try:
        yield
    except (UnicodeEncodeError, TypeError):
        raise
    except Exception as error:
        raise TokenizerFailed(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed(f"the tokenizers library failed: {error}") from None
