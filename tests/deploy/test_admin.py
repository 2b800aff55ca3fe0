"""The admin socket: its messages, keys, and random bytes."""

import contextlib
import os
import random
import shutil
import socket
import stat
import threading
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from baton.deploy.controller.admin import (
    ADMIN_VERSION,
    MAX_BYTES,
    AdminServer,
    Ask,
    DrainWorker,
    GoDown,
    MemberLine,
    Overview,
    Progress,
    Result,
    RollOut,
    ScalePools,
    decode_answer,
    decode_request,
    encode,
)
from baton.deploy.controller.admin_client import AdminClient, listens
from baton.proto.errors import (
    AccessDenied,
    ConnectionLost,
    DecodeFailed,
    InputError,
    ProtocolError,
    VersionMismatch,
)
from baton.runtime.keys import keyring, zap
from baton.runtime.keys.allowed import OPERATOR
from baton.runtime.keys.keyring import CONTROLLER, KeyRing, make_folder, retire, rotate
from baton.runtime.keys.shares import write_share
from baton.runtime.keys.zap import Doorkeeper, door
from baton.runtime.net.loop import Loop


@pytest.mark.parametrize(
    "message",
    [
        Ask(number=3),
        ScalePools(targets={"prefill": 2, "decode": -7}),
        DrainWorker(worker="decode-1", force=True),
        RollOut(changes={"policy": "round_robin", "grace": 1.5, "max_num_seqs": 3}),
        GoDown(at_once=True),
    ],
)
def test_requests_arrive_as_they_were(message):
    assert decode_request(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Progress(number=1, text="1 of 3"),
        Result(number=2, code="input"),
        Overview(members=[MemberLine(name="a", role="router", stage="ready", revision=0)]),
    ],
)
def test_answers_arrive_as_they_were(message):
    assert decode_answer(encode(message)) == message


@given(st.binary(max_size=400), st.sampled_from([b"", b"BA", b"BA" + bytes([ADMIN_VERSION])]))
def test_random_bytes_are_a_typed_error(data, head):
    with contextlib.suppress(ProtocolError):
        decode_request(head + data)


@given(st.data())
def test_damaged_requests_are_a_request_or_a_typed_error(data):
    good = encode(ScalePools(targets={"prefill": 2, "decode": 1}))
    place = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:place] + bytes([data.draw(st.integers(0, 255))]) + good[place + 1 :]
    with contextlib.suppress(ProtocolError):
        decode_request(damaged)


def test_what_is_too_large_to_be_meant_is_refused():
    with pytest.raises(DecodeFailed):
        decode_request(encode(ScalePools(targets={str(n): 1 for n in range(17)})))
    with pytest.raises(DecodeFailed):
        decode_request(encode(DrainWorker(worker="x" * 129)))
    with pytest.raises(DecodeFailed):
        decode_request(encode(RollOut(changes={"model": ["a"]})))
    with pytest.raises(VersionMismatch, match="admin version 9"):
        decode_request(b"BA\x09" + encode(Ask())[3:])


