"""A policy, decider and metric of the user's own; each failure costs at most a default choice."""

import itertools
import re
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.extend import Ended, ExtensionError, WorkerFacts, points
from baton.proto.errors import ConfigError
from baton.proto.wire.messages import Assign, ExtensionCounts, Status, StatusReport, WorkerLoad
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.router.config import PolicyConfig
from baton.router.custom import Extensions
from baton.router.records import Caller
from baton.router.story_report import RequestLine
from baton.runtime.metrics.exposition import exposition
from baton.runtime.metrics.families import Family, Histogram, Row, counter, gauge, histogram

from .conftest import Bench
from .test_local import ALONE
from .test_stories import told

ROOT = Path(__file__).parents[2]
FAULTY = str(ROOT / "tests" / "extend")
EXAMPLES = str(ROOT / "examples" / "extend")


@pytest.fixture
def own(make_bench):
    """Make a bench of two racks with a policy of the user's own."""

    def make(name, folder=FAULTY, **settings):
        bench = make_bench(policy=PolicyConfig(name=name), extensions=folder, **settings)
        bench.faulty = True
        for number in range(2):
            bench.join("prefill", number, labels={"rack": f"r{number}"})
            bench.join("decode", number, labels={"rack": f"r{number}"})
        return bench

    return make


def served(bench, count=8, name="r"):
    """Serve requests, and return the pairs of workers."""
    pairs = []
    for number in range(count):
        key = bench.submit(f"{name}{number}")
        prefill, assign = bench.find(Assign)
        prefill.accept(assign)
        pairs.append((prefill.id, bench.decode_of(assign).id))
        prefill.tokens(key, 10, 5)
        prefill.end(key, 11)
    return pairs


def test_the_example_keeps_requests_in_one_rack(own):
    bench = own("rack_policy:RackPolicy", EXAMPLES)
    pairs = []
    for number in range(8):
        _, assign = bench.run(f"r{number}")
        pairs.append(bench.decode_of(assign).id[-1])
        loads = {worker.id: worker.outstanding for worker in bench.core.registry.live()}
        assert [loads[f"prefill-{rack}"] for rack in range(2)] == [
            10 * pairs.count(str(rack)) for rack in range(2)
        ]
    assert set(pairs) == {"0", "1"}


@pytest.mark.parametrize("name", ["Raises", "Exits", "Nonsense"])
def test_a_request_of_a_policy_that_fails_gets_the_defaults_choice(name, own):
    bench = own(f"faulty_classes:{name}")
    assert len(served(bench)) == 8
    assert bench.core.errors.unowned == 0
    assert not bench.core.broken
    counts = {family.name: family.rows for family in bench.core.extensions.families()}
    assert counts["baton_extension_failures_total"] == [
        Row(("policy", f"faulty_classes:{name}"), 16.0)
    ]


def test_its_failure_is_logged_with_the_traceback(own):
    bench = own("faulty_classes:Raises")
    seen = []
    bench._perform = seen.extend
    bench.submit()
    fault = next(action for action in seen if type(action).__name__ == "Fault")
    assert fault.event == "policy.failed"
    assert fault.fields == {"extension": "faulty_classes:Raises"}
    (found,) = msgspec.to_builtins(bench.core.extensions.counts())
    assert found == {
        "point": "policy", "name": "faulty_classes:Raises", "calls": 2, "failures": 2, "skipped": 0,
        "error": "KeyError: 'no rack for r'",
    }  # fmt: skip
    assert fault.error.__traceback__ is not None
    assert any(type(getattr(action, "message", None)) is Assign for action in seen)


def test_a_worker_of_the_past_is_not_chosen(own):
    bench = own("faulty_classes:Remembers")
    served(bench, 2)
    lost, bench.workers = bench.workers[:2], bench.workers[2:]
    for worker in lost:
        worker.gone()
    bench.advance(20.0)
    bench.join("prefill", 2)
    bench.join("decode", 2)
    pairs = served(bench, 4, "later")
    assert not {worker.id for worker in lost} & {name for pair in pairs for name in pair}
    failed, _ = bench.core.extensions.families()
    assert failed.rows[0].value == 8.0


