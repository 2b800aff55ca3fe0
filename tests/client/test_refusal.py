"""The reason of a failed handshake appears once: in the error of the call."""

import socket
import threading

import pytest

from baton.client import Client
from baton.proto.errors import ConnectionLost


@pytest.fixture
def hangs_up():
    """An address where every connection is ended in its handshake, as by a cluster with keys."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1)
                    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47))
                    connection.recv(4096)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_failed_handshakes_are_not_logged_beside_the_error(hangs_up, capfd):
    with pytest.raises(ConnectionLost, match="if it requires keys"):
        Client(hangs_up, connect_timeout=1.0).status()
    assert capfd.readouterr().err == ""
