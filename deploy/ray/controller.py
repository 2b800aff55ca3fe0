"""The controller of a cluster on Ray: the core and shell of one machine, with members as actors.

The controller is an actor on the head's node (:class:`.actors.Controller`). If it is killed, Ray
restarts it. It then reads its saved state and finds the members by name. The members serve
meanwhile, because the controller is not involved in requests.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from baton.proto.errors import ConfigError
from baton.runtime.net.loop import Loop

from ..autoscale.pilot import pilot_of
from ..config import ServeSettings
from ..controller.admin import Overview
from ..controller.core import ControllerCore
from ..controller.events import Down, Drain
from ..controller.members import Stage
from ..controller.shell import Contacts, ControllerShell
from ..messages import FAILURES, json_line, sentence
from ..plan.addresses import HttpPort, admin_address, check_metrics_ports, claim_admin
from ..plan.prepare import check_keys, with_task
from ..plan.revisions import Revisions
from ..roles import GATEWAY, ROUTER
from ..supervise.core import Log
from .backend import RayApi, RayBackend
from .plan import ray_plan, ray_settings
from .saved import Saved, decode_saved, encode_saved, restore, saved_of

SAVE_EVERY = 0.1
"""Seconds between checks whether the saved state is out of date."""
LINGER = 1.0
"""Seconds for sending the last answers."""


class ControllerApi(RayApi, Protocol):
    """The controller's own calls to Ray, besides those for members."""

    def load(self) -> bytes | None:
        """Return the state that the previous controller saved."""

    def save(self, data: bytes) -> None:
        """Save the state for the next controller."""

    def forget(self, last_words: str) -> None:
        """Delete the saved state. ``last_words``: reason of a failure, else empty."""

    def existing(self) -> list[str]:
        """Return the names of the members' existing actors."""
        raise NotImplementedError


class RayCluster:
    """One controller. :meth:`run` returns after the cluster has ended.

    ``settings``: settings at launch; saved settings of a previous controller have precedence.
    ``head``: address of this node. Raises BatonError for settings that cannot be served.
    """

    def __init__(self, settings: ServeSettings, api: ControllerApi, head: str) -> None:
        self._api = api
        data = api.load()
        before = None if data is None else decode_saved(data)
        key = secrets.token_hex(32) if before is None else before.cluster_key
        if before is not None:
            settings = before.revisions[0]
        else:
            settings = with_task(ray_settings(settings, head))
        self._plan = ray_plan(settings, key)
        # Only those here: the workers' keys are on the workers' hosts.
        check_keys(self._plan, ROUTER, GATEWAY)
        known = None if before is None else before.revisions
        self._revisions = Revisions(self._plan, known)
        self.address, self.http = self._plan.address, self._plan.http_url
        self.admin = settings.admin or admin_address(self.address)
        self.failure = ""
        self._saved = data
        self._core = ControllerCore.of(settings, replace=True)
        self._loop = Loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._backend: RayBackend | None = None
        self._http_port: HttpPort | None = None
        self._shell = self._make_shell(api)
        try:
            self._reserve_port(settings, again=before is not None)
            claim_admin(self.admin)
            self._shell.listen(self.admin)
        except BaseException:
            self._close()
            raise
        if before is not None:
            self._go_on(before)

    def _reserve_port(self, settings: ServeSettings, *, again: bool) -> None:
        """Reserve the gateways' port on this node, the head, where routers and gateways run.

        ``again``: a previous controller had reserved it. Then the gateways serve already, and an
        error must not end them. Otherwise raises ConfigError.
        """
        try:
            self._http_port = HttpPort.of(settings, gateways_listen=again)
            if not again:  # else the routers and gateways have their ports already
                check_metrics_ports(settings)
        except ConfigError as problem:
            if not again:
                raise
            sys.stderr.write(f"{problem}\n")

    def _make_shell(self, api: ControllerApi) -> ControllerShell:
        def backend(emit: Callable[[Any], None]) -> RayBackend:
            timeout = self._plan.settings.worker_timeout
            can_turn = partial(getattr, self._core, "can_turn")
            made = self._backend = RayBackend(self._loop, api, emit, timeout, can_turn)
            return made

        facts = Overview(backend="ray", address=self.address, http=self.http)
        contacts = Contacts.of(self._plan, facts, self._print)
        pilot = pilot_of(self._core, self._plan.settings)
        return ControllerShell(
            self._loop, self._context, self._core, self._revisions, backend, contacts, pilot
        )

    def _go_on(self, before: Saved) -> None:
        """Take over the members of the previous controller."""
        for name in restore(self._core, before, self._api.existing(), self._loop.now()):
            member = self._core.pools.members.get(name)
            if member is None:
                continue
            spec = self._revisions.spec(name, member.role, member.revision)
            self._shell.backend.start(spec)
            if member.stage is Stage.STOPPING:
                self._shell.backend.stop(name, self._core.limits.stop_timeout)
        if before.ending:
            self._loop.call_later(0.0, lambda: self._shell.feed(Down()))

    # ------------------------------------------------------------- from any thread

    def leave(self, host: str) -> list[str]:
        """Drain the workers of a host that will leave, and start others elsewhere.

        Returns the workers that are still on the host. Idempotent.
        """
        there = [m.name for m in list(self._core.pools.members.workers()) if m.host == host]
        for name in there:
            self._loop.post(partial(self._shell.feed, Drain(f"leave {name}", name, replace=True)))
        return there

    # ------------------------------------------------------------- life

    def run(self) -> None:
        """Serve until an order to stop. Afterwards no process of the cluster is left."""
        try:
            self._shell.start()
            self._loop.every(SAVE_EVERY, self._save, first=0.0)
            self._loop.run()
        finally:
            self._close()
        self._api.request({})
        self._api.forget(self.failure)

    def _close(self) -> None:
        self._shell.close()
        if self._backend is not None:
            self._backend.close()
        if self._http_port is not None:
            self._http_port.close()
        self._context.destroy(linger=int(LINGER * 1000))
        self._loop.close()

    def _save(self) -> None:
        """Save the state if it changed. The queue keeps this before the creation of an actor."""
        saved = saved_of(self._core, self._plan.cluster_key, self._revisions.known)
        data = encode_saved(saved)
        if data != self._saved and self._backend is not None:
            self._saved = data
            self._backend.put(lambda: self._api.save(data))

    def _print(self, log: Log) -> None:
        line = sentence(log)
        if log.event in FAILURES:
            self.failure = line
        settings = self._revisions.settings(self._core.pools.revision)
        if settings.log_format == "json":
            line = json_line("controller", line)
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class ControllerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts for ``baton launch``. ``refusal``: why the cluster cannot run; empty if it runs."""

    address: str = ""
    http: str = ""
    admin: str = ""
    refusal: str = ""
    launched: dict[str, Any] = {}
