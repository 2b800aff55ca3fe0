import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.deploy.autoscale.metrics import Metrics, RouterSample, WorkerSample
from baton.deploy.autoscale.policy import Autoscaler
from baton.deploy.autoscale.settings import ScaleSettings
from baton.deploy.plan.bounds import Bounds
from baton.proto.errors import ConfigError

from ...suite.short import some_long
from .fluid import BLOCKS, DRAWN_ROWS, HELD, SPEED, EncoderFluid, Fluid, PictureFluid

BOUNDS = Bounds(prefill_min=1, prefill_max=10, decode_min=1, decode_max=6)


def fluid(prefill=2, decode=2, cold_s=30.0, bounds=BOUNDS, **changes):
    wanted = ScaleSettings(bounds=bounds, cold_start=30.0, **changes)
    return Fluid(Autoscaler(wanted, {"prefill": prefill, "decode": decode}), cold_s)


def run(cluster, seconds, tokens, running=0.0):
    for _ in range(seconds):
        now = cluster.now
        targets = cluster.second(
            tokens(now) if callable(tokens) else tokens,
            running(now) if callable(running) else running,
        )
    return targets


def test_prefill_grows_with_its_load_alone():
    cluster = fluid()
    assert run(cluster, 60, 1500, 20) == {"prefill": 2, "decode": 2}
    targets = run(cluster, 120, 4500, 20)
    assert 5 <= targets["prefill"] <= 7
    assert targets["decode"] == 2


def test_prefill_grows_with_the_images_of_its_prompts():
    """The prompts stay as many and as long, but half of their tokens stand for images.

    An image's token takes six times as long as another one. At first only a few have images.
    """
    cluster = fluid(prefill=2)
    for _ in range(200):
        cluster.second(1000, images=30)
    assert cluster.scaler.targets["prefill"] == 2
    for _ in range(40):
        targets = cluster.second(1000, images=500)
    assert 4 <= targets["prefill"] <= 5  # 1000 / 1000 + 500 / 200 workers
    for _ in range(1000):
        targets = cluster.second(1000, images=30)
    assert targets["prefill"] == 2


def test_prefill_grows_with_the_encoding_of_pictures_prompts():
    """As many pictures get negative prompts of three times the length; their own tokens stay."""
    wanted = ScaleSettings(bounds=BOUNDS, cold_start=30.0, window=60.0, calm=60.0)
    cluster = EncoderFluid(Autoscaler(wanted, {"prefill": 2, "decode": 1}))
    targets = run(cluster, 70, 1100)
    assert targets == {"prefill": 2, "decode": 1}
    cluster.prompt *= 4
    targets = run(cluster, 70, 4400)
    assert 5 <= targets["prefill"] <= 7
    assert run(cluster, 150, 1100)["prefill"] == 2


def test_prefill_shrinks_to_what_suffices_after_its_load():
    cluster = fluid(prefill=8)
    run(cluster, 60, 6500)
    assert run(cluster, 1000, 1500)["prefill"] == 2


def test_decode_grows_by_its_blocks_and_shrinks_again():
    cluster = fluid(decode=1, slo_itl=0.1)
    run(cluster, 30, 500, 10)
    full = 2.2 * BLOCKS / HELD
    assert 3 <= run(cluster, 120, 500, full)["decode"] <= 4
    assert run(cluster, 900, 500, 10)["decode"] == 1


def test_decode_grows_by_the_time_between_tokens_long_before_blocks_end():
    loose = fluid(decode=1)
    assert run(loose, 120, 500, lambda now: 15 + now % 5)["decode"] == 1
    tight = fluid(decode=1)
    tight.scaler = Autoscaler(
        ScaleSettings(slo_itl=0.02, bounds=BOUNDS), {"prefill": 2, "decode": 1}
    )
    # 0.01 s + 5e-5 s a block: 200 blocks are the limit, of 1000.
    targets = run(tight, 120, 500, lambda now: 15 + now % 5)
    assert targets["decode"] >= 2


def draw(every_s, seconds_each, seconds=400, cluster=None):
    """Draw a picture every ``every_s`` seconds, with the work of ``seconds_each`` of a worker."""
    settings = ScaleSettings(bounds=BOUNDS, cold_start=30.0, window=120.0, calm=120.0)
    cluster = cluster or PictureFluid(Autoscaler(settings, {"prefill": 1, "decode": 1}))
    sizes = [int(DRAWN_ROWS * seconds_each)]
    targets = [cluster.second([] if n % every_s else sizes) for n in range(seconds)]
    return cluster, targets


