"""A transport of the user's own: tickets for payloads. A failure is reported and costs a frame."""

import os
from pathlib import Path

import numpy as np
import pytest

from baton.extend import TRANSPORT, ExtensionError, resolve
from baton.kv_transfer.custom import MAX_TICKET, CustomTransport

ROOT = Path(__file__).parents[2]
EXAMPLES = str(ROOT / "examples" / "extend")
PAYLOAD = np.arange(5000, dtype=np.uint8)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def transport(reports, tmp_path, monkeypatch):
    monkeypatch.setenv("KV_FOLDER", str(tmp_path))
    name = "folder_transport:FolderTransport"
    return CustomTransport(name, EXAMPLES, lambda *given: reports.append(given))


def test_the_example_moves_a_payload_and_leaves_no_file(transport, reports, tmp_path):
    ticket = transport.put(PAYLOAD)
    assert len(ticket) < 64
    assert len(list(tmp_path.iterdir())) == 1
    assert transport.get(ticket.tobytes(), 5000).tobytes() == PAYLOAD.tobytes()
    assert list(tmp_path.iterdir()) == []
    assert reports == []


@pytest.mark.parametrize("ticket", [b"", b"unknown", b"baton-kv-../../etc/passwd", b"\xff"])
def test_a_ticket_of_nobody_is_a_lost_payload(ticket, transport, reports):
    assert transport.get(ticket, 5000) is None
    assert [event for event, *_ in reports] == ["kv_transport.failed"]


def test_a_long_ticket_never_reaches_the_class(transport, reports, monkeypatch):
    given = []
    monkeypatch.setattr(transport._transport, "get", lambda ticket, size: given.append(ticket))
    assert transport.get(b"x" * (MAX_TICKET + 1), 5000) is None
    assert (given, reports, transport.guard.failures) == ([], [], 0)


def test_the_sweep_passes_a_file_that_another_worker_removes(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_FOLDER", str(tmp_path))
    made = resolve(TRANSPORT, "folder_transport:FolderTransport", EXAMPLES)
    made._swept -= 61
    (tmp_path / "baton-kv-gone").symlink_to(tmp_path / "nowhere")  # stat() finds no file
    old = tmp_path / "baton-kv-old"
    old.touch()
    os.utime(old, (0, 0))
    ticket = made.put(b"abc")
    assert made.get(ticket, 3) == b"abc"
    assert not old.exists()


def test_a_payload_of_another_size_is_lost(transport, reports):
    ticket = transport.put(PAYLOAD)
    assert transport.get(ticket.tobytes(), 4999) is None
    assert "5000 bytes instead of 4999" in str(reports[0][1])


@pytest.mark.parametrize("returned", [None, "text", b"x" * (MAX_TICKET + 1), b"y" * 500])
def test_what_is_no_ticket_sends_the_payload_itself(returned, transport, reports, monkeypatch):
    monkeypatch.setattr(transport._transport, "put", lambda payload: returned)
    assert transport.put(PAYLOAD[:500]) is None
    assert isinstance(reports[0][1], ExtensionError)


def test_an_extension_cannot_change_the_pool(transport, reports, monkeypatch):
    monkeypatch.setattr(transport._transport, "put", lambda payload: payload.__setitem__(0, 7))
    assert transport.put(PAYLOAD) is None
    assert isinstance(reports[0][1], TypeError)
