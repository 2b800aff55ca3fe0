"""Arrival times, prompts, traces and the picture: all without a server."""

import gzip
import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from baton.loadgen.picture import picture, ticks
from baton.loadgen.plan import (
    Lengths,
    Shape,
    constant,
    fitting,
    poisson,
    random_jobs,
    trace_jobs,
)
from baton.loadgen.statistics import OK, Record, summarize
from baton.loadgen.traces import Arrival, read_trace
from baton.proto.errors import ConfigError, InputError

SHAPE = Shape(Lengths(4, 9), Lengths(2, 2), 0.25, 0.5, vocabulary=50)
SHIPPED = Path(__file__).parents[2] / "benchmarks" / "traces" / "azure2023_code.csv.gz"


def test_arrivals():
    assert constant(4.0, 3) == [0.0, 0.25, 0.5]
    times = poisson(20.0, 20_000, seed=1)
    assert times == poisson(20.0, 20_000, seed=1) != poisson(20.0, 20_000, seed=2)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.05, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential


def test_lengths():
    assert (Lengths.parse("64"), Lengths.parse("8-16")) == (Lengths(64, 64), Lengths(8, 16))
    assert str(Lengths.parse("64")) == "64" and str(Lengths.parse("8-16")) == "8-16"
    for wrong in ("", "x", "0", "9-8", "-3", "1-", "99999999"):
        with pytest.raises(InputError):
            Lengths.parse(wrong)
    assert fitting(100, 20, 0) == (100, 20)
    assert fitting(100, 20, 60) == (40, 20)
    assert fitting(100, 80, 60) == (1, 59)


def test_jobs_are_the_seeds():
    jobs = list(random_jobs(SHAPE, [None] * 400, 7))
    again = list(random_jobs(SHAPE, [None] * 400, 7))
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(jobs, again, strict=True))
    assert {len(job.prompt) for job in jobs} == set(range(4, 10))
    ids = np.concatenate([job.prompt for job in jobs])
    assert ids.dtype == np.int32 and (ids.min(), ids.max()) == (10, 49)
    assert 70 < sum(job.cancel_after == 0.5 for job in jobs) < 130
    assert {job.cancel_after for job in jobs} == {None, 0.5}


def test_a_request_for_embeddings_has_texts_of_one_length_within_the_context():
    shape = Shape(Lengths(4, 90), Lengths(9, 9), vocabulary=50, longest=40, texts=3)
    jobs = list(random_jobs(shape, [None] * 100, 7))
    assert {job.texts for job in jobs} == {3}
    lengths = {len(job.prompt) for job in jobs}
    assert max(lengths) == 3 * 40 and all(length % 3 == 0 for length in lengths)


def test_a_traces_prefixes_times_and_lengths():
    one, two = b"1".ljust(8, b"\0"), b"2".ljust(8, b"\0")
    trace = [
        Arrival(5.0, 1300, 100, (one, two)),
        Arrival(6.0, 1200, 100, (one,)),
        Arrival(9.0, 600, 1, ()),
    ]
    jobs = list(trace_jobs(trace, Shape(Lengths(1, 1), Lengths(1, 1)), 3, speed=2.0, scale=0.1))
    assert [job.at for job in jobs] == [0.0, 0.5, 2.0]
    assert [(len(job.prompt), job.output) for job in jobs] == [(130, 10), (120, 10), (60, 1)]
    first, second, third = (job.prompt for job in jobs)
    assert np.array_equal(first[:51], second[:51])  # a block of 512 tokens, scaled
    assert not np.array_equal(first[51:102], second[51:102])
    assert not np.array_equal(second[51:60], third[51:60])


