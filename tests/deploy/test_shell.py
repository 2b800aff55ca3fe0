"""The controller's shell: after a failed action it still handles events."""

from types import SimpleNamespace

import pytest
import zmq

from baton.deploy.controller.admin import Overview
from baton.deploy.controller.core import ControllerCore
from baton.deploy.controller.events import Begin, Down
from baton.deploy.controller.pools import ControllerLimits
from baton.deploy.controller.shell import ControllerShell
from baton.deploy.plan.bounds import Bounds
from baton.runtime.net.loop import Loop


class Clumsy:
    """A backend that fails for one member, with a roster of all members."""

    def __init__(self):
        self.started, self.ended = [], []

    def start(self, spec):
        if spec.name == "prefill-0":
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


@pytest.mark.integration
def test_an_action_that_fails_keeps_neither_others_nor_later_events_from_their_turn():
    loop, context, clumsy = Loop(), zmq.Context(), Clumsy()
    core = ControllerCore({"prefill": 1, "decode": 1}, ["router"], ControllerLimits(), Bounds())
    shell = ControllerShell(
        loop, context, core, clumsy, lambda _emit: clumsy, {}, Overview(), lambda _log: None
    )
    shell.feed(Begin())
    assert clumsy.started == ["router", "decode-0"]
    assert loop.callback_errors == 1
    shell.feed(Down())
    shell.feed(Down())
    assert "decode-0" in clumsy.ended
    shell.close()
    context.destroy(linger=0)
    loop.close()
