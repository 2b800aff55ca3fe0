"""Grammars of requests in handoff: compiled while the KV arrives, ready when the request does.

Invariant: at most one grammar is compiled per (request, attempt), and none after the request's
grant has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarTask, follow
from baton.proto.contexts.matching import Matcher
from baton.proto.errors import BatonError
from baton.worker.attempts import Key


@dataclass(slots=True)
class _Entry:
    task: GrammarTask
    result: Matcher | BatonError | None = None


class Grammars:
    """Compiled grammars (matchers) by (request, attempt): compiling or ready."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def want(self, key: Key, task: GrammarTask) -> list[CompileGrammar | DropGrammar]:
        """Compile the task's grammar, unless the compiled or compiling one leads to the task."""
        entry = self._entries.get(key)
        if entry is not None and entry.task.leads_to(task):
            return []
        self._entries[key] = _Entry(task)
        dropped = [] if entry is None else [DropGrammar(key)]
        return [*dropped, CompileGrammar(key, task)]

    def done(self, key: Key, result: Matcher | BatonError) -> bool:
        """Store a compiled grammar or its error. Return False if no request waits for it."""
        entry = self._entries.get(key)
        if entry is None or entry.result is not None:
            return False
        entry.result = result
        return True

    def take(self, key: Key, task: GrammarTask) -> Matcher | BatonError | None:
        """Return the matcher after the task's tokens, or its error; None while it compiles."""
        entry = self._entries.get(key)
        if entry is None or entry.result is None:
            return None
        del self._entries[key]
        if isinstance(entry.result, BatonError):
            return entry.result
        try:
            follow(entry.result, task.emitted[len(entry.task.emitted) :])
        except BatonError as error:
            return error
        return entry.result

    def prune(self, wanted: Callable[[Key], bool]) -> list[DropGrammar]:
        """Drop the grammars that no request waits for."""
        gone = [key for key in self._entries if not wanted(key)]
        dropped = [DropGrammar(key) for key in gone if self._entries[key].result is None]
        for key in gone:
            del self._entries[key]
        return dropped