def test_decode_grows_with_the_steps_of_pictures_that_hold_few_blocks():
    """Work for two and a half workers: each picture needs 10 s of one, and holds 33 blocks."""
    cluster, targets = draw(4, 10)
    assert set(targets[200:]) <= {3, 4, 5}
    late = [wait for at, wait in cluster.waits if at > 300 and wait > 10 + 2 + 10]
    assert late == []
    _, targets = draw(4, 10, 600, cluster)
    assert len(set(targets[300:])) == 1  # no flapping
    _, targets = draw(10, 1, 600, cluster)
    assert targets[-1] == 1


@pytest.mark.parametrize(("every_s", "seconds_each"), [(2, 1), (60, 30), (20, 10)])
def test_pictures_that_one_worker_draws_in_time_order_no_other(every_s, seconds_each):
    """A step of half a second is far above the ITL target, which is for tokens."""
    cluster, targets = draw(every_s, seconds_each)
    assert set(targets) == {1}
    assert max(wait for _, wait in cluster.waits) <= seconds_each + 2


def test_what_starts_is_not_ordered_again():
    cluster = fluid(cold_s=300.0)
    run(cluster, 30, 1500)
    run(cluster, 60, 5200)
    ordered = cluster.log[-1][1]["prefill"]
    run(cluster, 200, 5200)  # no new worker is ready, so the queue grows
    assert cluster.log[-1][1]["prefill"] <= ordered + 1
    coming = cluster.ready["prefill"] + len(cluster.coming["prefill"])
    assert coming == cluster.log[-1][1]["prefill"]


@pytest.mark.parametrize("load", [2300, 2500, 2700])
def test_an_overload_orders_help_long_before_anything_is_late(load):
    """With a limit of 30 s, up to 200 s pass before the queue of two workers is late."""
    cluster = fluid(prefill=2, slo_ttft=30.0)
    run(cluster, 40 if load > 2500 else 100, load)
    assert cluster.queue / SPEED / 2 < 30
    assert cluster.scaler.targets["prefill"] * SPEED > load
    run(cluster, 300, load)
    assert cluster.queue / SPEED / cluster.ready["prefill"] < 30


@pytest.mark.long
def test_a_worker_that_waits_for_a_host_for_hours_is_no_cold_start():
    cluster = fluid(prefill=2, cold_s=5000.0)
    cluster.scaler.adopt({"prefill": 3}, cluster.now)
    run(cluster, 5100, 1500)
    ahead = cluster.scaler.targets["prefill"]
    run(cluster, 100, ahead * SPEED * 1.02)
    assert cluster.scaler.targets["prefill"] <= ahead + 2


def test_a_single_burst_shorter_than_a_start_orders_nothing():
    cluster = fluid(prefill=3)
    run(cluster, 200, 1000)
    run(cluster, 3, 9000)
    run(cluster, 200, 1000)
    assert not [delta for _, delta in cluster.changes("prefill") if delta > 0]


@pytest.mark.long
def test_bursts_that_come_back_keep_the_pool():
    """The pool does not shrink in three minutes without requests between two bursts."""
    cluster = fluid(prefill=8)
    run(cluster, 1200, lambda now: 7000 if now % 200 < 20 else 100)
    assert min(targets["prefill"] for _, targets in cluster.log) >= 6


@pytest.mark.parametrize("load", some_long(1900, 300, 900, 2500, 3700, 5200, 8800))
def test_constant_load_comes_to_rest(load):
    cluster = fluid(prefill=3, window=60.0, calm=60.0)
    run(cluster, 900, load, load / 100)
    assert cluster.turns("prefill") <= 1
    assert cluster.turns("decode") <= 1
    assert not [when for when, _ in cluster.changes("prefill") if when > 450]


@pytest.mark.parametrize("period", some_long(70, 10, 30, 150, 400))
def test_a_sinusoid_does_not_make_it_oscillate(period):
    cluster = fluid(prefill=5, window=60.0, calm=60.0)
    wave = lambda now: 3000 + 2000 * math.sin(2 * math.pi * now / period)  # noqa: E731
    run(cluster, 1500, wave, lambda now: wave(now) / 50)
    for role in ("prefill", "decode"):
        assert cluster.turns(role) <= 1 + min(1500 / 60, 2 * 1500 / period)
        late = [when for when, _ in cluster.changes(role) if when > 750]
        assert period > 60 or not late  # the window contains whole waves, so one size is right