def test_a_slow_policy_rests_and_the_router_goes_on(config):
    settings = config(policy=PolicyConfig(name="faulty_classes:Slow"), extensions=FAULTY)
    clock = iter(range(1_000_000)).__next__  # each call takes a second
    bench = Bench(settings, extensions=Extensions(settings, clock))
    bench.faulty = True
    for number in range(2):
        bench.join("prefill", number)
        bench.join("decode", number)
    served(bench)
    failed, skipped = bench.core.extensions.families()
    assert (failed.rows[0].value, skipped.rows[0].value) == (0.0, 12.0)
    assert not bench.core.broken
    route = route_of(bench, "r1")
    assert route["prefill"]["instead_of"] == "faulty_classes:Slow"
    assert route["prefill"]["because"] == "was skipped"


SECONDS = itertools.count  # each call takes a second


def test_a_slow_decider_rests_and_the_router_decides(config):
    settings = config(mode="adaptive", decider="faulty_classes:Slow", extensions=FAULTY)
    bench = Bench(settings, extensions=Extensions(settings, SECONDS().__next__))
    bench.faulty = True
    bench.join("prefill", model=ALONE)
    bench.join("decode", model=ALONE)
    ways = []
    for number in range(4):
        bench.submit(f"r{number}", prompt=100)
        ways.append(bench.find(Assign)[0].hello.role)
    assert ways == ["decode", "prefill", "prefill", "prefill"]  # the class says local
    failed, skipped = bench.core.extensions.families()
    assert (failed.rows[0].value, skipped.rows[0].value) == (0.0, 3.0)
    assert route_of(bench, "r1")["why"].endswith(", because faulty_classes:Slow was skipped")


def test_a_slow_metric_rests(config):
    settings = config(metrics=("faulty_classes:Slow",), metrics_port=9464, extensions=FAULTY)
    extensions, reports = Extensions(settings, SECONDS().__next__), []
    (metric,) = extensions.metrics(lambda *given: reports.append(given[0]))
    for _ in range(4):
        metric.ended(LINE)
    assert metric.families({}) == []
    (counts,) = extensions.counts()
    assert counts.calls + counts.skipped == 5 and counts.skipped >= 3
    assert counts.failures == 0 and set(reports) == {"metric.slow"}


def route_of(bench, request):
    (story,) = told(bench, request)
    return story["attempts"][0]["route"]


def test_the_story_names_the_class_that_chose(own):
    bench = own("rack_policy:RackPolicy", EXAMPLES)
    served(bench, 1)
    route = route_of(bench, "r0")
    for role in ("prefill", "decode"):
        side = route[role]
        assert (side["chosen_by"], side["candidates"]) == ("rack_policy:RackPolicy", 2)
        assert "cost" not in side


def test_the_story_says_that_the_class_failed(own):
    bench = own("faulty_classes:Raises")
    served(bench, 1)
    side = route_of(bench, "r0")["decode"]
    assert (side["chosen_by"], side["candidates"]) == ("prefix_aware", 2)
    assert (side["instead_of"], side["because"]) == ("faulty_classes:Raises", "failed")
    assert side["next_best"].startswith("decode-")


