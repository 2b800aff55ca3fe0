"""Certificates for Ray's TLS: one authority, the hosts' addresses, client and server use."""

import shutil
import socket
import ssl
import threading

import pytest

from baton.cli.command import main
from baton.deploy.ray.certificates import check_certificates
from baton.deploy.ray.hosts import check_mounts
from baton.proto.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
HOSTS = ["10.1.0.1", "fd00::3"]


@pytest.fixture
def folder(tmp_path):
    assert main(["ray-certs", str(tmp_path / "tls"), *HOSTS]) == 0
    return tmp_path / "tls"


def context(share, protocol) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.load_verify_locations(share / "ca.crt")
    made.load_cert_chain(share / "node.crt", share / "node.key")
    made.verify_mode = ssl.CERT_REQUIRED  # also for clients, as in Ray
    return made


def greet(server_share, client_share):
    """Do a handshake like Ray's processes: by address, with certificates on both sides."""
    ours, theirs = socket.socketpair()
    failed = []

    def serve():
        try:
            with context(server_share, ssl.PROTOCOL_TLS_SERVER).wrap_socket(
                theirs, server_side=True
            ) as secured:
                secured.sendall(b"hello")
        except ssl.SSLError as problem:
            failed.append(problem)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with context(client_share, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(
            ours, server_hostname=HOSTS[0]
        ) as secured:
            return secured.recv(5)
    finally:
        ours.close()
        thread.join()


def test_hosts_with_certificates_of_one_authority_connect_also_after_a_host_was_added(folder):
    before = shutil.copytree(folder / "nodes", folder.parent / "before")
    assert main(["ray-certs", str(folder), *HOSTS, "10.1.0.9"]) == 0
    check_certificates(folder / "nodes", [*HOSTS, "10.1.0.9"])
    assert greet(before, folder / "nodes") == greet(folder / "nodes", before) == b"hello"


def test_a_certificate_of_another_authority_is_refused(folder):
    other = folder.parent / "other"
    assert main(["ray-certs", str(other), *HOSTS]) == 0
    with pytest.raises(ssl.SSLError):
        greet(folder / "nodes", other / "nodes")


def test_what_hosts_cannot_use_is_named(folder, capsys):
    share = folder / "nodes"
    check_mounts([str(share)])
    with pytest.raises(ConfigError, match=r"is not for 10\.1\.0\.2; make it with baton ray-certs"):
        check_certificates(share, [*HOSTS, "10.1.0.2"])
    (share / "node.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read .*node\.key; chmod 600"):
        check_mounts([str(share)])
    (share / "node.key").chmod(0o600)
    shutil.copy(folder / "authority.key", share)
    with pytest.raises(ConfigError, match="has the authority's key"):
        check_mounts([str(share)])
    (share / "authority.key").unlink()
    (share / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"has no ca\.crt"):
        check_mounts([str(share)])
    assert main(["ray-certs", str(folder.parent), "10.1.0.1"]) == 2
    assert "; use another" in capsys.readouterr().err
    assert main(["ray-certs", str(folder), "gpu-7"]) == 2


def test_a_cluster_file_with_tls_is_for_hosts_in_the_certificate(folder, tmp_path, capsys):
    (tmp_path / "baton_serve-9.9.9-py3-none-any.whl").touch()
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    words = ["ray-config", "--head=10.1.0.1", "--prefill=fd00::3", f"--tls={folder / 'nodes'}"]
    words += [
        f"--keys={tmp_path / 'keys'}",
        f"--wheel={tmp_path}/baton_serve-9.9.9-py3-none-any.whl",
    ]
    assert main([*words, "--decode=10.1.0.7"]) == 2
    assert "is not for 10.1.0.7" in capsys.readouterr().err
    assert main(["ray-certs", str(folder), *HOSTS, "10.1.0.7"]) == 0
    assert main([*words, "--decode=10.1.0.7"]) == 0
    text = capsys.readouterr().out
    assert f"  ~/.baton/ray-tls: {folder}/nodes\n" in text and text.count("RAY_USE_TLS=1") == 1