FORMATS = {
    "shipped.csv": "timestamp_ms,input_length,output_length,hash_ids\n0,5,6,\n1500,7,8,\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [3]}\n'
    '{"timestamp": 1500, "input_length": 7, "output_length": 8, "hash_ids": [3, 4]}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,5,6\n2023-11-16 18:15:48.1805900,7,8\n",
    "azure2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 00:00:01.509930+00:00,7,8\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,5,6,11,API log\n5.5,ChatGPT,9,0,9,API log\n6.5,GPT-4,7,8,15,API log\n",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_formats_of_public_traces(tmp_path, name, packed):
    path = tmp_path / (f"{name}.gz" if packed else name)
    content = FORMATS[name].encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    trace = read_trace(path)
    assert [(one.prompt, one.output) for one in trace] == [(5, 6), (7, 8)]
    assert [one.at for one in trace] == pytest.approx([0.0, 1.5], abs=1e-6)
    assert len(read_trace(path, most=1)) == 1


def test_the_shipped_traces_and_wrong_files(tmp_path):
    trace = read_trace(SHIPPED, most=500)
    assert len(trace) == 500 and all(a.at <= b.at for a, b in pairwise(trace))
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")
    for name, content in (("a.csv", b"a,b\n1,2\n"), ("b.jsonl", b"[1]\n"), ("c.csv", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"trace|requests"):
            read_trace(tmp_path / name)
    (tmp_path / "d.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "d.csv.gz")


LONG = b"timestamp_ms,input_length,output_length\n0,5,5\n" + b"9" * (1 << 21)


PACKED = gzip.compress(LONG, mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.csv.gz", PACKED[:-9]),
        ("damaged.csv.gz", PACKED[:20] + b"\xff" * 40),
        ("long.csv", LONG),  # a line without an end
        ("bomb.csv.gz", PACKED),
        ("nul.csv", b"timestamp_ms,input_length,output_length\n0,5,5\n0,\x005,5\n"),
        ("quoted.csv", b'timestamp_ms,input_length,output_length\n"' + b"1\n" * 200_000),
        ("latin.csv", b"timestamp_ms,input_length,output_length\n0,\xe9,5\n"),
        ("deep.jsonl", b"[" * 100_000 + b"\n"),
        ("digits.jsonl", b'{"timestamp": ' + b"1" * 10_000 + b"}\n"),
        ("infinite.jsonl", b'{"timestamp": Infinity, "input_length": 5, "output_length": 5}\n'),
        ("list.jsonl", b'{"timestamp": 0, "input_length": [5], "output_length": 5}\n'),
        ("ids.jsonl", b'{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": 3}\n'),
        ("back.csv", b"timestamp_ms,input_length,output_length\n9,5,5\n0,5,5\n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_traces_are_one_typed_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises((InputError, ConfigError)) as caught:
        read_trace(path)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_the_number_of_requests_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.loadgen.traces.MAX_REQUESTS", 10)
    path = tmp_path / "many.csv"
    path.write_text("timestamp_ms,input_length,output_length\n" + "0,5,5\n" * 12)
    with pytest.raises(InputError, match="more than 10 requests"):
        read_trace(path)
    assert len(read_trace(path, most=5)) == 5


def test_ticks_are_round_and_reach_the_largest_value():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 7.3) == [0, 2, 4, 6, 8]
    assert ticks(0, 0.041) == [0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert ticks(0, 0)[0] == 0


def test_the_picture_is_svg_with_every_run():
    runs = []
    for load in (1.0, 4.0, 2.0):
        record = Record(0.0, stamps=[(0.01 * load, 1), (0.02 * load, 1)], tokens=2, outcome=OK)
        runs.append(summarize([record], load))
    text = picture(runs, "requests/s", 0.05, 0.03, title="<model> & more")
    root = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}polyline")) == 4 and len(root.findall(f"{name}circle")) == 12
    assert len(root.findall(f"{name}line[@class='limit']")) == 2
    assert "<model> & more" in [one.text for one in root.iter(f"{name}text")]
    ET.fromstring(picture([summarize([], 1.0)], "x"))
    json.dumps(text)
