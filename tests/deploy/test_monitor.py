"""The supervisor's connection to a router during a network failure."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq

from baton.deploy.config import demo_model_folder
from baton.deploy.controller import shell
from baton.deploy.controller.shell import StatusMonitor
from baton.deploy.plan.addresses import free_ports
from baton.deploy.report import ClusterReport
from baton.proto.wire.envelope import EnvelopeEncoder
from baton.proto.wire.messages import StatusReport
from baton.router.config import RouterConfig
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import RouterChannel

pytestmark = pytest.mark.integration


class Wire:
    """Forwards tcp connections. ``cut``: existing connections stop passing data but stay open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = [self._listening]
        self._generation = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        self._generation += 1

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            if not select.select([self._listening], [], [], 0.05)[0]:
                continue
            ours, _ = self._listening.accept()
            theirs = socket.create_connection(("127.0.0.1", self._target))
            self._open += [ours, theirs]
            for ends in ((ours, theirs), (theirs, ours)):
                thread = threading.Thread(target=self._forward, args=(*ends, self._generation))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, generation: int) -> None:
        while not self._over.is_set() and generation == self._generation:
            if select.select([source], [], [], 0.02)[0]:
                with contextlib.suppress(OSError):
                    data = source.recv(1 << 16)
                    if data and generation == self._generation:
                        sink.sendall(data)
                        continue
                return


@pytest.fixture
def router(tmp_path):
    """Yield the port of a real router."""
    clients, workers = free_ports(2)
    config = RouterConfig(
        client_address=f"tcp://127.0.0.1:{clients}",
        worker_address=f"tcp://127.0.0.1:{workers}",
        model_folder=str(demo_model_folder()),
    )
    path = tmp_path / "router.json"
    path.write_bytes(msgspec.json.encode(config))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.router", "--config", str(path)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", clients)).close()
            break
        time.sleep(0.02)
    yield clients
    process.kill()
    process.wait()


def test_a_connection_stays_while_reports_come_however_long(monkeypatch, tmp_path):
    monkeypatch.setattr(shell, "POLL_INTERVAL", 0.01)
    loop, context, now = Loop(), zmq.Context(), 1000.0
    monkeypatch.setattr(loop, "now", lambda: now)
    encoder, asked = EnvelopeEncoder(), []

    def answer(identity: bytes, _frames: object) -> None:
        asked.append(identity)
        report = StatusReport(report=msgspec.json.encode(ClusterReport()))
        router.send(identity, encoder.encode([report]))

    def on_report(_report: object) -> None:
        nonlocal now
        now += 0.6 * shell.PATIENCE
        if len(asked) > 5:
            loop.stop()

    router = RouterChannel(context, f"ipc://{tmp_path}/router")
    router.attach(loop, answer)
    monitor = StatusMonitor(loop, context, f"ipc://{tmp_path}/router", on_report)
    loop.run()
    monitor.close()
    router.close()
    context.destroy(linger=0)
    loop.close()
    assert len(set(asked)) == 1


def test_a_router_answers_again_after_its_network_was_lost(router):
    loop, context, wire = Loop(), zmq.Context(), Wire(router)
    heard: list[float] = []
    lost_at: list[float] = []

    def on_report(_report: object) -> None:
        heard.append(time.monotonic())
        if len(heard) == 3:
            lost_at.append(heard[-1])
            wire.cut()
        if lost_at and heard[-1] > lost_at[0] + 0.5:
            loop.stop()

    monitor = StatusMonitor(loop, context, f"tcp://127.0.0.1:{wire.port}", on_report)
    loop.call_later(30.0, loop.stop)
    loop.run()
    monitor.close()
    context.destroy(linger=0)
    loop.close()
    wire.close()
    assert lost_at, "the router never answered"
    assert lost_at[0] + 0.5 < heard[-1], "no report after the cut"
