"""Children whose start or whose handling raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.config import ServeSettings, check
from baton.deploy.controller.backend import MemberEnded
from baton.deploy.local.run_folder import RunFolder
from baton.deploy.supervise.children import Children, Output
from baton.deploy.supervise.core import Log, SupervisorCore
from baton.deploy.supervise.process import ProcessSpec
from baton.proto.errors import ConfigError
from baton.runtime.net.loop import Loop


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def folder():
    folder = RunFolder(None)
    yield folder
    folder.close()


def run(loop, seconds=0.5):
    loop.call_later(seconds, loop.asyncio_loop.stop)
    loop.asyncio_loop.run_forever()


def make_children(loop, folder, events):
    output = Output(lambda _line: None, "info")
    return Children(loop, SupervisorCore(), lambda: folder, output, events.append)


@pytest.mark.integration
def test_a_path_that_is_not_utf_8_ends_the_start_of_its_child(loop, folder):
    events: list[object] = []
    children = make_children(loop, folder, events)
    settings = ServeSettings(model="m\udcff")
    children.start(
        ProcessSpec(name="router", role="router", module="baton.router", config=settings)
    )
    run(loop)
    (ended,) = events
    assert isinstance(ended, MemberEnded) and ended.refused
    assert "UnicodeEncodeError" in ended.reason
    children.stop("router", 0.0)  # and nothing is left to stop


@pytest.mark.integration
def test_an_action_that_raises_keeps_no_other_action_from_its_turn(loop, folder, monkeypatch):
    children = make_children(loop, folder, [])
    seen = []
    monkeypatch.setattr(children, "_out", lambda line: seen.append(line) or {}["planted"])
    lines = [Log("back", "prefill-0"), Log("back", "decode-0")]
    monkeypatch.setattr(children._core, "handle", lambda _event, _now: lines)
    run(loop, 0.35)
    assert len(seen) >= 4 and loop.callback_errors == len(seen)


def test_a_setting_that_is_not_utf_8_is_named():
    with pytest.raises(ConfigError, match=r"^model is not valid UTF-8: 'm\\udcff'$"):
        check(ServeSettings(model="m\udcff"))
    check(ServeSettings(model=str(Path("/models/ä 模型"))))