@contextlib.contextmanager
def serving(endpoint, keys=None):
    """Run a server that answers scale with progress and a result.

    Yields its address, the list of its requests, and an event set when it has reread the keys.
    """
    heard = []
    started, reread = threading.Event(), threading.Event()
    loops, addresses = [], []

    def serve():
        loop = Loop()
        context = zmq.Context()
        doors = None if keys is None else Doorkeeper(context, KeyRing(keys, OPERATOR, CONTROLLER))

        def on_request(sender, request):
            heard.append(request)
            if isinstance(request, Ask):
                admin.answer(sender, Overview(number=request.number, phase="serving"))
            elif isinstance(request, ScalePools):
                admin.answer(sender, Progress(number=request.number, text="so", accepted=True))
                admin.answer(sender, Result(number=request.number, text="done"))
            else:
                admin.answer(sender, Result(number=request.number, text="no", code="input"))

        own_keys = door(doors, "admin", OPERATOR)
        admin = AdminServer(loop, context, endpoint, on_request, own_keys)
        if doors is not None:
            own_keys.watch(reread.set)  # after the server's own watcher
            doors.attach(loop)
        loops.append(loop)
        addresses.append(admin.endpoint)
        loop.call_later(0, started.set)
        loop.run()
        admin.close()
        if doors is not None:
            doors.close()
        context.destroy(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(10)
    try:
        yield addresses[0], heard, reread
    finally:
        loops[0].post(loops[0].stop)
        thread.join(10)


@pytest.fixture
def server(tmp_path):
    with serving(f"ipc://{tmp_path}/admin.sock") as served:
        yield served


@pytest.mark.integration
def test_the_socket_is_this_user_s_alone(server):
    path = Path(server[0].removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.integration
def test_answers_come_in_order_and_failures_as_their_error(server):
    with AdminClient(server[0]) as client:
        assert client.overview().phase == "serving"
        answers = list(client.ask(ScalePools(targets={"decode": 2})))
        assert [answer.text for answer in answers] == ["so", "done"]
        with pytest.raises(InputError, match="no"):
            list(client.ask(DrainWorker(worker="x")))


@pytest.mark.integration
def test_random_bytes_and_floods_harm_nothing(server):
    address, heard, _ = server
    rng = random.Random(3)
    context = zmq.Context()
    for _ in range(20):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        for _ in range(20):
            frames = [rng.randbytes(rng.randint(0, 300)) for _ in range(rng.randint(1, 3))]
            dealer.send_multipart(frames)
        dealer.send(b"BA\x01" + rng.randbytes(MAX_BYTES))  # closes this connection
        dealer.poll(20)
        dealer.close()
    context.destroy(linger=0)
    with AdminClient(address) as client:
        assert client.overview().phase == "serving"
    assert [request for request in heard if not isinstance(request, Ask)] == []


@pytest.mark.integration
def test_without_a_controller_it_is_said_in_time(tmp_path):
    address = f"ipc://{tmp_path}/none.sock"
    assert not listens(address)
    with (
        AdminClient(address, timeout=0.2) as client,
        pytest.raises(ConnectionLost, match="no controller at"),
    ):
        client.overview()


@pytest.mark.integration
def test_of_a_controller_that_says_nothing_the_process_is_named(tmp_path):
    address = f"ipc://{tmp_path}/deaf.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen()
        with (
            AdminClient(address, timeout=0.2) as client,
            pytest.raises(ConnectionLost, match=rf"\(pid {os.getpid()}\) has not answered"),
        ):
            client.overview()


# ------------------------------------------------------------------------------ keys


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


def phase(address, keys) -> str:
    """Return what the server answers to this key, or "" if it refuses the key."""
    with AdminClient(address, keys=keys) as client, contextlib.suppress(AccessDenied):
        return client.overview().phase
    return ""


@pytest.mark.integration
def test_while_keys_rotate_either_side_may_have_the_older_one(folder, tmp_path, monkeypatch):
    """The controller and the operator each use the old key first, then the new key."""
    monkeypatch.setattr(keyring, "REREAD_S", 0.0)
    monkeypatch.setattr(zap, "REREAD_S", 0.02)
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    with serving("tcp://127.0.0.1:0", folder) as (address, heard, reread):  # with the old keys
        rotate(folder, OPERATOR)
        shutil.copy(folder / "allowed.toml", old / "allowed.toml")  # distribute the list first
        assert reread.wait(30)
        assert phase(address, folder) == phase(address, old) == "serving"
        assert len(heard) == 2  # one request each
    with serving("tcp://127.0.0.1:0", folder) as (address, _, reread):
        assert phase(address, folder) == phase(address, old) == "serving"
        assert retire(folder, OPERATOR)
        assert reread.wait(30)
        assert phase(address, folder) == "serving"
        assert not phase(address, old)


@pytest.mark.integration
def test_who_may_not_manage_is_told_so_at_once(folder, tmp_path):
    share = tmp_path / "client"
    write_share(folder, share, ["client"])
    make_folder(tmp_path / "other")
    with serving("tcp://127.0.0.1:0", folder) as (address, heard, _):
        with (
            AdminClient(address, keys=share, timeout=30) as client,
            pytest.raises(AccessDenied, match="refused this key"),
        ):
            client.overview()
        for keys, said in ((tmp_path / "other", "not in allowed.toml here"), (None, "--keys")):
            with (
                AdminClient(address, keys=keys, timeout=0.5) as client,
                pytest.raises(AccessDenied, match=said),
            ):
                client.overview()
    assert heard == []
