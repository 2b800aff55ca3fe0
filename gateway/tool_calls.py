"""Finds calls of functions in the text of an answer, as it arrives. Pure.

Invariants: the events of a text do not depend on how it is divided into pushes, once neighbouring
texts and arguments are joined. Text without a complete call comes back unchanged. Whitespace
beside a call is dropped.

The arguments of a call are passed on as they arrive, after the name of a known function and the
first bracket. If the rest is not JSON, :class:`CallBroken` follows, with the whole text of the
call: a reader that still can takes the call back and shows the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass

from .json_scanner import CallScanner, Malformed

MAX_CALLS = 64
"""Maximum number of calls in an answer; a further one is text."""


@dataclass(slots=True, frozen=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(slots=True, frozen=True)
class CallBegin:
    """A call of a known function has begun."""

    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """A part of the arguments of the call that began last, as JSON text."""

    text: str


@dataclass(slots=True, frozen=True)
class CallBroken:
    """The call that began last is malformed; ``text``: its text so far, with its tag."""

    text: str


Event = Text | Reasoning | CallBegin | CallArguments | CallBroken


class CallParser(ABC):
    """Divides the text of an answer into texts and calls.

    ``names``: the known functions; a call of another one is text.
    """

    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._rest = ""  # text that no state has read yet
        self._raw: list[str] = []  # text of the call, from the whitespace before it on
        self._call: CallScanner | None = None
        self._began = False
        self._waiting = False  # the rest is undecided until more text arrives
        self.calls = 0
        """Number of calls that began."""

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain after ``text``."""
        self._rest += text
        self._waiting = False
        events: list[Event] = []
        while self._rest and not self._waiting:
            events += self._outside() if self._call is None else self._inside(self._call)
        return events

    def finish(self, *, cut: bool) -> list[Event]:
        """Return the last events. ``cut``: the answer ends at a maximum length.

        A call that is cut stays as it is; a call that ends without its last bracket is broken.
        """
        events: list[Event] = []
        if self._call is not None and not (cut and self._began):
            events = self._broken()
        return [*events, *_texts(self._last_text())]

    @abstractmethod
    def _outside(self) -> list[Event]:
        """Read text outside of calls from ``_rest``, and begin a call if there is one.

        Sets ``_waiting`` if more text is needed to continue.
        """

    @abstractmethod
    def _last_text(self) -> str:
        """Return the text that was held back."""

    @abstractmethod
    def _call_ended(self) -> None:
        """Continue after a complete call."""

    @abstractmethod
    def _call_failed(self) -> None:
        """Continue after a malformed call."""

    def _begin(self, raw: str) -> None:
        """Begin to read a call; ``raw``: the text that led to it."""
        self._raw = [raw]
        self._call, self._began = CallScanner(self.argument_keys), False

    def _inside(self, call: CallScanner) -> list[Event]:
        """Read the text of a call up to its end or its first fault."""
        events: list[Event] = []
        for at, char in enumerate(self._rest):
            try:
                call.feed(char)
                events += self._news(call)
            except Malformed:
                self._raw.append(self._rest[:at])
                self._rest = self._rest[at:]
                return [*events, *self._arguments(call), *self._broken()]
            if call.done:
                events += self._arguments(call)
                self._call, self._raw, self._rest = None, [], self._rest[at + 1 :]
                self._call_ended()
                return events
        self._raw.append(self._rest)
        self._rest = ""
        return [*events, *self._arguments(call)]

    def _news(self, call: CallScanner) -> list[Event]:
        """Return the call's begin if it is known now. Raises Malformed without a begin."""
        if self._began:
            return []
        if call.name is not None and (call.name not in self._names or self.calls >= MAX_CALLS):
            raise Malformed("no known function")
        if call.name is None or not (call.began or call.done):
            if call.done:
                raise Malformed("a call without a name")
            return []
        self._began = True
        self.calls += 1
        begin: list[Event] = [CallBegin(call.name)]
        return begin if call.began else [*begin, CallArguments("{}")]

    def _arguments(self, call: CallScanner) -> list[Event]:
        text = call.take() if self._began else ""
        return [CallArguments(text)] if text else []

    def _broken(self) -> list[Event]:
        raw, self._raw, self._call = "".join(self._raw), [], None
        self._call_failed()
        return [CallBroken(raw)] if self._began else _texts(raw)


