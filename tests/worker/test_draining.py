"""Orders to stop and to change the role, one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.runtime.process.main import EXIT_TURN
from baton.worker.host import TextHost


class DrainingHost(TextHost):
    """A host with requests that never end; ``exits`` has the codes with which it would exit."""

    def __init__(self) -> None:
        self._draining, self._drained_code, self._drain_grace_s = False, 0, 30.0
        self.timers: list[Any] = []
        self.exits: list[int] = []
        later = lambda _seconds, call: self.timers.append(call)  # noqa: E731
        self._loop = cast("Any", SimpleNamespace(call_later=later))

    def feed(self, event: object) -> None:
        pass

    def _exit(self, reason: str, code: int) -> None:
        self.exits.append(code)


@pytest.mark.parametrize(
    ("orders", "code"),
    [(["turn"], EXIT_TURN), (["drain"], 0), (["turn", "drain"], 0), (["drain", "turn"], 0)],
)
def test_an_order_to_stop_counts_more_than_one_to_change_the_role(
    orders: list[str], code: int
) -> None:
    host = DrainingHost()
    for order in orders:
        getattr(host, order)()
    assert host.turning is (code == EXIT_TURN)
    for timer in host.timers:
        timer()
    assert set(host.exits) == {code}
