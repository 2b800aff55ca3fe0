import msgspec
import pytest

from baton.deploy.autoscale.pilot import Pilot, metrics_of
from baton.deploy.autoscale.settings import ScaleSettings
from baton.deploy.config import ServeSettings, check
from baton.deploy.plan.bounds import Bounds
from baton.deploy.report import ClusterReport, RouterReport, WorkerReport, parse_report
from baton.proto.errors import ConfigError

BOUNDS = Bounds(prefill_max=6, decode_max=6)
SETTINGS = ScaleSettings(bounds=BOUNDS, window=20.0, calm=20.0)


def report(decodes=2, used=10, came=0):
    workers = [
        WorkerReport(
            id=f"decode-{n}", role="decode", state="ready", incarnation=n + 1, step_s=0.01,
            kv_blocks_total=100, kv_blocks_used=used, requests_running=used // 5,
        )
        for n in range(decodes)
    ]  # fmt: skip
    prefill = WorkerReport(
        id="prefill-0",
        role="prefill",
        state="ready",
        prompt_tokens=came,
        compute_seconds=came / 1e3,
    )
    body = {"requests": {"submitted": came // 100}, "prompt_tokens": came, "queued_tokens": 0}
    plain = msgspec.to_builtins(ClusterReport(workers=[*workers, prefill]))
    return parse_report(msgspec.json.encode({**plain, "router": body}))


def steer(pilot, seconds, targets, start=0.0, routers=("router",), **figures):
    """Apply the decision of every second at once."""
    targets = dict(targets)
    for second in range(seconds):
        now = start + second
        for name in routers:
            pilot.reported(name, report(targets["decode"], came=int(now) * 100, **figures), now)
        measured = pilot.decide(targets, now)
        targets |= measured.targets if measured else {}
    return targets


def test_reports_become_targets():
    pilot = Pilot(SETTINGS, ["router"], {"prefill": 1, "decode": 2})
    grown = steer(pilot, 30, {"prefill": 1, "decode": 2}, used=95)
    assert grown["decode"] > 2
    # The present workers are almost idle.
    assert steer(pilot, 120, grown, start=30.0, used=5)["decode"] == 1


def test_the_work_of_images_and_pictures_is_read_from_reports():
    images = {"image_tokens": 8, "queued_image_tokens": 5}
    texts = {"encoder_tokens": 90, "queued_encoder_tokens": 20}
    router = RouterReport(picture_rows=70, queued_picture_rows=30, **images, **texts)
    worker = WorkerReport(
        id="decode-0", role="decode", step_rows=40, image_tokens=3, encode_seconds=0.5,
        encoder_tokens=60,
    )  # fmt: skip
    found = metrics_of({"router": ClusterReport(workers=[worker], router=router)})
    assert (found.routers[0].picture_rows, found.routers[0].queued_rows) == (70, 30)
    assert (found.routers[0].image_tokens, found.routers[0].queued_image_tokens) == (8, 5)
    assert (found.routers[0].encoder_tokens, found.routers[0].queued_encoder_tokens) == (90, 20)
    (worker,) = found.workers
    assert worker.encoder_tokens == 60
    assert (worker.step_rows, worker.image_tokens, worker.encode_seconds) == (40, 3, 0.5)


def test_while_a_router_is_silent_nothing_is_decided():
    pilot = Pilot(SETTINGS, ["router-0", "router-1"], {"prefill": 1, "decode": 2})
    targets = {"prefill": 1, "decode": 2}
    assert steer(pilot, 100, targets, routers=("router-0",), used=99) == targets


def test_a_report_that_is_not_renewed_counts_as_silence():
    pilot = Pilot(SETTINGS, ["router"], {"prefill": 3, "decode": 3})
    targets = steer(pilot, 12, {"prefill": 3, "decode": 3}, used=5)
    for second in range(12, 300):
        assert pilot.decide(targets, float(second)) is None


def test_what_an_operator_sets_is_taken_over():
    pilot = Pilot(SETTINGS, ["router"], {"prefill": 1, "decode": 1})
    targets = steer(pilot, 10, {"prefill": 1, "decode": 1}, used=5)
    assert steer(pilot, 15, targets | {"decode": 4}, start=10.0, used=5)["decode"] == 4


def test_a_worker_two_routers_know_is_counted_once_as_heard_last():
    old, new = (
        ClusterReport(workers=[WorkerReport(id="decode-0", role="decode", heard_s_ago=s)])
        for s in (3.0, 0.1)
    )
    (worker,) = metrics_of({"router-0": old, "router-1": new}).workers
    assert worker.heard_s_ago == 0.1


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"autoscale": "yes"}, "autoscale"), ({"autoscale": "on"}, "prefill_max"),
        ({"autoscale": "on", "prefill_max": 2}, "decode_max"), ({"slo_ttft": 0.0}, "slo_ttft"),
        ({"slo_itl": float("nan")}, "slo_itl"),
        ({"stabilization_window": -1.0}, "stabilization_window"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong, names):
    with pytest.raises(ConfigError, match=names):
        check(ServeSettings(**wrong))
