"""A gateway beside a test's cluster, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .conftest import END_TIMEOUT, READY_TIMEOUT, Cluster, command_environment, wait_until


class Http:
    """Plain HTTP to a gateway at ``port`` of this machine. ``headers``: of every request."""

    def __init__(self, port: int = 0, headers: dict[str, str] | None = None) -> None:
        self.port = port
        self.headers = headers or {}

    def connection(self) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_TIMEOUT)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Send one request; returns status, decoded JSON and headers."""
        connection = self.connection()
        try:
            content = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
            connection.request(method, path, content, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read()), response.headers
        finally:
            connection.close()

    def raw(self, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
        """Send one request; returns status, text of the answer and its type."""
        connection = self.connection()
        try:
            connection.request(method, path, json.dumps(body).encode(), self.headers)
            response = connection.getresponse()
            return response.status, response.read().decode(), response.headers["content-type"]
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Any:
        """Send one request that must succeed; returns its JSON."""
        status, content, _ = self.ask("POST", path, body)
        assert status == 200, content
        return content

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Send one streamed request; returns its events, of which the last was ``[DONE]``."""
        return list(self.events(path, **body))

    def events(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of one streamed request as they arrive."""
        connection = self.connection()
        try:
            content = json.dumps({**body, "stream": True}).encode()
            connection.request("POST", path, content, self.headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            done = False
            for line in response:
                if line.strip():
                    assert line.startswith(b"data: "), line
                    assert not done, "an event after [DONE]"
                    done = line == b"data: [DONE]\n"
                    if not done:
                        yield json.loads(line[6:])
            assert done
        finally:
            connection.close()


class Gateway(Http):
    """A running ``baton gateway``. ``files``: its limit on open files, if not this process's."""

    def __init__(
        self, cluster: Cluster, folder: Path, *flags: str, files: int = 0, **variables: str
    ) -> None:
        super().__init__()
        self.log = folder / "gateway.log"
        command = [sys.executable, "-P", "-m", "baton.cli", "gateway", "--http-port=0", *flags]
        if files:
            command = ["prlimit", f"--nofile={files}:{files}", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--address={cluster.address}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**command_environment(folder), **variables},
            )

    def wait_ready(self) -> Gateway:
        """Wait until it has printed its address."""

        def port():
            assert self.process.poll() is None, self.text()
            return re.search(r"at https?://[^ ]+?:(\d+)/v1\n", self.text())

        self.port = int(wait_until(port, READY_TIMEOUT, "the gateway's address")[1])
        return self

    def text(self) -> str:
        """Everything it printed so far."""
        return self.log.read_text(errors="replace")

    def end(self) -> int:
        """Interrupt it and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def resident_bytes(gateway: Gateway) -> int:
    """Memory of the gateway, without its helper processes."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
