"""The controller as a Ray actor. Importing this module does not need ``ray``."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import threading
import traceback

import msgspec

from baton.proto.errors import BatonError

from ..config import ServeSettings
from ..supervise.oom import score_like_parent
from .api import Ray
from .controller import ControllerFacts, RayCluster

CONTROLLER = "controller"
"""Name of the controller's actor."""


class Controller:
    """The actor around :class:`.controller.RayCluster`, which runs on a separate thread.

    ``settings``: a :class:`ServeSettings` as JSON, checked.
    """

    def __init__(self, settings: bytes) -> None:
        import ray

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
