"""The controller's shell: an exception ends a start with one line, and a stop always works."""

from types import SimpleNamespace

import pytest
import zmq

from baton.deploy.controller.admin import Overview
from baton.deploy.controller.backend import MemberEnded
from baton.deploy.controller.core import ControllerCore
from baton.deploy.controller.events import Begin, Down
from baton.deploy.controller.pools import ControllerLimits
from baton.deploy.controller.shell import Contacts, ControllerShell
from baton.deploy.messages import FAILURES, sentence
from baton.deploy.plan.bounds import Bounds
from baton.deploy.supervise.core import Log, Phase, Tick
from baton.runtime.net.loop import Loop


class Clumsy:
    """A backend that fails for one member, with a roster of all members."""

    def __init__(self, fails="prefill-0"):
        self.started, self.ended = [], []
        self.fails = fails

    def start(self, spec):
        if spec.name == self.fails:
            raise RuntimeError("planted")
        self.started.append(spec.name)

    def stop(self, name, grace):
        self.ended.append(name)

    def kill(self, name):
        self.ended.append(name)

    def request(self, bundles):
        pass

    def spec(self, name, role, revision, gateways):
        return SimpleNamespace(name=name, role=role)


def describe_lines(lines):
    return [sentence(line) for line in lines if line.event in FAILURES]


@pytest.fixture
def started(monkeypatch):
    """Start a controller's shell on a backend, and end it."""
    loop, context = Loop(), zmq.Context()
    lines: list[Log] = []
    core = ControllerCore({"prefill": 1, "decode": 1}, ["router"], ControllerLimits(), Bounds())

    def start(backend):
        contacts = Contacts({}, Overview(), lines.append)
        shell = ControllerShell(loop, context, core, backend, lambda _emit: backend, contacts)
        shell.lines, shell.loop = lines, loop
        shell.feed(Begin())
        return shell

    yield start
    context.destroy(linger=0)
    loop.close()


@pytest.mark.integration
def test_a_start_that_raises_ends_with_one_line_and_the_other_actions_are_done(started):
    clumsy = Clumsy()
    shell = started(clumsy)
    assert clumsy.started == ["router", "decode-0"]
    (line,) = describe_lines(shell.lines)
    assert line == "prefill-0 cannot run: cannot be started: RuntimeError: planted"
    assert {"router", "decode-0"} <= set(clumsy.ended)
    for name in ("router", "decode-0"):
        shell.feed(MemberEnded(name, 0))
    assert shell.exit_code == 1


@pytest.mark.integration
@pytest.mark.parametrize("event", [Tick(), Down()], ids=["in the start", "at the stop"])
def test_a_core_that_raises_ends_the_start_and_the_stop(started, monkeypatch, event):
    """Also if no decision can be made any more, the children are killed and the loop ends."""
    steady = Clumsy(fails="")
    shell = started(steady)
    if isinstance(event, Down):
        shell.core.phase = Phase.SERVING

    def broken(_event, _now):
        raise ValueError("planted\nin two lines")

    monkeypatch.setattr(shell.core, "handle", broken)
    shell.feed(event)
    assert shell.exit_code == 1
    (line,) = describe_lines(shell.lines)
    assert line == "stopped by an internal error: ValueError: planted in two lines"
    assert set(steady.ended) >= {"router", "prefill-0", "decode-0"}
    shell.loop.run()  # ends, because the shell has stopped it


@pytest.mark.integration
def test_a_core_that_raises_while_the_cluster_serves_ends_nothing(started, monkeypatch):
    steady = Clumsy(fails="")
    shell = started(steady)
    shell.core.phase = Phase.SERVING
    monkeypatch.setattr(shell.core, "handle", lambda *_: {}["planted"])
    shell.feed(Tick())
    assert shell.exit_code is None and not steady.ended


@pytest.mark.integration
def test_a_stop_that_raises_kills(started):
    steady = Clumsy(fails="")
    shell = started(steady)
    steady.stop = lambda name, grace: {}["planted"]
    shell.feed(Down())
    assert set(steady.ended) == {"prefill-0", "decode-0", "router"}


@pytest.mark.integration
def test_members_that_never_end_do_not_keep_the_controller(started, monkeypatch):
    shell = started(Clumsy(fails=""))
    now = [100.0]
    monkeypatch.setattr(shell.loop, "now", lambda: now[0])
    shell._tick()
    shell.feed(Down())
    for _ in range(60):
        now[0] += 0.5
        shell._tick()
    assert shell.exit_code == 1
    assert "did not end in time" in describe_lines(shell.lines)[-1]


@pytest.mark.integration
def test_an_autoscaler_that_raises_does_not_stop_the_clock(started, monkeypatch):
    shell = started(Clumsy(fails=""))
    seen = []
    shell._pilot = SimpleNamespace(pause=lambda now: {}["planted"])
    monkeypatch.setattr(shell, "feed", seen.append)
    shell._tick()
    assert seen == [Tick()]
