"""Run ``baton serve`` with children that raise exceptions; the supervisor and controller too."""

from __future__ import annotations

import sys

import msgspec

from baton.cli.__main__ import main
from baton.deploy.controller.core import ControllerCore
from baton.deploy.supervise import children
from baton.deploy.supervise.core import Phase, SupervisorCore, Tick
from baton.deploy.supervise.process import Child

from .planted import every


class FaultyChild(Child):
    """A child that runs the program with planted exceptions."""

    def __init__(self, spec, *arguments):
        super().__init__(msgspec.structs.replace(spec, module="tests.cluster.faulty"), *arguments)


if __name__ == "__main__":
    children.Child = FaultyChild
    every(SupervisorCore, "handle", chosen=lambda _core, event, _now: type(event) is Tick)
    # While the cluster starts, an exception of the controller ends the start.
    every(ControllerCore, "handle", chosen=lambda core, event, _now: core.phase is Phase.SERVING)
    sys.exit(main())
