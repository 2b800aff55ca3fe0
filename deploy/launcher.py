"""The seam between the controller and whatever starts processes: this machine, or Ray.

A *member* is one process of the cluster (``router``, ``prefill-0``, ``decode-3``). The backend
starts it by the same command line wherever it is (:mod:`.processes`) and starts it again when it
crashes, after growing waits and however often; what is wanted is the controller's to decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from .processes import ProcessSpec
    from .report import ClusterReport

ROUTER, PREFILL, DECODE = "router", "prefill", "decode"
POOLS = (PREFILL, DECODE)
"""The roles whose number of members can change while the cluster runs."""


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One member as it is to be started: ``process`` holds module and config.

    ``revision``: of the settings it was made from; a rollout raises it.
    """

    name: str
    role: str
    revision: int
    process: ProcessSpec


class MemberStarted(msgspec.Struct, frozen=True):
    """The member's process runs; again after each restart, with another ``pid``.

    ``host``: where, as the operator knows it; empty for this machine.
    """

    name: str
    host: str = ""
    pid: int = 0


class MemberDown(msgspec.Struct, frozen=True):
    """The member's process has ended; the backend starts another one in ``seconds``.

    ``why``: in words. ``ends``: how often in a row, with no long life in between.
    """

    name: str
    why: str
    seconds: float
    ends: int = 1


class MemberEnded(msgspec.Struct, frozen=True):
    """The member is gone for good, and so is all the backend had for it: its name is free.

    ``code``: exit code of its last process, negative for a signal; 0 of a worker that was not
    told to stop: it was drained. ``reason``: its last error line. ``refused``: a setting or its
    model is wrong, so that another try would end alike.
    """

    name: str
    code: int = 0
    reason: str = ""
    refused: bool = False


class MemberUnplaced(msgspec.Struct, frozen=True):
    """The member waits for a host. ``final``: no host that it fits on will ever come."""

    name: str
    why: str
    final: bool = False


MemberEvent = MemberStarted | MemberDown | MemberEnded | MemberUnplaced


class Backend(Protocol):
    """Starts and ends members; one instance per cluster.

    It is made with a function ``emit(MemberEvent)``, which it calls on the controller's thread
    and never from inside one of these methods. None of them blocks or raises for a member that
    cannot be started: that is a :class:`MemberEnded`.
    """

    def start(self, spec: MemberSpec) -> None:
        """Start a member whose name is free; restart it whenever it crashes."""

    def stop(self, name: str, grace: float) -> None:
        """Ask it to end (SIGTERM), end it by force ``grace`` seconds later, do not restart it.

        MemberEnded follows. Called again it asks again, with the new ``grace`` from now on.
        """

    def kill(self, name: str) -> None:
        """End it and all it started at once, do not restart it; MemberEnded follows."""

    def request(self, bundles: dict[str, int]) -> None:
        """Have room for so many members by role, replacing any earlier request; empty: none."""

    def refusal(self, targets: dict[str, int]) -> str:
        """Why the pools can never be of this size here, in one sentence; empty: they can."""
        ...

    def full(self, targets: dict[str, int]) -> str:
        """Why the pools cannot be of this size with the hosts there are now; empty: they can.

        Unlike a refusal this changes when a host joins.
        """
        ...

    def heard(self, router: str, report: ClusterReport) -> None:
        """What a router says of the workers: one it has lost while its process lives hangs."""
