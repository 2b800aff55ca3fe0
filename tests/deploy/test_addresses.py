"""Addresses of several routers and of the controller, and the controller's address lock."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from baton.deploy.config import ServeSettings
from baton.deploy.local.address_lock import AddressLock
from baton.deploy.plan import addresses
from baton.deploy.plan.addresses import (
    HttpPort,
    admin_address,
    check_metrics_ports,
    client_addresses,
)
from baton.proto.errors import ConfigError
from baton.proto.wire.endpoints import MAX_IPC_PATH_BYTES, check_endpoint

TWO = ["router-0", "router-1"]


def test_further_routers_follow_from_the_first_address(tmp_path):
    assert client_addresses(f"ipc://{tmp_path}/s", TWO) == {
        "router-0": f"ipc://{tmp_path}/s",
        "router-1": f"ipc://{tmp_path}/s.1",
    }
    found = client_addresses("tcp://127.0.0.1:47113", TWO, claim=False)
    assert list(found.values()) == ["tcp://127.0.0.1:47113", "tcp://127.0.0.1:47114"]


def test_a_list_names_every_router(tmp_path):
    wanted = f"ipc://{tmp_path}/a, ipc://{tmp_path}/b"
    assert list(client_addresses(wanted, TWO).values()) == [
        f"ipc://{tmp_path}/a",
        f"ipc://{tmp_path}/b",
    ]
    with pytest.raises(ConfigError, match="address names 2 routers, routers is 3"):
        client_addresses(wanted, ["a", "b", "c"])
    with pytest.raises(ConfigError, match="two routers have the same address"):
        client_addresses(f"ipc://{tmp_path}/a,ipc://{tmp_path}/a", TWO)


def test_an_address_in_use_names_both_ways_out(tmp_path):
    hint = "give another --address, or end its cluster with baton down"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        with pytest.raises(ConfigError, match=f"s is in use by another process; {hint}"):
            client_addresses(f"ipc://{tmp_path}/s", TWO)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is in use by another process; {hint}"):
            client_addresses(f"tcp://127.0.0.1:{port}", TWO[:1])


def test_the_controller_listens_beside_the_first_router():
    assert admin_address("ipc:///run/a.sock") == "ipc:///run/a.sock.admin"
    assert admin_address("ipc:///run/a,ipc:///run/b") == "ipc:///run/a.admin"


def test_for_tcp_and_long_paths_it_is_in_the_private_folder():
    long = f"ipc:///{'x' * (MAX_IPC_PATH_BYTES - 1)}"
    found = {admin_address(address) for address in (long, "tcp://1.2.3.4:5", "tcp://1.2.3.4:6")}
    assert len(found) == 3
    for address in found:
        assert address.startswith("ipc://")
        assert "xxx" not in address
        check_endpoint(address)


def test_a_cluster_at_every_address_is_found_by_its_loopback_one():
    here = {admin_address(f"tcp://{host}:5") for host in ("0.0.0.0", "127.0.0.1", "localhost")}
    assert len(here) == 1
    assert admin_address("tcp://1.2.3.4:5") not in here


def test_one_controller_per_address_until_it_lets_go(tmp_path):
    address = f"ipc://{tmp_path}/s.admin"
    lock = AddressLock.take(address)
    with pytest.raises(ConfigError, match=r"a cluster runs at .*, or end it with baton down$"):
        AddressLock.take(address)
    AddressLock.sweep(address)  # locked, so it stays
    assert len(list(tmp_path.iterdir())) == 1
    lock.release()
    assert list(tmp_path.iterdir()) == []
    AddressLock.take(address).release()
    assert AddressLock.take("tcp://127.0.0.1:5") is None


def test_what_a_killed_holder_left_is_swept(tmp_path):
    (tmp_path / "s.admin.lock").touch()
    AddressLock.sweep(f"ipc://{tmp_path}/s.admin")
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_of_a_killed_holder_is_found(tmp_path):
    """With --run-dir the folder was not found, and stayed."""
    address, folder = f"ipc://{tmp_path}/s.admin", tmp_path / "r\udcff" / "baton-run-x"
    held = AddressLock.take(address)
    assert held.left is None
    held.note(folder)
    os.close(held._descriptor)  # killed
    again = AddressLock.take(address)
    assert again.left == folder
    again.note(tmp_path)
    os.close(again._descriptor)
    assert AddressLock.sweep(address) == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert AddressLock.sweep(address) is None


@pytest.mark.parametrize("content", [b"relative", b"/a\0b", b"\xff" * 9000])
def test_a_lock_file_of_other_content_names_no_folder(tmp_path, content):
    (tmp_path / "s.admin.lock").write_bytes(content)
    assert AddressLock.sweep(f"ipc://{tmp_path}/s.admin") is None


def test_a_reserved_port_is_for_gateways_alone():
    port = HttpPort("127.0.0.1", 0)
    try:
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigError, match=f"http_port {port.number} of {host} is in use"):
                HttpPort.of(ServeSettings(http_host=host, http_port=port.number))
        at = ("127.0.0.1", port.number)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(at)
        for _ in range(2):  # a gateway, and its successor after connections were closed
            with (
                socket.create_server(at, reuse_port=True) as one,
                socket.create_server(at, reuse_port=True) as other,
            ):
                clients = [socket.create_connection(at, timeout=60) for _ in range(20)]
                for listener in (one, other):
                    listener.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            listener.accept()[0].close()
                for client in clients:
                    assert client.recv(1) == b""
                    client.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(at, timeout=60)
    finally:
        port.close()
    HttpPort("127.0.0.1", port.number).close()


def test_a_successor_reserves_the_port_at_which_its_gateways_listen():
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as gateway:
        settings = ServeSettings(http_port=gateway.getsockname()[1])
        with pytest.raises(ConfigError, match="is in use"):
            HttpPort.of(settings)
        port = HttpPort.of(settings, gateways_listen=True)
    with pytest.raises(ConfigError, match="is in use"):
        HttpPort.of(settings)
    port.close()


def test_without_a_wish_another_port_is_taken_if_the_usual_one_is_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(addresses, "HTTP_PORT", other.getsockname()[1])
        port = HttpPort.of(ServeSettings())
        assert port.number not in (0, other.getsockname()[1])
        port.close()
    with pytest.raises(ConfigError, match=r"http_host 203\.0\.113\.7, http_port 0: "):
        HttpPort.of(ServeSettings(http_host="203.0.113.7", http_port=0))
    assert HttpPort.of(ServeSettings(gateways=0)) is None


def test_free_ports_are_not_those_of_outgoing_connections():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = addresses.free_ports(20)
    assert len(set(ports)) == 20
    assert low < 21_000 or all(20_000 <= port < low for port in ports)


@pytest.mark.parametrize("content", [None, "", "1024 60999"])
def test_free_ports_without_room_below(monkeypatch, tmp_path, content):
    source = tmp_path / "range"
    if content is not None:
        source.write_text(content)
    monkeypatch.setattr(addresses, "_PORT_RANGE", source)
    assert len(set(addresses.free_ports(3))) == 3


def test_a_metrics_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for first in (port - 2, port - 1, port):  # of the router, a gateway, another gateway
            with pytest.raises(ConfigError, match=f"metrics_port {port} of 127.0.0.1 is in use"):
                check_metrics_ports(ServeSettings(gateways=2, metrics_port=first))
        check_metrics_ports(ServeSettings(gateways=2))
        with pytest.raises(ConfigError, match="metrics_host"):
            check_metrics_ports(ServeSettings(metrics_host="203.0.113.7", metrics_port=port))
    check_metrics_ports(ServeSettings(gateways=0, metrics_port=port))