def test_status_and_metrics_have_the_counts_of_router_and_workers(make_bench):
    callers = {b"client": Caller(b"A", operator=False), b"operator": Caller(b"C", operator=True)}
    bench = make_bench(
        policy=PolicyConfig(name="rack_policy:RackPolicy"), extensions=EXAMPLES,
        caller_of=lambda identity: callers[identity],
    )  # fmt: skip
    prefill, _ = bench.pair()
    counts = ExtensionCounts(
        point="prefill_order", name="own:Short", calls=9, failures=2, skipped=3, error="KeyError: 1"
    )
    prefill.beat(extensions=[counts])
    for identity, error in ((b"operator", "KeyError: 1"), (b"client", "")):
        bench.client(Status(), identity)
        report = msgspec.json.decode(bench.one(identity, StatusReport).report)
        (found,) = report["router"]["extensions"]
        assert (found["point"], found["name"]) == ("policy", "rack_policy:RackPolicy")
        (found,) = next(one for one in report["workers"] if one["id"] == prefill.id)["extensions"]
        assert found == msgspec.to_builtins(counts) | {"error": error}
    families = {family.name: family.rows for family in bench.core.families(bench.now)}
    labels = (prefill.id, "prefill", "prefill_order", "own:Short")
    assert families["baton_worker_extension_failures_total"] == [Row(labels, 2.0)]
    assert families["baton_worker_extension_skipped_calls_total"] == [Row(labels, 3.0)]


def test_names_that_change_with_every_heartbeat_make_few_series(make_bench):
    bench = make_bench()
    prefill, _ = bench.pair()
    name, labels = "baton_worker_extension_failures_total", set()
    for beat in range(20):
        counts = [
            ExtensionCounts(point="p", name=f"own:C{beat}_{number}", failures=beat)
            for number in range(8)
        ]
        prefill.beat(extensions=counts)
        families = {family.name: family.rows for family in bench.core.families(bench.now)}
        labels |= {row.labels for row in families[name]}
    assert len(labels) == 65
    assert families[name] == [Row((prefill.id, "prefill", "other", "other"), 8 * 19.0)]


def test_one_candidate_is_no_choice_of_the_class(make_bench):
    bench = make_bench(policy=PolicyConfig(name="rack_policy:RackPolicy"), extensions=EXAMPLES)
    bench.pair()
    served(bench, 1)
    assert "chosen_by" not in route_of(bench, "r0")["decode"]


def test_one_candidate_needs_no_choice(make_bench):
    bench = make_bench(policy=PolicyConfig(name="faulty_classes:Raises"), extensions=FAULTY)
    bench.pair()
    assert len(served(bench, 2)) == 2


def test_the_facts(own, monkeypatch):
    bench = (
        own("faulty_classes:Remembers", pool_names=None)
        if False
        else own("faulty_classes:Remembers")
    )
    seen = []
    policy = bench.core.placement._policy._policy

    def choose(request, workers):
        seen.append((request, workers))
        return workers[0]

    monkeypatch.setattr(policy, "choose", choose)
    bench.submit(prompt=100, new=7)
    (decode, decodes), (prefill, prefills) = seen
    assert (decode.role, decode.decode, decode.prompt_tokens, decode.max_new_tokens) == (
        "decode", None, 100, 7,
    )  # fmt: skip
    assert prefill.decode.name == decodes[0].name
    assert prefill.request_id == "r"
    assert [worker.name for worker in prefills] == ["prefill-0", "prefill-1"]
    assert prefills[0].labels == {"rack": "r0"}
    assert isinstance(prefills, tuple)
    with pytest.raises(AttributeError):
        prefills[0].name = "another"
    bench.submit("again", prompt=100)
    (_, decodes), _ = seen[2:]
    cached = {worker.name: worker.cached_tokens for worker in decodes}
    assert cached == {"decode-0": 64, "decode-1": 0}
    assert decodes[0].outstanding_tokens == 107
    assert decodes[0].requests == 1


def test_mode_adaptive_keeps_the_choice_of_a_users_policy(own, monkeypatch):
    """Another prefill worker is always free, so its first token would be earlier."""
    bench = own("rack_policy:RackPolicy", EXAMPLES, mode="adaptive")
    policy = bench.core.placement._policy._policy
    monkeypatch.setattr(policy, "choose", lambda _request, workers: workers[-1])
    for worker in bench.workers:
        worker.beat(load=WorkerLoad(prompt_tokens=1000, compute_seconds=1.0))
    for number in range(4):
        bench.submit(f"r{number}", prompt=100)
        prefill, assign = bench.find(Assign)
        assert (prefill.id, bench.decode_of(assign).id) == ("prefill-1", "decode-1")


