"""The supervisor of all simulated workers: it certifies the end of each process to the routers."""

from __future__ import annotations

from functools import partial
from typing import Any

from baton.deploy.supervise.certificates import Certificates
from baton.proto.wire.messages import CertificateReceived, DeathCertificate, Message
from baton.router.events import FromWorker

from .nodes import Node, RouterNode, World
from .workers import WorkerNode

REAP_S = (0.0005, 0.01)
"""Range of the delay until the supervisor has the exit status, seconds."""
LATE_S = 3.0
"""Longest delay of a late certificate, seconds: later than the restart of its worker."""
KILLED = -9


class SupervisorNode(Node):
    """Sends certificates of death, with the faults of ``cluster.certificate_faults``.

    A fault is drawn per certificate: it is lost (the supervisor misses the death), late, sent again
    after its acknowledgement, or joined by a forged one for each living worker.
    """

    def __init__(self, cluster: World, name: str) -> None:
        super().__init__(cluster, name)
        self.core = Certificates()

    def boot(self) -> None:
        """Start without certificates."""

    def tick(self) -> None:
        """Repeat what is not acknowledged."""
        self._send()

    def ended(self, worker: WorkerNode[Any]) -> None:
        """Certify the end of the worker's present process, after reaping it."""
        network = self.cluster.network
        certificate = DeathCertificate(worker=worker.name, secret=worker.secret, status=KILLED)
        delay = network.random.uniform(*REAP_S)
        fault = ""
        if network.random.random() < self.cluster.certificate_faults:
            fault = network.random.choice(("lost", "late", "again", "forged"))
            self.cluster.stats[f"certificates_{fault}"] += 1
        if fault == "lost":
            return
        if fault == "late":
            delay = network.random.uniform(0.0, LATE_S)
        if fault == "again":
            later = network.random.uniform(delay, LATE_S)
            network.after(later, self.when_up(partial(self._certify, certificate)))
        if fault == "forged":
            self.forge()
        network.after(delay, self.when_up(partial(self._certify, certificate)))

    def forge(self) -> None:
        """Send certificates with the seals, instead of the secrets, of all workers."""
        for worker in self.cluster.workers:
            forged = DeathCertificate(worker=worker.name, secret=worker.seal, status=KILLED)
            self._certify(forged)

    def _certify(self, certificate: DeathCertificate) -> None:
        names = [router.name for router in self.cluster.routers]
        self.core.died(names, certificate, self.now)
        self._send()

    def _send(self) -> None:
        for name, certificates in self.core.due(self.now).items():
            router = self.cluster.router_named(name)
            envelope = FromWorker(self.identity, certificates)
            self.transmit(router, partial(router.feed, envelope))

    def answered(self, router: RouterNode, message: Message) -> None:
        """Deliver a router's acknowledgement over the network."""
        if isinstance(message, CertificateReceived):
            acknowledge = partial(self.core.acknowledged, router.name, message.secret)
            router.transmit(self, acknowledge)
