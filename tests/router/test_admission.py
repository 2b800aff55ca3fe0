"""Admission limits, retry delays, and the settings for both."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.proto.contexts.images import image_hash
from baton.proto.errors import ConfigError
from baton.proto.requests import build_wire_context
from baton.proto.sampling import SamplingParams
from baton.proto.vision_requests import with_images
from baton.proto.wire.messages import Cancel, Terminal
from baton.proto.wire.wire_context import WireImage
from baton.router.admission import Meter
from baton.router.config import AdmissionConfig, PolicyConfig, RouterConfig
from baton.router.describe import read_text_files


def refusals(bench):
    return [m for m in bench.sent[b"client"] if isinstance(m, Terminal) and m.code]


def finish(bench, key):
    request = bench.core.table.requests[key]
    decode = next(w for w in bench.workers if w.endpoint == request.attempt.decode.endpoint)
    decode.tokens(key, request.next, 5)
    decode.end(key, request.next)
    bench.ack(key)


def test_the_cap_on_requests_refuses_at_once_with_a_hint(make_bench):
    bench = make_bench(admission=AdmissionConfig(max_requests=3))
    bench.pair()
    keys = [bench.submit(f"r{i}") for i in range(5)]
    assert [m.code for m in refusals(bench)] == ["overloaded", "overloaded"]
    assert all(m.retry_after >= 0.05 for m in refusals(bench))
    assert bench.core.unfinished == 3
    finish(bench, keys[0])
    bench.submit("now")
    assert len(refusals(bench)) == 2


def test_the_cap_follows_the_decode_workers_slots(make_bench):
    bench = make_bench(admission=AdmissionConfig(requests_per_slot=2.0))
    bench.pair()  # 16 slots
    for i in range(40):
        bench.submit(f"r{i}")
    assert len(refusals(bench)) == 8
    bench.join("decode", 1)
    for i in range(40, 80):
        bench.submit(f"r{i}")
    assert len(refusals(bench)) == 16


def test_the_cap_on_queued_tokens_frees_with_the_first_token(make_bench):
    bench = make_bench(admission=AdmissionConfig(max_queued_tokens=1000))
    prefill, _ = bench.pair()
    first = bench.submit("a", prompt=600)
    bench.submit("b", prompt=600)
    assert len(refusals(bench)) == 1
    prefill.tokens(first, 600, 5)
    bench.submit("b", prompt=600)
    assert len(refusals(bench)) == 1
    assert bench.core.admission.queued_tokens == 600


def test_tokens_of_images_are_queued_until_the_first_token(bench, card):
    sees = msgspec.structs.replace(card, kinds=["TextContext", "TextAndVisionContext"])
    prefill, _ = bench.join("prefill", model=sees), bench.join("decode", model=sees)
    pixels = np.zeros((56, 56, 3), np.uint8)
    image = WireImage(3, 7, pixels, image_hash(pixels))
    text = build_wire_context(np.array([1, 1, 1, 9, 9, 9, 9, 1]), sees, SamplingParams())
    grids = np.array([[1, 4, 4]], np.int32)
    context = with_images(text, [image], {"image_grid_thw": grids}, 9)
    first, _ = (bench.submit(name, context=context) for name in "ab")
    bench.submit("c", prompt=600)
    admission = bench.core.admission
    counts = lambda: (admission.encoded, admission.queued_encoded)  # noqa: E731
    assert counts() == (8, 8)
    prefill.tokens(first, 8, 5)
    assert counts() == (8, 4)
    bench.client(Cancel(request_id="b"))
    assert counts() == (8, 0)


def test_one_prompt_larger_than_the_cap_is_served_when_nothing_waits(make_bench):
    bench = make_bench(admission=AdmissionConfig(max_queued_tokens=100))
    bench.pair()
    bench.submit("big", prompt=600)
    assert not refusals(bench)


def test_the_cap_on_memory_counts_everything_kept(make_bench):
    bench = make_bench(admission=AdmissionConfig(max_context_bytes=20_000))
    _, decode = bench.pair()
    keys = [bench.submit(f"r{i}", prompt=1000) for i in range(5)]
    kept = bench.core.admission.context_bytes
    assert 10_000 < kept <= 20_000
    assert "memory" in refusals(bench)[0].message
    decode.tokens(keys[0], 1000, 5)
    decode.end(keys[0], 1001)
    assert bench.core.admission.context_bytes == kept  # until acknowledged
    bench.ack(keys[0])
    bench.submit("again", prompt=1000)
    assert len(refusals(bench)) == 2


def test_a_resumed_request_is_refused_for_memory_only(make_bench):
    old = make_bench()
    old.pair()
    old.run("r")
    submitted = old.sent[b"client"][0]
    bench = make_bench(admission=AdmissionConfig(max_requests=1))
    bench.pair()
    bench.submit("other")
    bench.client(bench.resume_message(submitted, []))
    assert not refusals(bench)
    small = make_bench(admission=AdmissionConfig(max_context_bytes=100))
    small.pair()
    small.client(small.resume_message(submitted, []))
    assert len(refusals(small)) == 1


def test_the_hint_grows_with_the_backlog_and_shrinks_with_throughput(make_bench):
    hints = {}
    for rate in (2, 50):
        bench = make_bench(admission=AdmissionConfig(max_requests=40, requests_per_slot=0))
        bench.pair()
        keys = [bench.submit(f"r{i}") for i in range(40)]
        number = 40
        for _ in range(40):
            for _ in range(rate // 2):
                finish(bench, keys.pop(0))
                keys.append(bench.submit(f"r{number}"))
                number += 1
            bench.advance(0.5)
        bench.submit("late")
        hints[rate] = refusals(bench)[-1].retry_after
    assert 0.1 < hints[50] < 1.0
    assert 5.0 < hints[2] <= 30.0


def test_at_ten_times_capacity_memory_is_bounded_and_the_admitted_finish(make_bench):
    bench = make_bench(admission=AdmissionConfig(requests_per_slot=2.0))
    bench.pair()
    done = 0
    for second in range(20):
        keys = [bench.submit(f"{second}/{i}") for i in range(160)]
        for key in keys:
            if key in bench.core.table.requests:
                finish(bench, key)
                done += 1
        assert bench.core.kept <= 32
        assert len(bench.core.table._last_attempts) <= 16_384
    assert done == 20 * 32
    bench.assert_nothing_kept()


def test_cancelled_requests_give_their_room_back(make_bench):
    bench = make_bench(admission=AdmissionConfig(max_requests=2))
    bench.pair()
    for i in range(50):
        bench.submit(f"r{i}")
        bench.client(Cancel(request_id=f"r{i}"))
    assert not refusals(bench)


def backlog(bench, *, prompt=1000, requests=12, step=0.5, name="r"):
    """Queue ``requests`` prompts; return a function that computes one every ``step`` seconds."""
    prefill = bench.workers[0]
    waiting = [bench.submit(f"{name}{i}", prompt=prompt) for i in range(requests)]

    def work(count):
        for i in range(count):
            bench.advance(step)
            prefill.tokens(waiting.pop(0), prompt, 5)
            waiting.append(bench.submit(f"{name}-{bench.now}-{i}", prompt=prompt))

    return work


def test_a_deadline_shorter_than_the_backlog_is_refused_at_once(make_bench):
    bench = make_bench()
    bench.pair()
    backlog(bench)(8)  # 2000 tokens per second, 12 000 queued: 6 s
    bench.submit("late", deadline=5.0)
    (refused,) = refusals(bench)
    assert (refused.request_id, refused.code) == ("late", "overloaded")
    assert "12000 prompt tokens wait for about 6.0 s" in refused.message
    assert refused.retry_after >= 1.0
    bench.submit("patient", deadline=7.0)
    assert len(refusals(bench)) == 1


def test_more_prefill_workers_drain_the_backlog_sooner(make_bench):
    bench = make_bench()
    bench.pair()
    backlog(bench)(8)
    bench.join("prefill", 1)
    bench.submit("late", deadline=5.0)
    assert not refusals(bench)


def test_no_deadline_is_refused_before_the_rate_is_known(make_bench):
    bench = make_bench()
    bench.pair()
    work = backlog(bench)
    bench.submit("first", deadline=0.001)
    work(1)
    bench.submit("second", deadline=0.001)
    assert [m.code for m in refusals(bench)] == ["deadline_exceeded"]


def test_light_traffic_says_nothing_of_what_workers_can_do(make_bench):
    bench = make_bench()
    bench.pair()
    backlog(bench, prompt=100, requests=2)(40)  # 200 tokens per second, without a backlog
    for i in range(20):
        bench.submit(f"burst{i}", prompt=1000, deadline=5.0)
    assert not refusals(bench)


def test_an_old_rate_is_not_believed(make_bench):
    bench = make_bench()
    bench.pair()
    backlog(bench)(8)
    bench.advance(59.0)
    bench.submit("late", deadline=1.0)
    bench.advance(2.0)
    bench.submit("later", deadline=1.0)
    assert [m.request_id for m in refusals(bench)] == ["late"]


def test_cancelled_prompts_do_not_make_workers_look_slow(make_bench):
    bench = make_bench()
    bench.pair()
    work = backlog(bench)
    work(8)
    for i in range(20):
        bench.submit(f"c{i}", prompt=1000)
        bench.advance(0.4)
        bench.client(Cancel(request_id=f"c{i}"))
    work(4)
    bench.submit("late", deadline=6.5)
    assert not refusals(bench)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"pool": "default"}, 0),
        ({"target_endpoint": "ipc:///run/prefill-0"}, 0),
        ({"target_endpoint": "ipc:///run/decode-0"}, 1),
    ],
)
def test_a_request_bound_to_some_prefill_workers_is_let_in(make_bench, fields, refused):
    bench = make_bench()
    bench.pair()
    backlog(bench)(8)
    bench.submit("late", deadline=1.0, **fields)
    assert len(refusals(bench)) == refused


def test_meter_follows_a_steady_rate():
    meter = Meter(0.0)
    for second in range(1, 61):
        meter.new += 7
        meter.roll(float(second))
    assert meter.rate == pytest.approx(7.0, rel=0.01)
    assert meter.total == 420


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"client_address": "nonsense"}, "nonsense"),
        ({"policy": PolicyConfig(name="best")}, "best"),
        ({"cluster_key": "xyz"}, "cluster_key"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"assign_retry_s": -1.0}, "assign_retry_s"),
        ({"start_grace_s": float("inf")}, "start_grace_s"),
        ({"admission": AdmissionConfig(max_requests=0)}, "max_requests"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(config, settings, names):
    with pytest.raises(ConfigError, match=names):
        config(**settings)


def test_settings_are_frozen(config):
    with pytest.raises(AttributeError):
        config().name = "x"
    assert isinstance(config(), RouterConfig)


def test_only_known_text_files_leave_the_model_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("secret")
    assert read_text_files(str(tmp_path), 100) == {"tokenizer.json": b"{}"}
    assert read_text_files("", 100) == {}
    with pytest.raises(ConfigError, match="exceed the limit"):
        read_text_files(str(tmp_path), 1)
    with pytest.raises(ConfigError, match="not a folder"):
        read_text_files(str(tmp_path / "missing"), 1)


def test_a_link_out_of_the_model_folder_is_not_handed_out(tmp_path):
    secret, folder = tmp_path / "secret", tmp_path / "model"
    secret.write_text("of the host")
    folder.mkdir()
    (folder / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(ConfigError, match="is a link to"):
        read_text_files(str(folder), 100)


def test_links_within_the_folder_and_into_a_hub_caches_blobs_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "hash").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/hash")
    (snapshot / "other").write_text("t")
    (snapshot / "chat_template.jinja").symlink_to("other")
    (tmp_path / "latest").symlink_to(snapshot)
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"t"}
    for folder in (snapshot, tmp_path / "latest"):
        assert read_text_files(str(folder), 100) == files
    (snapshot / "tokenizer_config.json").symlink_to("../../snapshots/../secret")
    (tmp_path / "secret").write_text("s")
    with pytest.raises(ConfigError, match="outside"):
        read_text_files(str(snapshot), 100)
