"""Matchers of requests on their way here: asked for with the blocks, there when the request is.

Invariant: at most one matcher is compiled per (request, attempt), and none for a request whose
grant has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..engine.grammar import CompileGrammar, DropGrammar, GrammarTask, follow
from ..proto.errors import BatonError
from ..proto.matching import Matcher
from ..runtime.attempts import Key


@dataclass(slots=True)
class _Entry:
    task: GrammarTask
    result: Matcher | BatonError | None = None


class Grammars:
    """Matchers by (request, attempt), wanted, compiling or ready."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def want(self, key: Key, task: GrammarTask) -> list[CompileGrammar | DropGrammar]:
        """Have it compiled, unless what was asked for before leads there."""
        entry = self._entries.get(key)
        if entry is not None and entry.task.leads_to(task):
            return []
        self._entries[key] = _Entry(task)
        dropped = [] if entry is None else [DropGrammar(key)]
        return [*dropped, CompileGrammar(key, task)]

    def done(self, key: Key, result: Matcher | BatonError) -> bool:
        """The compile thread's answer; False when nobody waits for it."""
        entry = self._entries.get(key)
        if entry is None or entry.result is not None:
            return False
        entry.result = result
        return True

    def take(self, key: Key, task: GrammarTask) -> Matcher | BatonError | None:
        """The matcher behind the task's tokens, or why there is none; None while it compiles."""
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
        """Forget what nobody waits for any more."""
        gone = [key for key in self._entries if not wanted(key)]
        dropped = [DropGrammar(key) for key in gone if self._entries[key].result is None]
        for key in gone:
            del self._entries[key]
        return dropped
