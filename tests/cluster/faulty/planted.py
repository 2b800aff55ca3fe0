"""Exceptions planted in a process: in every n-th call of a function, or for chosen requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

EVERY = 50
HARMED = 13
"""Prompts of this many tokens raise wherever they are handled."""


class Planted(Exception):
    """Stands for any exception of Baton's own code."""


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``."""
    setattr(owner, name, make(getattr(owner, name)))


def every(owner: Any, name: str, chosen: Callable[..., bool] = lambda *_: True) -> None:
    """Raise in every 50th chosen call: by turns before and after the real work."""
    calls = itertools.count(1)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def planted(*arguments: Any, **named: Any) -> Any:
            number = next(calls) if chosen(*arguments) else 1
            if number % (2 * EVERY) == EVERY:
                raise Planted(f"before {name}")
            result = original(*arguments, **named)
            if number % (2 * EVERY) == 0:
                raise Planted(f"after {name}")
            return result

        return planted

    around(owner, name, make)


def harm(owner: Any, name: str, length: Callable[..., int]) -> None:
    """Raise for prompts of :data:`HARMED` tokens; ``length``: the prompt's, from the arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def planted(*arguments: Any, **named: Any) -> Any:
            if length(*arguments) == HARMED:
                raise Planted(name)
            return original(*arguments, **named)

        return planted

    around(owner, name, make)


def plant(role: str) -> None:
    """Plant the exceptions of one kind of process."""
    if role == "router":
        from baton.router.shell import RouterShell
        from baton.router.timers import Timers

        every(Timers, "tick")
        every(Timers, "_workers")
        every(RouterShell, "_turn")
        every(RouterShell, "_count_refused")
    elif role in ("prefill", "decode"):
        from baton.worker.events import Tick
        from baton.worker.host import WorkerHost
        from baton.worker.membership import Membership

        every(WorkerHost, "_tick")
        every(Membership, "tick")
        if role == "prefill":
            from baton.prefill_worker.core import PrefillCore as Core

            harm(Core, "_granted", lambda core, output, _now: _prompt(core, output.key))
        else:
            from baton.decode_worker.core import DecodeCore as Core

            every(Core, "_deserted")
        handler = Core.HANDLERS[Tick]
        holder = type("Holder", (), {"tick": staticmethod(handler)})
        every(holder, "tick")
        Core.HANDLERS = {**Core.HANDLERS, Tick: holder.tick}
    elif role == "gateway":
        from baton.gateway import server

        every(server, "say_alive")


def _prompt(core: Any, key: tuple[bytes, int]) -> int:
    job = core._queue.get(key)
    return 0 if job is None else len(job.assign.context.tokens)
