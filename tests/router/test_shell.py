"""When the router's shell sends its messages."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import (
    Cancel,
    RouterToClient,
    Submit,
    Submitted,
    TerminalAck,
    TokenRun,
    Tokens,
)
from baton.router import shell as shell_module
from baton.router.events import FromClient, ToClient, ToWorker
from baton.router.shell import RouterShell
from baton.runtime.net.loop import Loop

KEY = bytes(16)
SUBMITTED = ToClient(b"client", Submitted(request_id="r", request=KEY, secret=KEY))
TOKENS = ToClient(b"client", Tokens(runs=[TokenRun(KEY, 1, 0, [1])]))


@pytest.fixture
def shell(tmp_path, config, monkeypatch):
    """A router's shell that records its envelopes instead of sending them."""
    loop, context = Loop(), zmq.Context()
    settings = config(
        client_address=f"ipc://{tmp_path}/clients", worker_address=f"ipc://{tmp_path}/workers"
    )
    shell = RouterShell(settings, {}, 1, loop, context)
    sent = shell.sent = []
    decoder = EnvelopeDecoder(RouterToClient)
    for box in (shell._to_clients, shell._to_workers):
        monkeypatch.setattr(box, "_send", lambda peer, frames: sent.append((peer, frames)) or True)
    shell.kinds = lambda: [[type(m) for m in decoder.decode(frames)] for _, frames in sent]
    yield shell
    shell.close()
    context.term()
    loop.close()


def turn(shell, *actions):
    shell._perform(list(actions))
    shell._flush()


def test_an_answer_nobody_waits_for_leaves_with_the_first_tokens(shell):
    turn(shell, SUBMITTED)
    assert not shell.sent
    turn(shell, TOKENS)
    assert shell.kinds() == [[Submitted, Tokens]]


def test_an_action_that_raises_leaves_the_others(shell, monkeypatch):
    def refuse(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(shell._to_clients, "put_patient", refuse)
    turn(shell, SUBMITTED, TOKENS, SUBMITTED, TOKENS)
    assert shell.kinds() == [[Tokens, Tokens]]


def test_it_leaves_alone_when_nothing_follows(shell):
    shell._loop.on_turn_end(shell._flush)
    turn(shell, SUBMITTED, ToWorker(b"worker", TerminalAck(requests=[(KEY, 1)])))
    shell._loop.call_later(0.5, shell._loop.asyncio_loop.stop)
    shell._loop.asyncio_loop.run_forever()
    assert {peer for peer, _ in shell.sent} == {b"client", b"worker"}
    assert not shell._to_clients.waiting and not shell._to_workers.waiting


def test_ended_requests_are_logged_once_and_a_flood_of_refusals_as_a_count(
    shell, context, monkeypatch
):
    lines: list[tuple[str, dict]] = []
    monkeypatch.setattr(
        shell_module._log, "info", lambda event, **fields: lines.append((event, fields))
    )
    monkeypatch.setattr(
        shell_module._log,
        "info_all",
        lambda event, records: lines.extend((event, msgspec.to_builtins(one)) for one in records),
    )
    submit = Submit(request_id="mine", context=context())
    shell._feed(FromClient(b"client", [submit]))
    shell._feed(FromClient(b"client", [Cancel(request_id="mine")]))
    for number in range(9):
        refused = Submit(request_id=f"r{number}", context=context(), pin="wrong")
        shell._feed(FromClient(b"client", [refused]))
    for _ in range(2):
        shell._tell_requests(shell.core.stories.take_fresh())
    names = ("request.ended", "request.refused")
    told = sorted([line for line in lines if line[0] in names], key=lambda line: line[0])
    assert [event for event, _ in told] == ["request.ended", "request.refused"]
    (_, ended), (_, refused) = told
    assert (ended["request_id"], ended["outcome"]) == ("mine", "cancelled")
    assert (refused["request_id"], refused["code"]) == ("r0", "input")
    assert sum(len(str(value)) for value in ended.values()) < 300  # no prompt
