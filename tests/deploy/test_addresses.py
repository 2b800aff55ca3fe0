"""Addresses of several routers and of the controller, and the controller's address lock."""

import pytest

from baton.deploy.local.address_lock import AddressLock
from baton.deploy.plan.addresses import admin_address, client_addresses
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
    with pytest.raises(ConfigError, match="a cluster runs at"):
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
