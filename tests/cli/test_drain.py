"""How ``baton drain --wait`` interprets the router's reports."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from baton.cli import down, drain
from baton.cli.command import main
from baton.cli.operator import carry_out
from baton.cli.output import shown_text
from baton.deploy.controller.admin import GoDown, Overview, Progress, Result
from baton.deploy.report import ClusterReport, WorkerReport
from baton.proto.errors import CapacityError, RequestFailed


def worker(state="draining", incarnation=7, **fields) -> WorkerReport:
    return WorkerReport(
        id="decode-1", role="decode", state=state, incarnation=incarnation, **fields
    )


ASKED = worker("ready", endpoint="ipc:///d")


class Reports:
    """A client whose router returns these reports in turn, then repeats the last one."""

    def __init__(self, *workers: list[WorkerReport]) -> None:
        self.reports = list(workers)

    def status(self, handoffs):
        found = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        return {
            "workers": [{name: getattr(w, name) for name in w.__struct_fields__} for w in found]
        }


@pytest.mark.parametrize("last", [[worker("dead", reason="drained")], []], ids=["dead", "unknown"])
def test_each_change_is_shown_until_it_has_left(last, monkeypatch, capsys):
    monkeypatch.setattr(drain, "_PAUSE", 0)
    busy = [worker(requests_running=2, requests_waiting=1)]
    reports = Reports(busy, busy, [worker(requests_running=1)], last)
    drain.wait_left(reports, ASKED, float("inf"))
    assert capsys.readouterr().out.splitlines() == [
        "decode-1: 2 running, 1 waiting",
        "decode-1: 1 running, 0 waiting",
    ]


@pytest.mark.parametrize(
    "found", [worker("dead", reason="no heartbeat for 1.0 s"), worker("ready", incarnation=8)]
)
def test_a_death_is_no_leaving(found):
    with pytest.raises(RequestFailed, match="decode-1 died before it had finished"):
        drain.wait_left(Reports([found]), ASKED, float("inf"))


def test_the_time_can_be_over():
    with pytest.raises(CapacityError, match="has not left after 0 s: 3 running"):
        drain.wait_left(Reports([worker(requests_running=3)]), ASKED, 0.0)


def test_a_worker_is_found_by_id_or_endpoint_while_it_lives():
    report = ClusterReport(workers=[ASKED])
    assert drain.find(report, "decode-1") == drain.find(report, "ipc:///d") == ASKED
    assert drain.find(report, "decode-2") is None
    assert drain.find(ClusterReport(workers=[worker("dead")]), "decode-1") is None


@pytest.mark.parametrize(
    ("other", "last"),
    [([], True), ([("decode", "ready")], False), ([("decode", "draining")], True),
     ([("prefill", "ready")], True)],
)  # fmt: skip
def test_the_last_of_a_pool_is_told_from_others(other, last):
    others = [WorkerReport(id="x", role=role, state=state) for role, state in other]
    assert drain.is_last(ClusterReport(workers=[ASKED, *others]), ASKED) == last


ESCAPE = "x\n\x1b]0;owned\x07\x9b2J"


def test_no_text_of_a_worker_controls_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(drain, "_PAUSE", 0)
    hostile = msgspec.structs.replace(ASKED, id=ESCAPE)
    busy = msgspec.structs.replace(hostile, requests_running=1, state="draining")
    reports = Reports([busy], [])
    drain.wait_left(reports, hostile, float("inf"))
    out = capsys.readouterr().out
    assert out.startswith("x??]0;owned??2J: ")
    assert all(line.isprintable() for line in out.splitlines())


@pytest.mark.parametrize("kind", [RequestFailed, OSError])
def test_no_error_of_another_process_controls_the_terminal(kind, monkeypatch, capfd):
    def run(_: object) -> int:
        raise kind(ESCAPE)

    monkeypatch.setattr(drain, "run", run)
    assert main(["drain", "decode-1"]) == 1
    assert capfd.readouterr().err == "baton: x??]0;owned??2J\n"


def test_no_answer_of_a_controller_controls_the_terminal(capsys):
    class Controller:
        def ask(self, *_: object, **__: object) -> list[Progress | Result]:
            return [Progress(number=1, text=ESCAPE), Result(number=1, text=ESCAPE)]

    down.end(Controller(), Overview(settings={}), at_once=True)
    carry_out(Controller(), GoDown(number=1), wait=True)
    out = capsys.readouterr().out
    assert out.splitlines() == ["x??]0;owned??2J"] * 3


def test_a_model_controls_no_terminal_but_writes_all_to_a_file(monkeypatch):
    text = "a\n\tb\u200d\u00a0" + ESCAPE
    assert shown_text(text) == text
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert shown_text(text) == "a\n\tb\u200d\u00a0x\n?]0;owned??2J"
