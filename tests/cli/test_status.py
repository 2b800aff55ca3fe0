"""The lines of ``baton status`` above its table."""

import msgspec

from baton.cli.status import describe, describe_controller
from baton.deploy.controller.admin import MemberLine, Overview
from baton.deploy.report import ClusterReport, ExtensionReport, RouterReport, WorkerReport

FOUND = Overview(
    targets={"prefill": 1, "decode": 2},
    members=[
        MemberLine(name="router", role="router", stage="ready", revision=0),
        MemberLine(name="prefill-0", role="prefill", stage="ready", revision=0),
        MemberLine(name="decode-0", role="decode", stage="ready", revision=0),
        MemberLine(name="decode-1", role="decode", stage="ready", revision=0),
    ],
)


def report(**states: str) -> ClusterReport:
    return ClusterReport(
        workers=[
            WorkerReport(id=name.replace("_", "-"), role=name.partition("_")[0], state=state)
            for name, state in states.items()
        ]
    )


def test_a_worker_that_a_router_suspects_is_not_ready_above_the_table():
    well = report(prefill_0="ready", decode_0="ready", decode_1="ready")
    suspects = report(prefill_0="ready", decode_0="ready", decode_1="suspect")
    assert describe_controller(FOUND, [well])[-1] == "decode       2 of 2 ready"
    for reports in ([suspects], [suspects, well], [well, suspects]):
        assert describe_controller(FOUND, reports) == [
            "router       1 of 1 ready",
            "prefill      1 of 1 ready",
            "decode       1 of 2 ready  (1 suspect)",
        ]


def test_without_a_router_the_controllers_view_stands_alone():
    assert describe_controller(FOUND)[-1] == "decode       2 of 2 ready"


def test_users_classes_are_shown_with_their_failures():
    policy = ExtensionReport(
        point="policy", name="own:Rack", calls=16, failures=3, skipped=2, error="KeyError: 'rack'"
    )
    order = ExtensionReport(point="prefill_order", name="own:Short", calls=1)
    worker = WorkerReport(id="prefill-0", role="prefill", extensions=[order])
    lines = describe(ClusterReport(router=RouterReport(extensions=[policy]), workers=[worker]))
    assert (
        "policy       own:Rack: 16 calls, 3 failed, the last by KeyError: 'rack', 2 skipped"
    ) in lines
    assert "prefill_order own:Short at prefill-0: 1 call" in lines


def test_no_text_of_a_process_controls_the_terminal():
    escape = "x\n\x1b]0;owned\x07"
    own = ExtensionReport(point=escape, name=escape, failures=1, error=escape)
    worker = WorkerReport(
        id=escape, role=escape, state=escape, endpoint=escape, dropped={escape: 1},
        extensions=[own],
    )  # fmt: skip
    lines = describe(ClusterReport(workers=[worker]), verbose=True, memory=escape)
    overview = msgspec.structs.replace(FOUND, rollout=escape, problems=[escape])
    lines += describe_controller(overview)
    assert sum("x??]0;owned?" in line for line in lines) >= 6
    assert all(line.isprintable() for line in lines)
