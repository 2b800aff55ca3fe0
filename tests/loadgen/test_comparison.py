"""Configurations from text, the table, equal tokens, and the picture of tails: without a server."""

import json
import math
import xml.etree.ElementTree as ET

import msgspec
import pytest

from baton.loadgen.comparison import Counters, Run, difference, rows, table
from baton.loadgen.modes import MAX_WORKERS, Configuration, parse_configurations, warnings
from baton.loadgen.picture import tails
from baton.loadgen.statistics import CANCELLED, FAILED, OK, Record, percentile
from baton.proto.errors import InputError

SVG = "{http://www.w3.org/2000/svg}"


def record(ttft=0.1, gap=0.01, answer=(5, 6, 7), outcome=OK, arrived=0.0):
    stamps = [(arrived + ttft + gap * at, 1) for at in range(len(answer))]
    end = stamps[-1][0] if stamps else arrived
    return Record(
        arrived, arrived, end, 8, len(answer), stamps=stamps, answer=list(answer), outcome=outcome
    )


def run(name, number, *records, **counters):
    return Run(name, number, list(records), Counters(**counters))


# --------------------------------------------------------------------------- configurations


def test_configurations():
    found = parse_configurations("colocated:4, 1:3,adaptive:2:2,again=1:3,far=tcp://h:1")
    assert found == [
        Configuration("colocated:4", "colocated", 0, 4),
        Configuration("1:3", "disaggregated", 1, 3),
        Configuration("adaptive:2:2", "adaptive", 2, 2),
        Configuration("again", "disaggregated", 1, 3),
        Configuration("far", address="tcp://h:1"),
    ]
    assert [one.workers for one in found] == [4, 4, 4, 4, 0]
    assert found[0].settings() == {"mode": "colocated", "workers": 4}
    assert found[2].settings() == {"mode": "adaptive", "prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2:0,1:1", "'2:0': each number of workers must be at least 1"),
        ("colocated:0,1:1", "'colocated:0': each number"),
        ("1:1", "a comparison has 2 to 16 configurations, not 1"),
        (",".join(f"a{at}=1:1" for at in range(17)), "configurations, not 17"),
        ("1:1,1:1", "'1:1' is there twice; name one of them, as in again=1:1"),
        ("1:1,mixed:1:1", "'mixed:1:1' is not a configuration: colocated:N"),
        ("1:1,colocated:1:1", "not a configuration"),
        ("1:1,adaptive:2", "not a configuration"),
        ("1:1,1:-1", "not a configuration"),
        ("1:1,1:٣", "not a configuration"),
        ("1:1,1:9999999999", "not a configuration"),
        ("1:1,", "'' is not a configuration"),
        ("1:1,a=", "'a=' is not a configuration"),
        ("1:1,a=http://h", "not a configuration"),
        ("1:1,<b>=1:2", "not a configuration"),
        ("1:1,colocated:65", f"has 65 workers; the limit is {MAX_WORKERS}"),
    ],
)
def test_wrong_configurations_have_one_typed_error(text, said):
    with pytest.raises(InputError) as caught:
        parse_configurations(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_warnings_of_unfair_comparisons():
    assert warnings(parse_configurations("1:1,colocated:2"), 2) == []
    assert warnings(parse_configurations("1:1,a=ipc:///x"), 2) == []
    many, unequal = warnings(parse_configurations("colocated:4,1:1"), 2)
    assert many.startswith("colocated:4 has 4 workers, and Baton may use 2 processors")
    assert "different numbers of workers" in unequal


# --------------------------------------------------------------------------- equal tokens


def test_equal_answers_have_no_difference():
    runs = [run("a", 1, record(), record(answer=[9])), run("b", 1, record(), record(answer=[9]))]
    assert difference(runs) == ""
    assert difference([run("a", 1, record()), run("a", 2, record(answer=[1]))]) == ""  # own tokens


def test_the_first_different_token_is_named():
    runs = [
        run("a", 2, record(), record(answer=[5, 6, 7, 8])),
        run("b", 2, record(), record(answer=[5, 6, 1, 8])),
    ]
    said = "the tokens of request 2 in round 2 differ between a and b, from token 3 on"
    assert difference(runs) == said
    short = [run("a", 1, record()), run("b", 1, record(answer=[5, 6]))]
    assert difference(short).endswith("from token 3 on")


def test_a_cut_answer_must_be_a_beginning():
    whole = run("a", 1, record())
    assert difference([whole, run("b", 1, record(answer=[5], outcome=FAILED))]) == ""
    assert difference([whole, run("b", 1, record(answer=[6], outcome=FAILED))])
    cut = run("a", 1, record(answer=[5], outcome=CANCELLED))
    assert difference([cut, run("b", 1, record())]) == ""
    # The longer answer is what later ones are compared with.
    assert "between b and c" in difference(
        [cut, run("b", 1, record()), run("c", 1, record(answer=[5, 7, 7]))]
    )


# --------------------------------------------------------------------------- the table


def cells(lines, title):
    line = next(one for one in lines if one.startswith(title))
    return [one.strip() for one in line.removeprefix(title).split("  ") if one.strip()]


def test_the_table_pools_rounds_and_shows_their_spread():
    runs = [
        run("a", 1, *[record(ttft=0.1)] * 3, local=1, kv_bytes=4 << 20, kv_used=1 << 20),
        run("b", 1, *[record(ttft=0.3)] * 3, handoffs=3, handoff_bytes=10**9, handoff_seconds=0.5),
        run("b", 2, *[record(ttft=0.5)] * 3, handoffs=3, handoff_bytes=10**9, handoff_seconds=1.5),
        run("a", 2, *[record(ttft=0.2)] * 3, local=2, kv_bytes=4 << 20, kv_used=3 << 20),
    ]
    lines = table(runs, slo_ttft=0.4)
    assert lines[0].split() == ["a", "b"]

    assert cells(lines, "TTFT p50, ms") == ["150.0 [100.0-200.0] *", "400.0 [300.0-500.0]"]
    assert cells(lines, "ITL p99, ms") == ["10.0 [10.0-10.0]", "10.0 [10.0-10.0]"]
    assert cells(lines, "in limits, %") == [
        "100.0 [100.0-100.0]",
        "50.0 [0.0-100.0]",
    ]  # rounds overlap
    assert cells(lines, "local requests, %") == ["50.0 [33.3-66.7]", "0.0 [0.0-0.0]"]
    assert cells(lines, "handoff, GB/s") == ["-", "1.00 [0.67-2.00]"]
    assert cells(lines, "KV memory used, MiB")[0] == "3.0 [1.0-3.0]"
    assert cells(lines, "requests") == ["6 ok", "6 ok"]
    assert "better than all others in every round" in lines[-1]


def test_rounds_that_were_sent_late_are_marked():
    late = record()
    late.sent = late.arrived + 0.5
    lines = table([run("a", 1, late), run("b", 1, record()), run("a", 2, record())])
    assert cells(lines, "rounds sent late") == ["1 of 2 !", "-"]
    assert lines[-1].startswith("! this machine was too busy to generate the load")
    assert "late" not in "".join(table([run("a", 1, record()), run("b", 1, record())]))


def test_tokens_of_one_message_explain_an_itl_of_zero():
    grouped = record()
    grouped.stamps = [(0.1, 1), (0.2, 8), (0.3, 8)]
    grouped.tokens = 17
    lines = table([run("a", 1, grouped), run("b", 1, record())])
    assert cells(lines, "ITL p50, ms") == ["0.0", "10.0"]
    assert lines[-1].startswith("ITL p50 is 0: messages had several tokens")
    assert "ITL p50 is 0" not in "".join(table([run("a", 1, record()), run("b", 1, record())]))


def test_goodput_is_over_the_time_of_all_rounds():
    whole = [record(arrived=float(at)) for at in range(5)]  # ends 0.12 s after the last arrival
    lines = table([run("a", 1, *whole), run("a", 2, *whole), run("b", 1, record())], slo_itl=1.0)
    assert cells(lines, "goodput, requests/s")[0] == "1.21 [1.21-1.21]"


def test_a_table_of_one_round_has_no_spread_and_no_best():
    lines = table([run("a", 1, record()), run("b", 1, record(ttft=9.0), record(outcome=FAILED))])
    assert "[" not in "".join(lines) and "*" not in "".join(lines)
    assert not any(line.startswith("goodput") for line in lines)
    assert cells(lines, "requests") == ["1 ok", "1 ok, 1 failed"]


def test_a_table_without_an_answer():
    lines = table([run("a", 1, record(answer=(), outcome=FAILED)), run("b", 1)], 1.0, 1.0)
    assert cells(lines, "TTFT p99, ms") == ["-", "-"]
    assert cells(lines, "goodput, requests/s") == ["0.00", "0.00"]


def test_percentiles_are_those_of_all_requests():
    values = [0.001 * at for at in range(1, 101)]
    first = [run("a", 1, *[record(ttft=one) for one in values[:50]])]
    lines = table([*first, run("a", 2, *[record(ttft=one) for one in values[50:]])])
    assert f"{1000 * percentile(values, 99):.1f} [" in lines[3]


def test_rows_are_json_of_every_request():
    found = list(rows(run("a", 3, record(arrived=7.0), record(arrived=7.5, outcome=FAILED))))
    assert [(one.configuration, one.round, one.request, one.at) for one in found] == [
        ("a", 3, 1, 0.0), ("a", 3, 2, 0.5),
    ]  # fmt: skip
    row = json.loads(msgspec.json.encode(found[0]))
    assert row["ttft"] == pytest.approx(0.1) and row["itl"] == pytest.approx([0.01, 0.01])
    assert row["answer"] == [5, 6, 7] and row["outcome"] == OK


# --------------------------------------------------------------------------- the picture


def test_the_picture_of_tails_is_svg_with_a_curve_per_configuration():
    values = {f"<{at}>": ([0.01 * at, 0.5], [0.0, 0.001 * at, 0.2]) for at in range(1, 10)}
    root = ET.fromstring(tails(values, 1.0, math.inf, title="a & b"))
    assert len(root.findall(f"{SVG}polyline")) == 18
    assert len(root.findall(f"{SVG}line[@class='limit']")) == 1
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert texts.count("<3>") == 2 and "a & b" in texts and "percentile" in texts


def test_curves_end_at_the_largest_value_and_rise():
    root = ET.fromstring(tails({"a": ([0.001 * at for at in range(1, 1001)], [0.01] * 20)}))
    path = root.find(f"{SVG}polyline").get("points")
    heights = [float(point.split(",")[1]) for point in path.split()]
    assert heights == sorted(heights, reverse=True)  # SVG counts from the top
    places = [float(point.split(",")[0]) for point in path.split()]
    assert (places[0], places[-1]) == (70.0, 590.0)


@pytest.mark.parametrize("values", [{}, {"a": ([], [])}, {"a": ([0.1], [])}, {"a": ([9e9], [0.0])}])
def test_pictures_of_few_or_odd_values(values):
    ET.fromstring(tails(values))
