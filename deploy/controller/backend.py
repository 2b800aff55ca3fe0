"""The interface between the controller and the process manager: this machine, or Ray.

A *member* is one process of the cluster (``router``, ``prefill-0``, ``decode-3``). The process
manager, here called backend, starts a member with the same command line on every host
(:mod:`..supervise.process`). After a crash, the backend restarts the member, without a limit and
with growing delays. The controller decides which members exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from ..report import ClusterReport
    from ..supervise.process import ProcessSpec


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One member to start. ``process``: its module and config.

    ``revision``: number of the settings that the member uses; each rollout raises it.
    """

    name: str
    role: str
    revision: int
    process: ProcessSpec


class MemberStarted(msgspec.Struct, frozen=True):
    """The member's process runs. Sent again after each restart, with another ``pid``.

    ``host``: the host's name for operators; empty for this machine.
    """

    name: str
    host: str = ""
    pid: int = 0


class MemberServes(msgspec.Struct, frozen=True):
    """The present process of a gateway sent its first heartbeat: it serves.

    The routers report whether workers serve, and their answers show that routers do.
    """

    name: str


class MemberDown(msgspec.Struct, frozen=True):
    """The member's process has ended. The backend restarts it in ``seconds``.

    ``why``: text for operators. ``ends``: number of ends in a row, without a long run in between.
    """

    name: str
    why: str
    seconds: float
    ends: int = 1


class MemberEnded(msgspec.Struct, frozen=True):
    """The member ended permanently, and its name is free.

    ``code``: exit code of its last process, negative for a signal; 0 without an order to stop: the
    worker was drained. ``reason``: its last error line. ``refused``: a setting or the model is
    wrong, so that a restart would fail again.
    """

    name: str
    code: int = 0
    reason: str = ""
    refused: bool = False


class MemberUnplaced(msgspec.Struct, frozen=True):
    """The member waits for a host. ``final``: the cluster can never have a suitable host."""

    name: str
    why: str
    final: bool = False


MemberEvent = MemberStarted | MemberServes | MemberDown | MemberEnded | MemberUnplaced


class Backend(Protocol):
    """A process manager: starts and stops members. One instance per cluster.

    A backend receives a function ``emit(MemberEvent)`` and calls it on the controller's thread,
    never from inside one of these methods. The methods do not block. If a member cannot be
    started, they do not raise, but a :class:`MemberEnded` follows.
    """

    def start(self, spec: MemberSpec) -> None:
        """Start a member with an unused name, and restart it after each crash."""

    def stop(self, name: str, grace: float) -> None:
        """Stop a member permanently: SIGTERM, and SIGKILL ``grace`` seconds later.

        MemberEnded follows. A second call sends SIGTERM again and restarts the grace.
        """

    def turn(self, spec: MemberSpec) -> None:
        """Let a running worker drain and go on in the role of ``spec``, on its loaded model.

        After a crash the worker is restarted in that role. Call it only without a refusal. ``spec``
        replaces the one that the member has, so that a second call may take it back.
        """

    def turn_refusal(self) -> str:
        """Return why workers cannot change their role here, in one sentence, or an empty text."""
        ...

    def kill(self, name: str) -> None:
        """Kill a member and its child processes permanently. MemberEnded follows."""

    def request(self, bundles: dict[str, int]) -> None:
        """Reserve room for this many members by role. Replaces the previous request."""

    def refusal(self, targets: dict[str, int]) -> str:
        """Return why pools of this size are impossible here, in one sentence, or an empty text."""
        ...

    def full(self, targets: dict[str, int]) -> str:
        """Return why the present hosts have no room for pools of this size, or an empty text.

        Unlike :meth:`refusal`, the result changes when a host joins.
        """
        ...

    def reported(self, router: str, report: ClusterReport) -> None:
        """Use a router's report to detect hanging workers: lost by the router, but running."""
