"""Stop strings: finds them in streamed text and derives token sequences that always spell them.

Many tokenizations can spell a stop string, so the text decides (:class:`StopMatcher`, in the
client). :func:`stop_sequences` lets a worker end most requests at the right token by itself. Each
of these sequences always decodes to its stop string, so a worker that stops there is never wrong.
A stop string spelled by other tokens is found in the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from baton.proto.errors import InputError
from baton.proto.limits import MAX_EOS_SEQUENCE_TOKENS, MAX_STOP_CHARS, MAX_STOP_SEQUENCES

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StopMatcher:
    """Cuts streamed text at the first complete stop string.

    The result does not depend on how the text is divided into pushes. The match that ends first
    wins; if several end together, the longest wins. Text that may still become
    a stop string is held back: at most one character less than the longest stop string.

    Args:
        stop: up to 16 strings of 1 to 128 characters.

    Raises:
        InputError: a stop string is empty or too long, or there are too many stop strings.

    """

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._stop = check_stop(stop)
        self._prefixes = {text[:n] for text in self._stop for n in range(1, len(text))}
        self._first = {text[0] for text in self._stop}
        self._reach = max((len(text) - 1 for text in self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain after ``text``; "" after a stop string matched."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        self._held += text
        if (found := self._first_match()) is not None:
            end, self.matched = found
            return self._give(end - len(self.matched), keep=False)
        return self._give(self._safe_length(), keep=True)

    def finish(self) -> str:
        """Return the held-back text, which can no longer become a stop string; "" after a match."""
        return self._give(len(self._held), keep=False)

    def _first_match(self) -> tuple[int, str] | None:
        found = []
        for text in self._stop:
            start = self._held.find(text)
            if start >= 0:
                found.append((start + len(text), start, text))
        if not found:
            return None
        end, _, text = min(found)
        return end, text

    def _safe_length(self) -> int:
        held = self._held
        for start in range(max(0, len(held) - self._reach), len(held)):
            if held[start] in self._first and held[start:] in self._prefixes:
                return start
        return len(held)

    def _give(self, length: int, *, keep: bool) -> str:
        given, self._held = self._held[:length], self._held[length:] if keep else ""
        return given


def check_stop(stop: Iterable[str]) -> list[str]:
    """Return the stop strings without duplicates.

    Raises:
        InputError: not 0 to 16 strings of 1 to 128 characters.

    """
    if isinstance(stop, str):
        stop = (stop,)
    texts = list(dict.fromkeys(stop))
    if len(texts) > MAX_STOP_SEQUENCES:
        raise InputError(f"at most {MAX_STOP_SEQUENCES} stop strings allowed, not {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InputError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return texts


def stop_sequences(tokenizer: Tokenizer, stop: Iterable[str]) -> list[list[int]]:
    """Return token sequences at which a worker may stop without seeing the text.

    Every stop string that is an added token has a sequence. In byte-level vocabularies the other
    stop strings have one too, because there a token has the same text everywhere. Other
    vocabularies spell a text differently at the start of a word and inside, so they have none.
    """
    sequences = []
    for text in check_stop(stop):
        if text in tokenizer.added_tokens:
            sequences.append([tokenizer.added_tokens[text]])
        elif tokenizer.is_byte_level:
            ids = tokenizer.encode(text, add_special_tokens=False).tolist()
            same = b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
            if same and len(ids) <= MAX_EOS_SEQUENCE_TOKENS:
                sequences.append(ids)
    return sequences