def test_a_prompt_that_no_pool_computes_in_time_orders_nothing():
    cluster = fluid(prefill=6, window=60.0, calm=60.0)
    cluster.prompt = 4000
    before = cluster.came
    for _ in range(300):  # one prompt of 4 s each 20 s, the limit is 2 s
        cluster.second(4000 if cluster.now % 20 == 0 else 0)
    assert cluster.came > before
    assert cluster.log[-1][1]["prefill"] <= 2


def test_a_limit_that_no_step_keeps_does_not_fill_the_machine():
    cluster = fluid(decode=1)
    cluster.scaler = Autoscaler(
        ScaleSettings(slo_itl=0.005, bounds=BOUNDS), {"prefill": 2, "decode": 1}
    )
    assert run(cluster, 600, 500, 10)["decode"] == 1


def test_a_worker_that_hangs_with_its_queue_grows_the_pool_by_little():
    cluster = fluid(prefill=2)
    run(cluster, 120, 1000)
    cluster.queue = 50_000

    def stuck():
        cluster.queue = 50_000

    for _ in range(600):
        cluster.second(1000)
        stuck()
    assert cluster.log[-1][1]["prefill"] <= 6


# ---------------------------------------------------------------- what cannot be used

DAMAGE = [
    ("prompt_tokens", -5), ("compute_seconds", math.nan), ("compute_seconds", math.inf),
    ("kv_used", 10**9), ("tokens_waiting", -1), ("tokens_waiting", 10**30), ("running", math.nan),
    ("heard_s_ago", 3600.0), ("heard_s_ago", math.nan), ("step_s", -1.0), ("step_s", 1e9),
]  # fmt: skip


def settled():
    cluster = fluid(prefill=4, decode=3, window=60.0, calm=60.0)
    run(cluster, 59, 2500, 60)
    return cluster


@pytest.mark.parametrize(("field", "value"), DAMAGE)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_damaged_figures_move_nothing(field, value, role):
    cluster = settled()
    before = cluster.scaler.targets
    for _ in range(130):
        cluster.now += 1
        metrics = cluster.metrics(1.0)  # an idle pool otherwise
        broken = next(w for w in metrics.workers if w.role == role)
        others = tuple(w for w in metrics.workers if w is not broken)
        changed = dataclasses.replace(broken, **{field: value})
        targets = cluster.scaler.observe(
            dataclasses.replace(metrics, workers=(*others, changed)), cluster.now
        )
        assert targets[role] == before[role]


@pytest.mark.parametrize(
    "change", [{"submitted": -1}, {"queued_tokens": math.nan}, {"started_tokens": 10**40}]
)
def test_damaged_figures_of_a_router_move_nothing(change):
    cluster = settled()
    before = cluster.scaler.targets
    for _ in range(130):
        cluster.now += 1
        metrics = cluster.metrics(1.0)
        router = dataclasses.replace(metrics.routers[0], **change)
        metrics = dataclasses.replace(metrics, routers=(router,))
        assert cluster.scaler.observe(metrics, cluster.now) == before


@pytest.mark.parametrize("metrics", [Metrics(), None])
def test_silence_moves_nothing(metrics):
    cluster = settled()
    before = cluster.scaler.targets
    for second in range(0, 900, 3):
        seen = metrics or dataclasses.replace(cluster.metrics(), routers=())
        assert cluster.scaler.observe(seen, cluster.now + 1 + second) == before


def test_a_worker_that_reports_nothing_keeps_its_pool_as_it_is():
    cluster = settled()
    before = cluster.scaler.targets
    for second in range(1, 130):
        metrics = cluster.metrics()
        silent = WorkerSample(
            name="prefill-9", role="prefill", incarnation=9, ready=True, heard_s_ago=99.0
        )
        metrics = dataclasses.replace(metrics, workers=(*metrics.workers, silent))
        targets = cluster.scaler.observe(metrics, cluster.now + second)
        assert targets["prefill"] == before["prefill"]


@pytest.mark.parametrize("now", [math.nan, math.inf, -1.0, 0.0])
def test_a_clock_that_is_none_moves_nothing(now):
    cluster = settled()
    before = cluster.scaler.targets
    assert cluster.scaler.observe(cluster.metrics(), now) == before


def test_restarted_workers_and_routers_are_no_load():
    cluster = settled()
    before = dict(cluster.scaler.targets)
    metrics = cluster.metrics(60)
    again = tuple(dataclasses.replace(w, incarnation=w.incarnation + 1000) for w in metrics.workers)
    router = dataclasses.replace(metrics.routers[0], life=2.0, submitted=10**6)
    cluster.now += 1
    seen = Metrics(workers=again, routers=(router,))
    assert cluster.scaler.observe(seen, cluster.now) == before


NUMBER = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=True, allow_infinity=True))


