"""The output items of one answer of ``/v1/responses``, and the events of their stream. Pure.

Items come one after another: reasoning, a message, a call of a function. At most the last one is
open. Invariant: the items do not depend on how the answer is divided into outputs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from .reader import MessageReader
from .tool_calls import CallArguments, CallBegin, CallBroken, Event, Reasoning, Text

Record = dict[str, Any]
"""The log-probability of a token, as chat completions show it."""
Shown = tuple[str, dict[str, Any]]
"""An event of the stream: its type and its fields, without the number."""

_MESSAGE: Final = "message"
_REASONING: Final = "reasoning"
_CALL: Final = "function_call"
_PREFIXES = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc"}
_STREAMS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
}


@dataclass(slots=True)
class _Item:
    """One output item. ``texts``: parts of its text, or of the JSON text of a call's arguments."""

    kind: str
    id: str
    function: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    status: str = "in_progress"

    def shown(self) -> dict[str, Any]:
        """Return the item as JSON, with its parts so far."""
        found: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        parts = [self.part()] if self.texts or self.status != "in_progress" else []
        if self.kind == _CALL:
            arguments = "".join(self.texts)
            return {
                **found,
                "call_id": self.call_id,
                "name": self.function,
                "arguments": arguments,
            }
        if self.kind == _REASONING:
            return {**found, "summary": [], "content": parts}
        return {**found, "role": "assistant", "content": parts}

    def part(self) -> dict[str, Any]:
        """Return the part of content that a message or a reasoning item consists of."""
        text = "".join(self.texts)
        if self.kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.records}


class ResponseItems:
    """Grows with the outputs of one answer.

    ``name``: the answer's id. ``reader``: finds reasoning and calls; None if all text is content.
    ``streamed``: events that were returned cannot be taken back, so a call that turns out to be
    malformed stays, with the status ``incomplete``; otherwise it becomes text.
    """

    def __init__(self, name: str, reader: MessageReader | None, *, streamed: bool) -> None:
        self._name = name
        self._reader = reader
        self._streamed = streamed
        self._items: list[_Item] = []
        self._pending: list[Record] = []  # of tokens whose text has not been shown yet
        self._tokens = 0
        self._thought = False
        self._answered = False
        self.reasoning_tokens = 0
        """Number of tokens before the first content or call, if the answer has reasoning."""

    def push(self, text: str, tokens: int, records: Iterable[Record] = ()) -> list[Shown]:
        """Add the text of ``tokens`` tokens and return the events that are certain now."""
        self._pending += records
        if self._reader is not None:
            found = self._take(self._reader.push(text))
            self._tokens += tokens
            if self._thought and not self._answered:
                self.reasoning_tokens = self._tokens
            return found
        if not text and not self._pending:
            return []
        events = self._opened(_MESSAGE)
        events.append(self._text_delta(text, self._pending))
        self._pending = []
        return events

    def finish(self, *, cut: bool) -> list[Shown]:
        """Return the last events. ``cut``: the answer ends at a maximum length."""
        events = [] if self._reader is None else self._take(self._reader.finish(cut=cut))
        if not self._items:
            events += self._opened(_MESSAGE)
        return events + self._closed("incomplete" if cut else "completed")

    def shown(self) -> list[dict[str, Any]]:
        """Return all items as JSON."""
        return [item.shown() for item in self._items]

    def _take(self, events: Iterable[Event]) -> list[Shown]:
        shown: list[Shown] = []
        for event in events:
            match event:
                case Text(text):
                    shown += self._opened(_MESSAGE)
                    shown.append(self._text_delta(text, self._records_of(text)))
                case Reasoning(text):
                    shown += self._opened(_REASONING)
                    shown.append(self._delta(text, content_index=0))
                    self._thought = True
                case CallBegin(function):
                    shown += self._closed()
                    shown += self._opened(_CALL, function)
                case CallArguments(text):
                    shown.append(self._delta(text))
                case CallBroken(text):
                    shown += self._broken(text)
            self._answered = self._answered or not isinstance(event, Reasoning)
        return shown

    def _records_of(self, text: str) -> list[Record]:
        """Return the last records whose tokens cover the text; the others are not of the text."""
        found: list[Record] = []
        missing = len(text.encode("utf-8", "replace"))
        while self._pending and missing > 0:
            record = self._pending.pop()
            missing -= len(record["bytes"])
            found.append(record)
        self._pending = []
        return found[::-1]

    def _broken(self, text: str) -> list[Shown]:
        if self._streamed:
            return self._closed("incomplete")
        self._items.pop()
        if self._items and self._items[-1].kind == _MESSAGE:
            self._items[-1].status = "in_progress"
        return self._take([Text(text)])

    def _opened(self, kind: str, function: str = "") -> list[Shown]:
        """Open an item unless one of this kind is open, and return its first events."""
        last = self._items[-1] if self._items else None
        if last is not None and last.kind == kind and last.status == "in_progress":
            return []
        shown = self._closed()
        number = len(self._items)
        name = f"{_PREFIXES[kind]}-{self._name}" + (f"-{number}" if number else "")
        item = _Item(kind, name, function)
        self._items.append(item)
        if kind == _CALL:
            item.call_id = f"call_{secrets.token_hex(12)}"
        shown.append(("response.output_item.added", {"output_index": number, "item": item.shown()}))
        if kind != _CALL:
            place = self._place(content_index=0)
            shown.append(("response.content_part.added", {**place, "part": item.part()}))
        return shown

    def _text_delta(self, text: str, records: list[Record]) -> Shown:
        self._items[-1].records += records
        return self._delta(text, content_index=0, logprobs=records)

    def _delta(self, text: str, **more: Any) -> Shown:
        item = self._items[-1]
        item.texts.append(text)
        return f"{_STREAMS[item.kind]}.delta", {**self._place(**more), "delta": text}

    def _closed(self, status: str = "completed") -> list[Shown]:
        """Close the last item if it is open, and return its last events."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return []
        item.status = status
        kind = f"{_STREAMS[item.kind]}.done"
        end = ("response.output_item.done", {**self._index(), "item": item.shown()})
        if item.kind == _CALL:
            whole = {"name": item.function, "arguments": "".join(item.texts)}
            return [(kind, {**self._place(), **whole}), end]
        part = item.part()
        place = self._place(content_index=0)
        whole = {"text": part["text"]}
        if item.kind == _MESSAGE:
            whole["logprobs"] = part["logprobs"]
        return [
            (kind, {**place, **whole}),
            ("response.content_part.done", {**place, "part": part}),
            end,
        ]

    def _place(self, **more: Any) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, **self._index(), **more}

    def _index(self) -> dict[str, int]:
        return {"output_index": len(self._items) - 1}