class HermesParser(CallParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, anywhere in the text."""

    begin_tag = "<tool_call>"
    end_tag = "</tool_call>"

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names)
        self._after_call = False  # whitespace and the end tag may follow
        self._strip = False  # no text since the last call
        self._opened = ""  # a tag, and whitespace beside it, before the bracket of a call

    def _outside(self) -> list[Event]:
        if self._after_call:
            self._skip_end_tag()
            return []
        if self._opened:
            return self._before_bracket()
        text = self._rest
        at = text.find(self.begin_tag)
        if at >= 0:
            end = at + len(self.begin_tag)
            shown = text[:at].rstrip()
            self._opened, self._rest = text[len(shown) : end], text[end:]
            return self._shown(shown)
        safe = len(text) - held_prefix(text, self.begin_tag)
        safe = len(text[:safe].rstrip())
        self._rest, self._waiting = text[safe:], True
        return self._shown(text[:safe])

    def _shown(self, text: str) -> list[Event]:
        if self._strip:
            text = text.lstrip()
        self._strip = self._strip and not text
        return _texts(text)

    def _before_bracket(self) -> list[Event]:
        stripped = self._rest.lstrip()
        space = len(self._rest) - len(stripped)
        self._opened, self._rest = self._opened + self._rest[:space], stripped
        if not stripped:
            return []
        opened, self._opened = self._opened, ""
        if stripped[0] != "{":
            return self._shown(opened)
        self._begin(opened)
        return []

    def _skip_end_tag(self) -> None:
        """Drop the end tag after a call."""
        stripped = self._rest.lstrip()
        if held_prefix(stripped, self.end_tag) == len(stripped):
            self._waiting = True
        else:
            self._after_call = False
            self._rest = stripped.removeprefix(self.end_tag)

    def _call_ended(self) -> None:
        self._after_call = self._strip = True

    def _call_failed(self) -> None:
        self._strip = False

    def _last_text(self) -> str:
        text, self._rest, self._opened = self._opened + self._rest, "", ""
        if self._after_call:
            return ""  # whitespace and the beginning of an end tag
        return text.lstrip() if self._strip else text


class LlamaParser(CallParser):
    """``{"name": …, "parameters": {…}}``, also several with ``;`` between, and nothing before."""

    prefix = "<|python_tag|>"

    def __init__(self, names: Container[str]) -> None:
        super().__init__(names)
        self._plain = False  # no more calls can follow

    def _outside(self) -> list[Event]:
        if self._plain:
            text, self._rest = self._rest, ""
            return _texts(text)
        text = self._rest.lstrip(" \t\r\n;," if self.calls else " \t\r\n")
        bare = text.removeprefix(self.prefix).lstrip()
        self._waiting = not bare or held_prefix(text, self.prefix) == len(text)
        if self._waiting:
            return []
        if bare[0] == "{":
            self._begin(self._rest[: len(self._rest) - len(bare)])
            self._rest = bare
            return []
        self._plain = True
        self._rest = text if self.calls else self._rest
        return []

    def _call_ended(self) -> None:
        pass

    def _call_failed(self) -> None:
        self._plain = True

    def _last_text(self) -> str:
        text, self._rest = self._rest, ""
        return text.strip(" \t\r\n;,") if self.calls else text


PARSERS: dict[str, Callable[[Container[str]], CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
}
"""Parsers by the name of their format."""


def held_prefix(text: str, tag: str) -> int:
    """Return the length of the longest end of ``text`` that a ``tag`` may begin with."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)


def _texts(text: str) -> list[Event]:
    return [Text(text)] if text else []
