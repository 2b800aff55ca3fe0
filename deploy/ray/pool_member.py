"""A member of a pool as a Ray actor. Importing this module does not need ``ray``.

The actor has the name of its member (``decode-3``, ``router``), in the namespace ``baton``.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from typing import Any

import msgspec

from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import role_without_key

from ..roles import POOLS
from ..supervise.oom import score_like_parent
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
        config: Any = process.config
        self._kv_bytes = config.runner.kv_bytes if read.role in POOLS else 0
        keyless = role_without_key(config.keys, POOLS, read.name) if read.role in POOLS else ""
        self._supervisor = Supervisor(
            process, revision=read.revision, host=self._host, keyless=keyless
        )

    def report(self) -> bytes:
        """A :class:`MemberReport` as JSON."""
        if self._supervisor is None:
            return msgspec.json.encode(self._refusal)
        return msgspec.json.encode(self._supervisor.report())

    def stop(self, grace: float) -> None:
        """See :meth:`Supervisor.stop`."""
        if self._supervisor is not None:
            self._supervisor.stop(grace)

    def turn(self, order: bytes) -> None:
        """Let the worker go on in the role of an order; see :meth:`Supervisor.turn`."""
        if self._supervisor is not None:
            self._supervisor.turn(place(read_order(order), self._host, self._kv_bytes))

    def kill_child(self, pid: int) -> None:
        """See :meth:`Supervisor.kill_child`."""
        if self._supervisor is not None:
            self._supervisor.kill_child(pid)