@settings(max_examples=60)
@given(data=st.data())
def test_no_figures_whatsoever_leave_the_bounds_or_raise(data):
    scaler = Autoscaler(ScaleSettings(bounds=BOUNDS), {"prefill": 3, "decode": 3})
    now = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.floats(0.0, 30.0))
        workers = []
        for number in range(data.draw(st.integers(0, 4))):
            fields = {
                name: data.draw(NUMBER)
                for name in ("kv_used", "kv_total", "tokens_waiting", "running", "waiting",
                             "prompt_tokens", "cached_tokens", "compute_seconds", "step_s",
                             "heard_s_ago")
                if data.draw(st.booleans())
            }  # fmt: skip
            role = data.draw(st.sampled_from(["prefill", "decode", "router"]))
            workers.append(
                WorkerSample(name=str(number), role=role, incarnation=1, ready=True, **fields)
            )
        router = RouterSample("router", 1.0, *(data.draw(NUMBER) for _ in range(3)))
        targets = scaler.observe(Metrics(tuple(workers), (router,)), now)
        assert 1 <= targets["prefill"] <= 10
        assert 1 <= targets["decode"] <= 6


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["load", "load", "load", "gap", "silence", "nobody", "damage", "back"]),
        st.integers(1, 40),
        st.sampled_from([0.0, 300.0, 300.0, 3000.0, 12_000.0]),
    ),
    min_size=8,
    max_size=25,
)


@settings(max_examples=60)
@given(events=EVENTS, role=st.sampled_from(["prefill", "decode"]))
def test_no_pool_shrinks_within_the_calm_time_of_a_rise_or_of_what_is_unknown(events, role):
    """Gaps of up to an hour, clocks set back, silent routers, empty pools, implausible data."""
    calm = 30.0
    cluster = fluid(prefill=4, decode=3, window=calm, calm=calm)
    quiet_since, before = 0.0, cluster.scaler.targets
    for kind, seconds, load in events:
        times = {"load": seconds, "gap": 1, "back": 1}.get(kind, seconds // 10 + 1)
        for _ in range(times):
            cluster.now += 60.0 * seconds if kind == "gap" else 0
            seen = None
            if kind == "back":
                seen = cluster.scaler.observe(cluster.metrics(load / 100), cluster.now - seconds)
            elif kind in ("load", "gap"):
                seen = cluster.second(load, load / 100)
            else:
                cluster.now += 1
                metrics = cluster.metrics(load / 100)
                others = tuple(w for w in metrics.workers if w.role != role)
                broken = WorkerSample(role + "-0", role, 1, ready=True, compute_seconds=math.nan)
                pool = (broken,) if kind == "damage" else ()
                routers = () if kind == "silence" else metrics.routers
                seen = cluster.scaler.observe(Metrics((*others, *pool), routers), cluster.now)
                quiet_since = cluster.now
            if kind == "gap":
                quiet_since = cluster.now
            assert BOUNDS.least(role) <= seen[role] <= BOUNDS.most(role)
            if seen[role] < before[role]:
                assert cluster.now - quiet_since >= calm
            if seen[role] > before[role]:
                quiet_since = cluster.now
            before = seen


def test_an_overloaded_pool_leaves_the_other_as_it_is():
    cluster = fluid(prefill=2, decode=3)
    run(cluster, 400, 30_000, 40)
    assert cluster.scaler.targets == {"prefill": BOUNDS.prefill_max, "decode": 3}


# ---------------------------------------------------------------- settings, operators


def test_an_operators_choice_is_taken_over():
    cluster = settled()
    cluster.scaler.adopt({"prefill": 9}, cluster.now)
    assert cluster.scaler.targets["prefill"] == 9
    run(cluster, 50, 2500, 60)
    assert cluster.scaler.targets["prefill"] == 9
    run(cluster, 60, 2500, 60)
    assert cluster.scaler.targets["prefill"] < 9


@pytest.mark.parametrize(
    "wrong",
    [
        {"slo_ttft": 0.0}, {"slo_itl": -1.0}, {"slo_ttft": math.nan}, {"keep": 0.0}, {"keep": 1.5},
        {"down_margin": 1.0, "up_margin": 0.9}, {"calm": math.inf},
        {"bounds": Bounds(prefill_min=4, prefill_max=2)},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        ScaleSettings(**wrong)


def test_speed_is_learned_and_not_told():
    assert SPEED == 1000.0
    cluster = fluid()
    run(cluster, 120, 1500)
    assert cluster.scaler._prefill._rate.value == pytest.approx(SPEED, rel=0.05)