def test_the_prefix_is_that_of_the_first_tokens_and_the_salt(own, monkeypatch):
    bench = own("faulty_classes:Remembers")
    policy, seen = bench.core.placement._policy._policy, []
    monkeypatch.setattr(policy, "choose", lambda one, them: seen.append(one) or them[0])
    first = list(range(1, 33))
    for name, prompt, salt in (
        ("a", [*first, 7, 8, 9], ""),
        ("b", [*first, 1], ""),
        ("c", [*first, 7, 8, 9], "session-1"),
        ("d", [9, *first], ""),
        ("e", [1, 2, 3], ""),
    ):
        tokens = WireTokens(np.array(prompt, np.int32))
        sampling = WireSampling(max_new_tokens=5)
        context = WireContext(tokens=tokens, sampling=sampling, cache_salt=salt, max_length=4096)
        bench.submit(name, context=context)
    prefixes = {one.request_id: one.prefix for one in seen}
    assert prefixes["a"] == prefixes["b"]
    assert len(set(prefixes.values())) == 4
    assert all(len(one) == 32 for one in prefixes.values())
    assert {one.cache_salt for one in seen} == {"", "session-1"}


def test_the_line_of_the_page_for_session_affinity(own, monkeypatch):
    page = (ROOT / "docs" / "extend.md").read_text()
    (line,) = re.findall(r"^return (max\(.*request\.prefix.*)$", page, re.MULTILINE)
    bench = own("faulty_classes:Remembers")
    policy = bench.core.placement._policy._policy
    choice = eval(f"lambda request, workers: {line}", {"zlib": zlib})
    monkeypatch.setattr(policy, "choose", choice)
    chosen = {}
    for number in range(24):
        first = number % 8
        tokens = WireTokens(np.arange(first, first + 32 + number, dtype=np.int32))
        sampling = WireSampling(max_new_tokens=5)
        bench.submit(
            f"r{number}",
            context=WireContext(tokens=tokens, sampling=sampling, max_length=4096),
        )
        prefill, assign = bench.find(Assign)
        chosen.setdefault(first, set()).add((prefill.id, bench.decode_of(assign).id))
    assert [len(pairs) for pairs in chosen.values()] == [1] * 8
    assert len(set.union(*chosen.values())) > 1


# ------------------------------------------------------------------ decider


@pytest.fixture
def adaptive(make_bench):
    """Make a bench of mode adaptive with a decider of the user's own."""

    def make(name, folder=FAULTY):
        bench = make_bench(mode="adaptive", decider=name, extensions=folder)
        bench.faulty = True
        bench.join("prefill", model=ALONE)
        bench.join("decode", model=ALONE)
        return bench

    return make


@pytest.mark.parametrize(("prompt", "role"), [(100, "decode"), (600, "prefill")])
def test_the_example_decides_by_length(prompt, role, adaptive):
    bench = adaptive("length_decider:LengthDecider", EXAMPLES)
    bench.submit(prompt=prompt)
    worker, _ = bench.find(Assign)
    assert worker.hello.role == role


@pytest.mark.parametrize("name", ["Raises", "Nonsense"])
def test_a_decider_that_fails_costs_a_default_decision(name, adaptive):
    bench = adaptive(f"faulty_classes:{name}")
    bench.submit(prompt=100)
    worker, _ = bench.find(Assign)
    assert worker.hello.role == "prefill"  # as long as no speed is measured
    assert not bench.core.broken
    failed, _ = bench.core.extensions.families()
    assert failed.rows == [Row(("decider", f"faulty_classes:{name}"), 1.0)]
    why = route_of(bench, "r")["why"]
    assert why.startswith("adaptive: ")
    assert why.endswith(f", because faulty_classes:{name} failed")


def test_the_story_names_the_decider(adaptive):
    bench = adaptive("length_decider:LengthDecider", EXAMPLES)
    bench.submit(prompt=100)
    assert route_of(bench, "r")["why"].startswith(
        "adaptive: chosen by length_decider:LengthDecider (Baton: handoff, "
    )
    assert set(bench.core.metrics.local) == {"adaptive"}


