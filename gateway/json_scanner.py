"""Checks JSON text character by character, so that its parts can be used before its end. Pure."""

from __future__ import annotations

import re
from enum import Enum

from baton.proto.limits import MAX_JSON_SCHEMA_DEPTH

_SPACE = " \t\r\n"
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzE0123456789.+-")
_MAX_WORD_CHARS = 1024
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(ValueError):
    """The text is not JSON, or not of the expected shape."""


class _Want(Enum):
    """The next part of the text."""

    VALUE = "value"
    FIRST_VALUE = "value or ]"
    FIRST_KEY = "key or }"
    KEY = "key"
    COLON = ":"
    NEXT = ", or the end"


class JsonScanner:
    """Checks the text of one JSON value. Subclasses learn where keys and values begin and end.

    ``depth``: number of open brackets. ``done``: the value is complete, which is known of an
    object, array or string at its last character.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.done = False
        self._open: list[str] = []
        self._want = _Want.VALUE
        self._word = ""
        self._in_string = False
        self._escape = 0  # missing characters of an escape; -1: the character that names it
        self._is_key = False

    def feed(self, char: str) -> None:
        """Check the next character. Raises Malformed."""
        if self.done:
            raise Malformed("text after the value")
        if self._in_string:
            self._string(char)
            return
        if self._word:
            if char in _WORD_CHARS and len(self._word) < _MAX_WORD_CHARS:
                self._word += char
                return
            self._end_word()
        if char not in _SPACE:
            self._mark(char)

    # ------------------------------------------------------------------ for subclasses

    def value_begins(self, char: str) -> None:
        """Handle the first character of a value; ``depth`` is that of the value's container."""

    def value_ends(self) -> None:
        """Handle the end of a value, at its last character or, for a number, after it."""

    def key_begins(self) -> None:
        """Handle the first character of a key."""

    def key_ends(self) -> None:
        """Handle the last character of a key."""

    # ------------------------------------------------------------------ inner states

    def _mark(self, char: str) -> None:
        """Handle a character outside of strings, numbers and whitespace."""
        want = self._want
        if char in "}]" and want in (_Want.NEXT, _Want.FIRST_KEY, _Want.FIRST_VALUE):
            self._close(char)
        elif want in (_Want.VALUE, _Want.FIRST_VALUE):
            self._begin_value(char)
        elif want in (_Want.KEY, _Want.FIRST_KEY) and char == '"':
            self._in_string = self._is_key = True
            self.key_begins()
        elif want is _Want.COLON and char == ":":
            self._want = _Want.VALUE
        elif want is _Want.NEXT and char == "," and self._open:
            self._want = _Want.KEY if self._open[-1] == "{" else _Want.VALUE
        else:
            raise Malformed(f"{char!r} where {want.value} was expected")

    def _begin_value(self, char: str) -> None:
        if char not in '{["' and char not in _WORD_CHARS:
            raise Malformed(f"{char!r} begins no value")
        self.value_begins(char)
        if char in "{[":
            if self.depth >= MAX_JSON_SCHEMA_DEPTH:
                raise Malformed("nested too deep")
            self._open.append(char)
            self.depth += 1
            self._want = _Want.FIRST_KEY if char == "{" else _Want.FIRST_VALUE
        elif char == '"':
            self._in_string = True
        else:
            self._word = char

    def _close(self, char: str) -> None:
        if not self._open or self._open[-1] + char not in ("{}", "[]"):
            raise Malformed(f"{char!r} closes nothing")
        if self._want is (_Want.FIRST_VALUE if char == "}" else _Want.FIRST_KEY):
            raise Malformed(f"{char!r} where {self._want.value} was expected")
        self._open.pop()
        self.depth -= 1
        self._end_value()

    def _end_value(self) -> None:
        self._want = _Want.NEXT
        self.value_ends()
        self.done = not self._open

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not _WORD.fullmatch(word):
            raise Malformed(f"{word[:20]!r} is no value")
        self._end_value()

    def _string(self, char: str) -> None:
        if self._escape > 0:
            if char not in _HEX:
                raise Malformed("a wrong escape")
            self._escape -= 1
        elif self._escape < 0:
            if char not in '"\\/bfnrtu':
                raise Malformed("a wrong escape")
            self._escape = 4 if char == "u" else 0
        elif char == "\\":
            self._escape = -1
        elif char == '"':
            self._in_string = False
            if self._is_key:
                self._is_key = False
                self._want = _Want.COLON
                self.key_ends()
            else:
                self._end_value()
        elif char < " ":
            raise Malformed("a control character in a string")


class CallScanner(JsonScanner):
    """Reads one call: an object with a name and with arguments, in any order, and other keys.

    ``name``: the function's name; None while it is unknown. ``arguments``: the text of the
    arguments that was scanned since :meth:`take`; ``began``: the arguments have begun.
    """

    def __init__(self, argument_keys: tuple[str, ...]) -> None:
        super().__init__()
        self.name: str | None = None
        self.began = False
        self._argument_keys = argument_keys
        self._arguments: list[str] = []
        self._taking = False
        self._word_of: list[str] | None = None  # a key, or the value of "name"
        self._key = ""

    def feed(self, char: str) -> None:
        """Check the next character. Raises Malformed, also for an object that is not a call."""
        was_taking, was_word = self._taking, self._word_of
        super().feed(char)
        if was_taking or self._taking:
            self._arguments.append(char)
        if self._word_of is not None and self._word_of is was_word:
            self._word_of.append(char)

    def take(self) -> str:
        """Return the text of the arguments since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def key_begins(self) -> None:
        """Collect a key of the object itself."""
        if self.depth == 1:
            self._word_of = []

    def key_ends(self) -> None:
        """Remember the key."""
        if self.depth == 1:
            self._key = self._collected()

    def value_begins(self, char: str) -> None:
        """Begin the object, its name or its arguments."""
        if self.depth == 0 and char != "{":
            raise Malformed("a call is an object")
        if self.depth != 1:
            return
        if self._key == "name":
            if char != '"' or self.name is not None:
                raise Malformed("a call has one name, a text")
            self._word_of = []
        elif self._key in self._argument_keys:
            if char != "{" or self.began:
                raise Malformed("a call has one object of arguments")
            self.began = self._taking = True

    def value_ends(self) -> None:
        """End the name or the arguments."""
        if self.depth != 1:
            return
        if self._word_of is not None:
            self.name = self._collected()
        self._taking = False

    def _collected(self) -> str:
        """Return the text between the quotes: keys and names are written without escapes."""
        text, self._word_of = "".join(self._word_of or ()), None
        return text
