"""Divides the text of an answer into reasoning and content, as it arrives. Pure.

Invariant: the two texts do not depend on how the answer is divided into pushes. Whitespace beside
the tags is dropped. Text without tags comes back unchanged.
"""

from __future__ import annotations

from enum import Enum

from .tool_calls import held_prefix

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    START = "before anything but whitespace"
    REASONING = "inside the tags"
    AFTER = "only whitespace since the reasoning"
    CONTENT = "content"


class ReasoningSplitter:
    """Divides ``<think>reasoning</think>content``.

    ``is_open``: the prompt ends with the first tag.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._state = _State.REASONING if is_open else _State.START
        self._held = ""
        self._began = False  # some reasoning was returned

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that are certain after ``text``."""
        if self._state is _State.CONTENT:
            return "", text
        self._held += text
        if self._state is _State.START:
            self._find_open()
        reasoning = self._find_close() if self._state is _State.REASONING else ""
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.CONTENT
        if self._state is not _State.CONTENT:
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """Return the last reasoning and content."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            return held if self._began else held.lstrip(), ""
        return "", held

    def _find_open(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._state, self._held = _State.REASONING, text[len(OPEN) :]
        elif text and held_prefix(text, OPEN) < len(text):
            self._state = _State.CONTENT

    def _find_close(self) -> str:
        """Return the reasoning up to the end tag, or up to what may become the end."""
        text = self._held if self._began else self._held.lstrip()
        at = text.find(CLOSE)
        if at >= 0:
            shown, self._held = text[:at].rstrip(), text[at + len(CLOSE) :]
            self._state = _State.AFTER
            return shown
        shown = text[: len(text) - held_prefix(text, CLOSE)].rstrip()
        self._held = text[len(shown) :]
        self._began = self._began or bool(shown)
        return shown