# ------------------------------------------------------------------ metric

LINE = RequestLine(
    outcome="finished",
    request_id="r",
    new_tokens=3,
    ttft_s=0.2,
    itl_s=0.01,
    prefill="p",
    decode="d",
)


def metrics(config, name, folder=FAULTY):
    settings = config(metrics=(name,), metrics_port=9464, extensions=folder)
    reports = []
    extensions = Extensions(settings)
    made = extensions.metrics(lambda *given: reports.append(given))
    return made[0], reports


def test_the_example_counts_requests_within_limits(config):
    metric, reports = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    metric.ended(LINE)
    metric.ended(RequestLine(outcome="failed", request_id="s", code="internal"))
    (family,) = metric.families({})
    assert family.rows == [Row(("d", "yes"), 1.0)]
    assert reports == []


@pytest.mark.parametrize("name", ["Raises", "Nonsense"])
def test_a_metric_that_fails_is_left_out(name, config):
    metric, reports = metrics(config, f"faulty_classes:{name}")
    metric.ended(LINE)
    assert metric.families({}) == []
    assert {event for event, *_ in reports} == {"metric.failed"}


@pytest.mark.parametrize(
    "family",
    [
        3,
        gauge("two words", "", 1.0),
        gauge("baton_own", "", 1.0),
        Family("own", "gauge", "", (), [Row(("a",), 1.0)]),
        gauge("own", "", {(3,): 1.0}, ("label",)),
        gauge("own", "", {("a",): 1.0}, ("two words",)),
        gauge("own", "", {("a",): 1.0}, ("le",)),
        gauge("own", "", {("a", "b"): 1.0}, ("label", "label")),
        gauge("own", "", {("a",): 1.0}, (3,)),
        Family("own", "gauge", "", (), [Row((), 1.0), Row((), 2.0)]),
        gauge("own", "", float("nan")),
        gauge("own", "", "3"),
        gauge("own", "", {(str(n),): 1.0 for n in range(1025)}, ("n",)),
        gauge("own", "", 10**400),
        gauge("own", None, 1.0),
        gauge("own", "\ud800", 1.0),
        gauge("own", "x" * 1025, 1.0),
        gauge("own", "", {("\ud800",): 1.0}, ("label",)),
        gauge("own", "", {("x" * 10**7,): 1.0}, ("label",)),
        gauge("own", "", {("x",) * 33: 1.0}, [f"l{n}" for n in range(33)]),
        Family("own", "summary", "", (), [Row((), 1.0)]),
        Family(None, "gauge", "", (), [Row((), 1.0)]),
        Family("own", "gauge", "", (), None),
        Family("own", "histogram", "", (), [Row((), 1.0, [1])], (1.0, 2.0)),
        Family("own", "histogram", "", (), [Row((), 1.0, ["1", "2"])], (1.0,)),
        Family("own", "histogram", "", (), [Row((), 1.0, [1, 2])], ("1",)),
        Family("own", "histogram", "", (), [Row((), 1.0, [1, 2, 3])], (2.0, 1.0)),
        Family("own", "histogram", "", (), [], tuple(map(float, range(257)))),
    ],
)
def test_a_metric_that_no_scrape_could_contain(family, config, monkeypatch):
    metric, reports = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    monkeypatch.setattr(metric._metric, "families", lambda: [family])
    assert metric.families({}) == []
    assert [event for event, *_ in reports] == ["metric.failed"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("two words", "'two words' is no name of a metric: use letters, digits, _ and :"),
        ("baton_own", "baton_own begins with baton_, as only metrics of Baton do"),
    ],
)
def test_the_error_of_a_name_says_what_is_wrong_with_it(name, error, config, monkeypatch):
    metric, reports = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    monkeypatch.setattr(metric._metric, "families", lambda: [gauge(name, "", 1.0)])
    assert metric.families({}) == []
    assert [str(error) for _, error, _ in reports] == [error]


