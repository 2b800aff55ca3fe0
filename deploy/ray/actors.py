"""The classes that run as Ray actors. Importing this module does not need ``ray``.

An actor has the name of its member (``decode-3``, ``router``), in the namespace ``baton``.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import threading
import traceback

import msgspec

from baton.proto.errors import BatonError, ConfigError

from ..config import ServeSettings
from ..supervise.oom import score_like_parent
from .controller import ControllerFacts, RayCluster
from .member import MemberReport, State, Supervisor
from .placing import place, read_order


class PoolMember:
    """One member: the supervisor of one router or worker (:mod:`.member`).

    ``order``: :func:`.placing.order_of`. If the member cannot run on this node, the actor reports
    it as ended and refused, and keeps running. The controller decides what follows.
    """

    def __init__(self, order: bytes) -> None:
        import ray

        score_like_parent()
        read = read_order(order)
        self._host = str(ray.util.get_node_ip_address())
        self._supervisor: Supervisor | None = None
        self._refusal: MemberReport | None = None
        try:
            process = place(read, self._host)
        except ConfigError as problem:
            self._refusal = MemberReport(
                name=read.name,
                role=read.role,
                revision=read.revision,
                host=self._host,
                supervisor=os.getpid(),
                state=State.ENDED,
                code=1,
                reason=str(problem),
                refused=True,
            )
            return
        self._supervisor = Supervisor(process, revision=read.revision, host=self._host)

    def report(self) -> bytes:
        """A :class:`MemberReport` as JSON."""
        if self._supervisor is None:
            return msgspec.json.encode(self._refusal)
        return msgspec.json.encode(self._supervisor.report())

    def stop(self, grace: float) -> None:
        """See :meth:`Supervisor.stop`."""
        if self._supervisor is not None:
            self._supervisor.stop(grace)

    def kill_child(self, pid: int) -> None:
        """See :meth:`Supervisor.kill_child`."""
        if self._supervisor is not None:
            self._supervisor.kill_child(pid)


CONTROLLER = "controller"
"""Name of the controller's actor."""


class Controller:
    """The actor around :class:`.controller.RayCluster`, which runs on a separate thread.

    ``settings``: a :class:`ServeSettings` as JSON, checked.
    """

    def __init__(self, settings: bytes) -> None:
        import ray

        from .api import Ray

        score_like_parent()
        self._facts = ControllerFacts()
        head = str(ray.util.get_node_ip_address())
        launched = msgspec.json.decode(settings, type=ServeSettings)
        self._api = Ray(head, gpus=1.0 if launched.device == "cuda" else 0.0)
        try:
            self._cluster = RayCluster(launched, self._api, head)
        except BatonError as problem:
            self._facts = ControllerFacts(refusal=str(problem))
            return
        self._facts = ControllerFacts(
            address=self._cluster.address,
            http=self._cluster.http,
            admin=self._cluster.admin,
            launched=msgspec.to_builtins(launched),
        )
        threading.Thread(target=self._run, name="controller").start()

    def facts(self) -> bytes:
        """:class:`ControllerFacts` as JSON."""
        return msgspec.json.encode(self._facts)

    def leave(self, host: str) -> list[str]:
        """See :meth:`.controller.RayCluster.leave`."""
        return self._cluster.leave(host)

    def _run(self) -> None:
        try:
            self._cluster.run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # Ray restarts the actor, which continues from the saved state
        self._api.kill_named(CONTROLLER)
