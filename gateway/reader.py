"""Reads a message out of the text of an answer: its reasoning, content and calls. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .reasoning import ReasoningSplitter
from .tool_calls import CallArguments, CallBegin, CallBroken, CallParser, Event, Reasoning, Text


class MessageReader:
    """Turns text into events. ``splitter``, ``parser``: None if the text has no such parts."""

    def __init__(
        self, splitter: ReasoningSplitter | None = None, parser: CallParser | None = None
    ) -> None:
        self._splitter = splitter
        self._parser = parser

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain after ``text``."""
        if self._splitter is None:
            return self._content(text)
        reasoning, content = self._splitter.push(text)
        return [*_reasoning(reasoning), *self._content(content)]

    def finish(self, *, cut: bool) -> list[Event]:
        """Return the last events. ``cut``: the answer ends at a maximum length."""
        events: list[Event] = []
        if self._splitter is not None:
            reasoning, content = self._splitter.finish()
            events = [*_reasoning(reasoning), *self._content(content)]
        return events if self._parser is None else [*events, *self._parser.finish(cut=cut)]

    def _content(self, text: str) -> list[Event]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Text(text)] if text else []


def _reasoning(text: str) -> list[Event]:
    return [Reasoning(text)] if text else []


@dataclass(slots=True)
class Call:
    """A call of a function; ``arguments`` is JSON text."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadMessage:
    """A message as far as it was read."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add events; a broken call becomes content."""
        for event in events:
            match event:
                case Text(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(name):
                    self.calls.append(Call(name))
                case CallArguments(text):
                    self.calls[-1].arguments += text
                case CallBroken(text):
                    self.calls.pop()
                    self.content += text


def read_message(reader: MessageReader, text: str, *, cut: bool) -> ReadMessage:
    """Read a whole text."""
    message = ReadMessage()
    message.add(reader.push(text))
    message.add(reader.finish(cut=cut))
    return message