def test_a_metric_gets_the_way_of_a_request_and_nothing_of_its_client(config, monkeypatch):
    metric, _ = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    seen = []
    monkeypatch.setattr(metric._metric, "ended", seen.append)
    metric.ended(msgspec.structs.replace(LINE, way="local", client="c", message="its text"))
    assert [(type(one), one.way) for one in seen] == [(Ended, "local")]


def test_an_endless_metric_is_not_read_to_its_end(config, monkeypatch):
    metric, reports = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    read = []

    def families():
        while len(read) < 1000:
            read.append(1)
            yield gauge(f"own_{len(read)}", "", 1.0)

    monkeypatch.setattr(metric._metric, "families", families)
    assert metric.families({}) == []
    assert len(read) == 65
    assert "more than 64 metrics" in str(reports[0][1])


def test_counters_and_histograms_pass(config, monkeypatch):
    metric, _ = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    times = Histogram((1.0, 2.0))
    times.observe(1.5)
    found = [counter("own_total", "", 1.0), histogram("own_seconds", "", times)]
    monkeypatch.setattr(metric._metric, "families", lambda: found)
    assert metric.families({}) == found
    assert b'own_seconds_bucket{le="2.0"} 1.0' in exposition(metric.families({}))


def test_a_metric_that_passed_cannot_change_before_it_is_shown(config, monkeypatch):
    metric, _ = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    family = gauge("own", "", 1.0)
    monkeypatch.setattr(metric._metric, "families", lambda: [family])
    found = metric.families({})
    family.rows.append(Row((None,), "x"))
    assert b"own 1.0" in exposition(found)


@pytest.mark.parametrize(
    "family",
    [counter("own_total", "", 1.0), counter("own", "", 1.0), gauge("own_total", "", 1.0)],
)
def test_the_name_of_another_metric_is_reported(family, config, monkeypatch):
    metric, reports = metrics(config, "slo_metric:SloMetric", EXAMPLES)
    monkeypatch.setattr(metric._metric, "families", lambda: [family])
    assert metric.families({"own_total": "another:Class"}) == []
    ((event, error, _),) = reports
    assert event == "metric.failed"
    assert str(error) == "own_total is the name of two metrics; the other is of another:Class"


def test_two_classes_with_one_name(config, monkeypatch):
    settings = config(metrics=("slo_metric:SloMetric",) * 2, metrics_port=9464, extensions=EXAMPLES)
    reports = []
    first, second = Extensions(settings).metrics(lambda *given: reports.append(given))
    taken = {}
    assert len(first.families(taken)) == 1
    assert second.families(taken) == []
    assert "the other is of slo_metric:SloMetric" in str(reports[0][1])


def test_ended_has_every_field_of_the_log_line():
    kept = set(RequestLine.__struct_fields__) - {"request", "client", "gateway", "message"}
    assert set(Ended.__struct_fields__) == kept
    assert WorkerFacts(name="w", role="prefill").labels == {}


@pytest.mark.parametrize("facts", ["Ended", "Ways", "Prompt"])
def test_the_page_shows_how_a_test_makes_facts(facts):
    page = (ROOT / "docs" / "extend.md").read_text()
    (call,) = re.findall(rf"`({facts}\(request_id=[^`]*\))`", page)
    assert eval(call, vars(points)).request_id == "r"


# ------------------------------------------------------------------ settings


def test_a_class_that_is_missing_is_an_error_at_the_start(make_bench):
    with pytest.raises(ExtensionError, match="has no Gone"):
        make_bench(policy=PolicyConfig(name="faulty_classes:Gone"), extensions=FAULTY)


def test_a_decider_needs_mode_adaptive(config):
    with pytest.raises(ConfigError, match="decider needs mode adaptive"):
        config(decider="length_decider:LengthDecider")


def test_a_metric_needs_a_port_for_scrapes(config):
    with pytest.raises(ConfigError, match="metrics needs metrics_port"):
        config(metrics=("slo_metric:SloMetric",), extensions=EXAMPLES)
