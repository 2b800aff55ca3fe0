"""What calibration requests show, and the model that fits them: synthetic clusters, known truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import json, structs

from baton.forecast.beside import forecast
from baton.forecast.calibration import (
    NOTHING,
    Calibration,
    Handoff,
    Prompt,
    Stream,
    adapted,
    alone_seen,
    beside_seen,
    gaps,
    together_seen,
)
from baton.forecast.cluster import Setup
from baton.forecast.service import ServiceModel, least, read_service
from baton.loadgen.plan import Job
from baton.loadgen.statistics import Record

from .test_beside import prompt

ALONE = ServiceModel(
    prefill_s=0.002, prefill_token_s=2e-4, prefill_pair_s=1e-7, decode_s=0.005,
    decode_sequence_s=1e-4, decode_token_s=1e-6, hidden_s=0.001, kv_token_bytes=1000,
    handoff_rate=1e9,
)  # fmt: skip
LENGTHS = (16, 64, 256)


def cluster(prefill, decode, hop, handoff, beside):
    """What a cluster shows whose steps take these multiples, beside another worker even longer."""
    steps = [(rows, 20.0 * rows, share) for rows in (1, 2, 4) for share in (0.0, 0.8)]
    return Calibration(
        prompts=[
            Prompt(
                tokens=tokens,
                seconds=hop + prefill * ALONE.prefill(tokens, 0) * (1 + beside[0] * others),
                others=others,
            )
            for tokens in LENGTHS
            for others in (0.0, 1.0)
        ],
        streams=[
            Stream(
                rows=rows,
                context=context,
                gaps=[decode * ALONE.step(rows, context) * (1 + beside[1] * share)],
                others=share,
            )
            for rows, context, share in steps
        ],
        handoffs=[Handoff(tokens=tokens, seconds=handoff + tokens * 1e-6) for tokens in LENGTHS],
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "hop", "handoff", "beside"),
    [(1.0, 1.0, 0.0, 0.0, (0.0, 0.0)), (1.4, 1.2, 0.004, 0.003, (0.5, 0.3))],
)
def test_the_truth_is_found_again(prefill, decode, hop, handoff, beside):
    found = adapted(ALONE, cluster(prefill, decode, hop, handoff, beside), cores=2)
    service = found.service
    assert (found.prefill, found.decode) == pytest.approx((prefill, decode))
    assert (service.hop_s, service.handoff_s) == pytest.approx((hop, handoff), abs=1e-9)
    assert (service.prefill_beside, service.decode_beside) == pytest.approx(beside, abs=1e-9)
    assert service.prefill(100, 50) == pytest.approx(prefill * ALONE.prefill(100, 50))
    assert service.mixed(2, 99.0, 64, 1e4) == pytest.approx(
        decode * ALONE.step(2, 99.0) + prefill * (64 * 2e-4 + 1e4 * 1e-7) - decode * ALONE.hidden_s
    )
    assert service.cores == 2 and found.error < 1e-9
    assert f"{prefill:.2f} x" in found.lines()[0] and f"{1e3 * hop:.1f} ms" in found.lines()[1]


def test_prompts_in_chunks_are_scaled_by_what_their_steps_cost():
    alone = replace(ALONE, chunk_s=0.002)
    seen = [Prompt(tokens=n, seconds=0.004 + 1.5 * alone.prefill(n, 0, 64)) for n in LENGTHS]
    streams = [Stream(rows=1, context=20.0, gaps=[alone.step(1, 20.0)])]
    found = adapted(alone, Calibration(prompts=seen, streams=streams, handoffs=[]), 2, chunk=64)
    assert (found.prefill, found.service.hop_s) == pytest.approx((1.5, 0.004))
    assert found.service.chunk_s == pytest.approx(0.003)


def test_fast_and_slow_times_of_equal_requests_count_by_their_mean():
    seen = cluster(1.0, 1.0, 0.0, 0.0, (0.0, 0.0))
    found = adapted(ALONE, scaled(seen, 0.8) + scaled(seen, 1.4), cores=0)
    assert (found.prefill, found.decode) == pytest.approx((1.1, 1.1))


def scaled(seen, factor):
    def times(found):
        return [structs.replace(one, seconds=factor * one.seconds) for one in found]

    streams = [
        structs.replace(one, gaps=[factor * gap for gap in one.gaps]) for one in seen.streams
    ]
    return Calibration(prompts=times(seen.prompts), streams=streams, handoffs=times(seen.handoffs))


def test_a_faster_neighbour_is_none():
    """Beside another worker nothing is faster than alone, whatever noise says."""
    seen = cluster(1.0, 1.0, 0.0, -0.5, (-0.4, -0.2))
    service = adapted(ALONE, seen, cores=2).service
    assert (service.prefill_beside, service.decode_beside, service.handoff_s) == (0.0, 0.0, 0.0)


def test_prompts_whose_times_hardly_grow_are_no_way_to_a_worker():
    """Noise can make the longer one faster: no fit of a way and a multiple then has both."""
    seen = cluster(1.0, 1.0, 0.0, 0.0, (0.0, 0.0))
    flat = replace(ALONE, prefill_token_s=1e-9, prefill_pair_s=0.0)
    prompts = [Prompt(tokens=tokens, seconds=0.003 - 1e-6 * tokens) for tokens in LENGTHS]
    found = adapted(flat, structs.replace(seen, prompts=prompts), cores=2)
    mean = sum(one.seconds for one in prompts) / len(prompts)
    assert found.service.hop_s + found.service.prefill(64, 0) == pytest.approx(mean, rel=0.05)
    assert found.prefill == pytest.approx(mean / 0.002, rel=0.05)
    assert found.error < 0.05


@pytest.mark.parametrize("name", ["prefill_token_s", "decode_s"])
def test_a_model_of_a_faster_cluster_can_be_read_again(name, tmp_path):
    alone = replace(ALONE, **{name: least(name)})
    seen = Calibration(
        prompts=[Prompt(tokens=n, seconds=0.7 * alone.prefill(n, 0)) for n in LENGTHS],
        streams=[Stream(rows=1, context=20.0, gaps=[0.7 * alone.step(1, 20.0)])],
        handoffs=[],
    )
    found = adapted(alone, seen, cores=2)
    file = tmp_path / "times.json"
    file.write_bytes(json.encode({"step_times": found.service}))
    assert read_service(file) == found.service


@pytest.mark.parametrize("lacking", ["prompts", "streams"])
def test_nothing_alone_is_refused(lacking):
    seen = cluster(1.0, 1.0, 0.0, 0.0, (0.0, 0.0))
    parts = {name: getattr(seen, name) for name in ("prompts", "streams", "handoffs")}
    parts[lacking] = [one for one in parts[lacking] if one.others]
    with pytest.raises(ValueError, match="alone"):
        adapted(ALONE, Calibration(**parts), cores=2)


def test_without_prompts_beside_a_stream_there_is_no_contention_to_see():
    seen = cluster(1.2, 1.0, 0.001, 0.0, (0.5, 0.5))
    alone = Calibration(
        prompts=[one for one in seen.prompts if not one.others],
        streams=[one for one in seen.streams if not one.others],
        handoffs=[],
    )
    service = adapted(ALONE, alone, cores=2).service
    assert (service.prefill_beside, service.handoff_s) == (0.0, 0.0)


# --------------------------------------------------------------------------- records


def record(sent, stamps, prompt_tokens=16):
    return Record(
        sent, sent=sent, ended=stamps[-1][0], prompt_tokens=prompt_tokens, stamps=stamps,
        tokens=sum(count for _, count in stamps),
    )  # fmt: skip


def test_a_request_alone_shows_its_prompt_its_steps_and_its_handoff():
    stamps = [(1.1, 1), (1.13, 1), (1.14, 1), (1.16, 2), (1.17, 1)]  # one message with two tokens
    seen = alone_seen(record(1.0, stamps, 64))
    (one,), (stream,), (handoff,) = seen.prompts, seen.streams, seen.handoffs
    assert (one.tokens, one.others) == (64, 0.0) and one.seconds == pytest.approx(0.1)
    assert (stream.rows, stream.context) == (1, 67.0) and stream.seconds == pytest.approx(0.01)
    assert handoff.tokens == 64 and handoff.seconds == pytest.approx(0.02)
    assert alone_seen(record(1.0, stamps[:2])) == NOTHING


def test_streams_count_while_all_of_them_run():
    late = [(2.0, 1), (2.5, 1), (2.52, 1), (2.54, 1), (2.56, 1)]
    early = [(1.0, 1), *((1.1 + 0.01 * number, 1) for number in range(140))] + [
        (2.5 + 0.02 * number, 1) for number in range(3)
    ]
    seen = together_seen([record(0.9, early), record(1.9, late)])
    (stream,) = seen.streams
    assert stream.rows == 2 and stream.seconds == pytest.approx(0.02)
    assert stream.context == pytest.approx(32 + (len(early) + 5) / 2)
    assert gaps([record(0.9, early[:2]), record(1.9, late)]) == []
    assert (
        together_seen([record(0.9, early), record(3.0, [(4.0, 1), (5.0, 1), (6.0, 1)])]) == NOTHING
    )


def test_prompts_count_while_the_stream_runs():
    stream = record(0.9, [(1.0 + 0.01 * number, 1) for number in range(101)])
    prompts = [
        record(0.95, [(1.2, 1)]),  # began before the stream
        record(1.20, [(1.45, 1)], 64),
        record(1.50, [(1.70, 1)], 256),
        record(1.75, [(2.10, 1)]),  # ended after it
    ]
    seen = beside_seen(stream, prompts)
    assert [(one.tokens, one.others) for one in seen.prompts] == [(64, 1.0), (256, 1.0)]
    assert [one.seconds for one in seen.prompts] == pytest.approx([0.25, 0.2])
    (beside,) = seen.streams
    assert beside.others == pytest.approx(0.45 / 0.5) and beside.seconds == pytest.approx(0.01)
    assert beside_seen(stream, prompts[:1]) == NOTHING


def test_contention_and_hops_make_a_forecast_slower():
    """A load that was not measured; every part of the model has its effect."""
    jobs = [Job(0.4 * number, prompt(number, 300), 40) for number in range(10)]
    pools = {"prefill": 1, "decode": 1}
    truth = adapted(ALONE, cluster(1.5, 1.3, 0.005, 0.02, (0.6, 0.4)), cores=2).service
    alone, there = (forecast(jobs, one, pools, Setup()) for one in (ALONE, truth))
    assert there.ttft.mean == pytest.approx(0.005 + 1.5 * ALONE.prefill(300, 0), rel=0.01)
    assert alone.ttft.mean == pytest.approx(ALONE.prefill(300, 0), rel=0.01)
    assert there.tpot.mean > 1.3 * alone.tpot.mean
    crowded = forecast([replace(job, at=job.at / 8) for job in jobs], truth, pools, Setup())
    assert crowded.tpot.mean > 1.1 * there.tpot.mean
