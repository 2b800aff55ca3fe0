"""Converts tokens to text as they arrive, with constant work per token.

Invariant of :class:`IncrementalDetokenizer`: the concatenated deltas are the decoded text of all
tokens pushed so far (up to a stop string), except text that is not certain yet: the bytes of an
unfinished character and the start of a possible stop string.

Byte-level vocabularies are decoded exactly, byte by byte. Others (Metaspace, byte fallback,
WordPiece) use the tokenizer's own decoder over a short window. There, the result can differ from
decoding all tokens at once in one case. Byte tokens that form invalid UTF-8 change the text of the
whole run of byte tokens around them, but characters of that run may have been returned already.
"""

from __future__ import annotations

from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from typing import NamedTuple, Protocol

from .stop import StopMatcher
from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextDelta(NamedTuple):
    """The text added by one push.

    Attributes:
        text: new text, possibly empty.
        stopped: True if a stop string was found; no more text follows.
        stop: the stop string that was found.
        num_tokens: number of pushed tokens that were used; tokens after a stop string are not.

    """

    text: str
    stopped: bool = False
    stop: str | None = None
    num_tokens: int = 0


class IncrementalDetokenizer:
    """The text of one growing answer.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the text.

    """

    __slots__ = ("_decode", "_decoder", "_matcher", "_skipped")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._skipped = tokenizer.special_ids
        decoder = _ByteDecoder if tokenizer.is_byte_level else _WindowDecoder
        self._decoder: _Decoder = decoder(tokenizer)
        self._decode = self._decoder.push
        self._matcher = StopMatcher(stop) if stop else None

    @property
    def stops(self) -> bool:
        """Whether a stop string may end the text."""
        return self._matcher is not None

    def push_all(self, tokens: Sequence[int]) -> str:
        """As :meth:`push`, without stop strings: return the text of all tokens."""
        skipped = self._skipped
        if len(tokens) == 1:
            token = tokens[0]
            return "" if token in skipped else self._decode(token)
        return "".join([self._decode(token) for token in tokens if token not in skipped])

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """Add tokens and return the text that became certain."""
        matcher, decode, skipped = self._matcher, self._decode, self._skipped
        if matcher is None:
            return TextDelta(self.push_all(tokens), num_tokens=len(tokens))
        parts, used = [], 0
        for token in tokens:
            if matcher.matched is not None:
                break
            used += 1
            if token not in skipped:
                parts.append(matcher.push(decode(token)))
        return self._delta("".join(parts), used)

    def finish(self) -> TextDelta:
        """Return the held-back text at the end; an unfinished character becomes U+FFFD."""
        text = self._decoder.finish()
        if self._matcher is None:
            return TextDelta(text)
        text = self._matcher.push(text)
        return self._delta(text + self._matcher.finish(), 0)

    def _delta(self, text: str, used: int) -> TextDelta:
        stop = None if self._matcher is None else self._matcher.matched
        return TextDelta(text, stop is not None, stop, used)


class _Decoder(Protocol):
    """Decodes token by token; unfinished characters are held back until ``finish``."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """Byte-level vocabularies: an incremental UTF-8 decoder over the bytes of the tokens."""

    __slots__ = ("_inside", "_texts", "_token_bytes", "_utf8")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._texts = tokenizer.whole_texts
        self._utf8 = Utf8Decoder("replace")
        self._inside = False  # an unfinished character has begun

    def push(self, token: int) -> str:
        if not self._inside and (text := self._texts.get(token)) is not None:
            return text
        content = self._token_bytes(token)
        text, inside = self._utf8.decode(content), self._inside
        self._inside = bool(self._utf8.buffer)
        if not inside and not self._inside:
            self._texts[token] = text
        return text

    def finish(self) -> str:
        self._inside = False
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Any vocabulary: the tokenizer's decoder over the last tokens; returns the difference.

    ``_window`` holds tokens whose text has been returned (``_shown`` is that text), then up to
    ``_MAX_PENDING`` tokens whose text ends in U+FFFD and may still be an unfinished
    character. The first of these may also end the text before, which is returned. When the window
    gets long, it restarts with its last few tokens.
    """

    _LONGEST = 16
    _CONTEXT = 4  # enough for a decoder that looks at the previous token or strips the first token
    _MOST_CONTEXT = 7  # used if the shorter context would begin inside a character
    _MAX_PENDING = 3  # an unfinished UTF-8 character has at most three bytes

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._shown = ""
        self._pending = 0

    def push(self, token: int) -> str:
        self._window.append(token)
        self._pending += 1
        text = self._text(self._window)
        if not text.endswith(_REPLACEMENT) or self._pending > self._MAX_PENDING:
            return self._show(text)
        certain = text.rstrip(_REPLACEMENT)
        if len(certain) <= len(self._shown) or not certain.startswith(self._shown):
            return ""
        delta = self._show(certain)
        self._pending = 1  # the character that this token begins
        return delta

    def finish(self) -> str:
        return self._show(self._text(self._window)) if self._pending else ""

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=False)

    def _show(self, text: str) -> str:
        if text.startswith(self._shown):
            delta = text[len(self._shown) :]
        else:  # an invalid byte changed the text of its run, which was already returned
            delta = self._text(self._window[-self._pending :])
        self._shown, self._pending = text, 0
        if len(self._window) > self._LONGEST:
            self._start_over()
        return delta

    def _start_over(self) -> None:
        held = len(self._text(self._window)) - len(self._shown)  # an unfinished character
        length = self._CONTEXT
        text = self._text(self._window[-length:])
        while _REPLACEMENT in text[: len(text) - held] and length < self._MOST_CONTEXT:
            length += 1
            text = self._text(self._window[-length:])
        self._window, self._shown = self._window[-length:], text[: len(text) - held]
