"""Steps of pictures under the real scheduler: rows in blocks, batches, hits, aborts, errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.engine.kernels import host_backend, parts
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.tasks import folder_task
from baton.engine.loading.warm_up import warm_up
from baton.engine.pictures import serving
from baton.engine.pictures.draw import PictureEngine
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.loading import load_denoiser, load_encoder
from baton.engine.pictures.memory import largest_picture
from baton.engine.pictures.serving import PictureState
from baton.engine.scheduling.events import Failed, Finished, Prefilled, TokenEvent
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.engine.scheduling.step_time import StepTime
from baton.proto.contexts import pixels
from baton.proto.contexts.pixels import encode_png
from baton.proto.errors import CheckpointError, ConfigError, InputError
from baton.proto.ids import RequestID
from baton.proto.picture_runs import committed_picture, picture_run
from baton.proto.requests import check_continued, check_wire_context
from baton.proto.wire.context_maps import to_map

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pictures" / "flux"
SIZE = 16
BLOCKS = 64


def settings(**fields):
    return RunnerConfig(
        **{"model": str(FOLDER), "num_blocks": BLOCKS, "kv_bytes": 0, "block_size": SIZE, **fields}
    )


@pytest.fixture(scope="module")
def engine():
    return PictureEngine(FOLDER, prompt_tokens=40)


class Half:
    """A worker's scheduler and pipeline in one thread, without its core."""

    def __init__(self, runner, **limits):
        self.runner, self.pipeline = runner, runner.pipeline
        self.cache = runner.pipeline.kv.new_cache()
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.cache)
        self.contexts = {}

    def sequence(self, name, context):
        return Sequence(name.encode(), context, block_size=SIZE, salt=b"s")

    def step(self, unwanted=None):
        """Plan and run a step; returns the events and the plan."""
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        assert self.scheduler.plan_ahead() is None  # arriving pictures join the next step
        result = self.pipeline.execute(plan, None, unwanted)
        return self.scheduler.apply(result, 0.0), plan

    def check(self):
        self.scheduler.check_integrity()


class Pair:
    """Both halves, and the handoff as a copy of blocks."""

    def __init__(self):
        self.prefill = Half(load_encoder(settings()), one_token=True, token_budget=8)
        self.decode = Half(load_denoiser(settings()), max_batch=8)
        self.encoded = []
        encoder = self.prefill.pipeline._encoder
        before = encoder.encode_part
        encoder.encode_part = lambda context, prefix: (
            self.encoded.append(prefix) or before(context, prefix)
        )

    def encode(self, name, request):
        """Compute the row of a request, free its blocks, and return what a Commit would bring."""
        wire = to_map(request)
        check_wire_context(wire, self.prefill.runner.card)
        run = picture_run(wire, request.request_id, SIZE)
        sequence = self.prefill.sequence(name, run)
        self.prefill.scheduler.add(sequence, 0.0)
        events, plan = self.prefill.step()
        assert [type(event) for event in events] == [TokenEvent, Prefilled], events
        assert (events[0].position, events[0].token) == (run.picture.length, 0)
        table = sequence.allocation.block_table
        state = self.prefill.pipeline.pool[:, table].copy()
        self.prefill.scheduler.release(sequence)
        self.prefill.check()
        return committed_picture(run), state, plan

    def adopt(self, name, request):
        wire, state, _ = self.encode(name, request)
        card = self.decode.runner.card
        check_continued(wire, card)
        run = picture_run(wire, request.request_id, SIZE)
        sequence = self.decode.sequence(name, run)
        growth = sequence.remaining_tokens
        sequence.allocation = self.decode.cache.reserve([], sequence.num_tokens - 1, growth)
        table = sequence.allocation.block_table[: state.shape[1]]
        self.decode.pipeline.pool[:, table] = state
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self.decode.scheduler.adopt(sequence)
        return sequence

    def finish(self):
        """Run all steps; returns the tokens and the results of all requests."""
        tokens, results = {}, {}
        while self.decode.scheduler.has_work:
            for event in self.decode.step()[0]:
                if isinstance(event, TokenEvent):
                    tokens.setdefault(event.request.decode(), []).append(event.token)
                else:
                    results[event.request.decode()] = event
        self.decode.check()
        assert self.decode.cache.pool.used == 0
        return tokens, results


@pytest.fixture(scope="module")
def workers():
    return Pair()


@pytest.fixture
def pair(workers):
    workers.encoded.clear()
    yield workers
    assert workers.prefill.cache.pool.used == workers.decode.cache.pool.used == 0


@pytest.fixture
def ask(engine):
    def request(prompt="a red cube", **fields):
        fields = {"height": 48, "width": 32, "num_inference_steps": 4, "seed": 7, **fields}
        return engine.request(prompt, request_id=RequestID("r"), **fields)

    return request


def png(engine, request):
    return encode_png(engine.draw(request))


# --------------------------------------------------------------------------- cards


def test_the_halves_have_one_card_beside_their_weights(workers):
    first, second = workers.prefill.runner.card, workers.decode.runner.card
    assert first.mismatch(second) is None
    assert (first.task, first.kinds, first.layout.head_dim) == ("draw", ["PixelContext"], 16)
    assert 0 < first.weights_bytes < second.weights_bytes
    assert first.max_length == min(BLOCKS * SIZE, 2 * 1040 + 1 + 251)


def test_each_part_counts_in_the_fingerprint(tmp_path, workers):
    for part in ("text_encoder", "transformer", "vae"):
        folder = tmp_path / part
        shutil.copytree(FOLDER, folder)
        (weights,) = (folder / part).glob("*.safetensors")
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
        other = load_encoder(settings(model=str(folder))).card
        assert other.mismatch(workers.prefill.runner.card)[0] == "fingerprint"


def test_settings_that_do_not_fit_are_refused(tmp_path):
    for load in (load_encoder, load_denoiser):
        with pytest.raises(ConfigError, match="block_size 4 is too small"):
            load(settings(block_size=4))
        with pytest.raises(ConfigError, match="pool is too small"):
            load(settings(num_blocks=1))
    assert folder_task(FOLDER) == "draw"
    with pytest.raises(ConfigError, match="is a picture model"):
        folder_task(FOLDER, "embed")
    (tmp_path / "model_index.json").write_text('{"_class_name": "Other"}')
    with pytest.raises(CheckpointError, match="only FluxPipeline"):
        load_encoder(settings(model=str(tmp_path)))


def test_the_memory_for_pictures_limits_their_size():
    limited = load_denoiser(settings(picture_bytes=32 << 20)).card.max_pixels
    assert 0 < limited == largest_picture(open_folder(FOLDER), 32 << 20)
    assert load_denoiser(settings()).card.max_pixels == 0
    with pytest.raises(
        ConfigError, match="picture_memory of 1000 bytes is too small: the smallest"
    ):
        load_denoiser(settings(picture_bytes=1000))


def test_the_first_steps_leave_the_pool_clean():
    for load in (load_encoder, load_denoiser):
        runner, times = load(settings()), StepTime()
        warm_up(runner.pipeline, times)
        assert not runner.pool.any()
        assert runner.pipeline.layers_done > 0
        assert 0 < times.predict(100) < 60


# --------------------------------------------------------------------------- rows


def test_a_row_is_computed_in_one_step_however_small_the_budget(pair, ask):
    _, state, plan = pair.encode("a", ask())
    (chunk,) = plan.chunks
    assert (chunk.start, len(chunk.tokens), pair.encoded) == (0, 49, [""])
    assert state.shape[1] == 4  # 41 vectors in 3 blocks, and the last position
    assert not state[:, 3].any()


def test_a_second_prompt_waits_for_the_next_step(pair, ask):
    runs = [picture_run(to_map(ask(text)), RequestID("r"), SIZE) for text in ("one", "two")]
    sequences = [pair.prefill.sequence(str(n), run) for n, run in enumerate(runs)]
    for sequence in sequences:
        pair.prefill.scheduler.add(sequence, 0.0)
    for sequence in sequences:
        _, plan = pair.prefill.step()
        assert [chunk.request for chunk in plan.chunks] == [sequence.request]
        pair.prefill.scheduler.release(sequence)


def test_the_state_in_the_pool_is_that_of_the_encoders(pair, ask, engine):
    request = ask("a state", negative_prompt="none", true_cfg_scale=2.0)
    wire, state, _ = pair.encode("a", request)
    run = picture_run(wire, request.request_id, SIZE)
    vectors = state[0].reshape(-1, SIZE, 32)
    table = np.arange(len(vectors), dtype=np.int32)
    found = PictureState(vectors, table, run.picture, 24)
    expected = engine.encoder.encode(request)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_known_prompt_is_not_encoded_again(pair, ask):
    first, state, _ = pair.encode("a", ask("known"))
    second, again, plan = pair.encode("b", ask("known", seed=1, height=64, num_inference_steps=9))
    assert pair.encoded == [""]
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] == [(48, 1)]
    assert np.array_equal(state, again)
    assert first.tokens.array[:49].tolist() == second.tokens.array[:49].tolist()


def test_only_the_unknown_part_is_encoded(pair, ask):
    before = pair.prefill.scheduler.load().encoder_tokens
    pair.encode("a", ask("shared"))
    for negative in ("hats", "boats"):
        pair.encode("b", ask("shared", negative_prompt=negative, true_cfg_scale=2.0))
    assert pair.encoded == ["", "negative_", "negative_"]
    # Of five prompts; like the router, it counts those in the cache too.
    assert pair.prefill.scheduler.load().encoder_tokens - before == 5 * 40
    assert pair.decode.scheduler.load().encoder_tokens == 0


def test_found_blocks_of_a_part_are_not_written(pair, ask):
    """Eviction may leave the first block of a part alone."""
    _, state, plan = pair.encode("a", ask("evicted"))
    (chunk,) = plan.chunks
    pool = pair.prefill.pipeline.pool
    blocks = np.array([40, 41, 42, 43], np.int32)
    pool[:, 40] = 5.0
    part = type(chunk)(b"x", 16, chunk.tokens[16:], blocks, chunk.sample, picture=chunk.picture)
    result = pair.prefill.pipeline.execute(StepPlan(0, (part,)))
    assert not result.failed
    assert (pool[:, 40] == 5.0).all()
    assert np.array_equal(pool[:, 41:44], state[:, 1:4])
    pool[:, 40:44] = 0


# --------------------------------------------------------------------------- steps


def test_pictures_together_are_those_of_one_process(pair, ask, engine):
    guided = {"negative_prompt": "a hat", "true_cfg_scale": 3.0}
    requests = {
        "a": ask(),
        "b": ask(seed=1, height=64),
        "c": ask("a ball", num_inference_steps=2),
        "d": ask(**guided),
        "e": ask(seed=2, **guided),
    }
    for name, request in requests.items():
        pair.adopt(name, request)
    tokens, results = pair.finish()
    for name, request in requests.items():
        assert results[name].result == png(engine, request)
        assert tokens[name] == list(range(1, request.num_inference_steps + 1))
        assert results[name].status == "maximum_length"
    assert results["d"].result != results["a"].result  # the negative prompt took effect


def test_a_picture_joins_and_leaves_between_steps(pair, ask, engine):
    pair.adopt("a", ask())
    pair.adopt("b", ask(seed=1))
    pair.decode.step()
    pair.adopt("c", ask(seed=2))
    pair.decode.scheduler.abort(b"b")
    results = pair.finish()[1]
    assert results.keys() == {"a", "c"}
    assert results["a"].result == png(engine, ask())
    assert results["c"].result == png(engine, ask(seed=2))


def test_a_step_that_nobody_needs_ends_after_a_layer(pair, ask, engine):
    pair.adopt("a", ask())
    plan = pair.decode.scheduler.plan(0.0)
    before = pair.decode.pipeline.layers_done

    def unwanted():
        if pair.decode.pipeline.layers_done == before:
            return False
        pair.decode.scheduler.abort(b"a")
        return pair.decode.scheduler.take_unwanted() == [plan.step]

    result = pair.decode.pipeline.execute(plan, None, unwanted)
    assert result.abandoned
    assert pair.decode.pipeline.layers_done == before + 1
    assert pair.decode.scheduler.apply(result, 0.0) == []
    pair.adopt("a", ask())
    assert pair.finish()[1]["a"].result == png(engine, ask())


def test_steps_that_were_computed_elsewhere_are_computed_again(pair, ask, engine):
    """The chunk of a later step brings a pipeline without its latents to that step."""
    sequence = pair.adopt("a", ask())
    pair.decode.step()
    pair.decode.step()
    pair.decode.pipeline._drawings.clear()
    tokens, results = pair.finish()
    assert tokens["a"] == [3, 4]
    assert results["a"].result == png(engine, ask())
    assert sequence.allocation is None


def test_one_bad_request_fails_alone(pair, ask, engine):
    pair.adopt("bad", ask())
    pair.decode.step()
    (bad,) = pair.decode.pipeline._drawings.values()
    bad.latents[0] = np.inf  # as of a model whose numbers overflow
    pair.adopt("wrong", ask(latents=np.zeros((4, 16), np.float32)))
    pair.adopt("good", ask())
    _, results = pair.finish()
    assert isinstance(results["bad"], Failed)
    assert (results["bad"].code, "not finite" in results["bad"].message) == ("internal", True)
    assert (results["wrong"].code, "latents" in results["wrong"].message) == ("input", True)
    assert isinstance(results["good"], Finished)
    assert results["good"].result == png(engine, ask())


def test_ids_outside_the_vocabulary_fail_alone(pair, ask):
    request = ask("odd")
    request.tokens_2.all[0] = 40_000
    run = picture_run(to_map(request), RequestID("r"), SIZE)
    pair.prefill.scheduler.add(pair.prefill.sequence("odd", run), 0.0)
    events, _ = pair.prefill.step()
    (failed,) = events
    assert (failed.code, "token ids must be in 0..99" in failed.message) == ("input", True)
    pair.prefill.check()


def test_a_row_cannot_be_computed_by_a_decode_worker(pair, ask):
    """As after a preemption, which the blocks of all steps rule out."""
    plan = pair.encode("a", ask("late"))[2]
    result = pair.decode.pipeline.execute(plan)
    assert "prefill workers alone" in str(result.failed[b"a"])


def test_a_commit_with_another_row_is_refused(pair, ask):
    wire, _, _ = pair.encode("a", ask("row"))
    long = msgspec.structs.replace(wire, tokens_2=wire.tokens)
    with pytest.raises(InputError, match="a row of 49 positions; expected 65"):
        picture_run(long, RequestID("r"), SIZE)
    for fields in ({"extra_params": {}}, {"num_inference_steps": 0}, {"height": 8}):
        with pytest.raises(InputError):
            check_continued(msgspec.structs.replace(wire, **fields), pair.decode.runner.card)


# --------------------------------------------------------------------------- requests that leave


@pytest.fixture
def small_parts(monkeypatch):
    """Make a part of each layer, so that every kernel and the PNG have several."""
    monkeypatch.setattr(parts, "PART_PRODUCTS", 1)
    monkeypatch.setattr(parts, "LEAST_ROWS", 16)
    monkeypatch.setattr(parts, "PART_NUMBERS", 2048)
    monkeypatch.setattr(host_backend, "PATCH_BYTES", 1 << 16)
    monkeypatch.setattr(pixels, "PNG_PART", 256)


def stages(pipeline, monkeypatch):
    """Note the stage in which each check of a step comes."""
    denoiser, now, found = pipeline._denoiser, ["transformer"], []
    for stage, owner, name in (
        ("transformer", denoiser.transformer, "execute"),
        ("vae", denoiser.vae, "decode"),
        ("png", serving, "encode_png"),
    ):
        before = getattr(owner, name)

        def entered(*args, stage=stage, before=before):
            now[0] = stage
            return before(*args)

        monkeypatch.setattr(owner, name, entered)
    return now, found


@pytest.mark.parametrize("leave", ["alone", "among others"])
def test_no_work_follows_in_any_stage_once_a_request_has_left(
    pair, ask, engine, small_parts, monkeypatch, leave
):
    """Leave at the first, a middle and the last check of each stage, also of a preview."""
    pipeline, scheduler = pair.decode.pipeline, pair.decode.scheduler
    now, _ = stages(pipeline, monkeypatch)
    request = ask(height=64, width=64, num_inference_steps=2)
    request.extra_params["previews"] = np.array([1])
    small = ask(num_inference_steps=3) if leave == "among others" else None
    expected_small = png(engine, ask(num_inference_steps=3))

    def run(step, stop):
        """Return the checks for "big" in each stage of a step; leave at ``stop``."""
        if small is not None:
            pair.adopt("small", small)
        pair.adopt("big", request)
        for _ in range(step):
            pair.decode.step()
        seen = []

        def check():
            if [d.columns for d in pipeline._denoiser._current] == [8]:
                seen.append(now[0])
                if len(seen) - 1 == stop:
                    scheduler.abort(b"big")

        plan = scheduler.plan(0.0)
        before = pipeline._denoiser._watch
        pipeline._denoiser.watch(lambda: (check(), before()))
        unwanted = lambda: bool(scheduler.take_unwanted())  # noqa: E731
        result = pipeline.execute(plan, None, unwanted)
        pipeline._denoiser.watch(before)
        events = scheduler.apply(result, 0.0)
        assert not any(event.request == b"big" for event in events) or stop is None
        assert result.abandoned == (stop is not None)
        if stop is not None:
            assert len(seen) == stop + 1  # no check follows, so no part does
            held = pipeline._denoiser
            assert held.vae._space.nbytes == 0
            assert small is not None or (
                held.transformer._space.nbytes == 0 and not pipeline._drawings
            )
            assert b"big" not in pipeline._drawings
        scheduler.abort(b"big")
        results = pair.finish()[1]
        if small is not None:
            assert results["small"].result == expected_small
        return seen

    for step, expected in ((0, {"transformer", "vae", "png"}), (1, {"transformer", "vae", "png"})):
        seen = run(step, None)
        assert set(seen) == expected
        for stage in sorted(expected):
            at = [n for n, name in enumerate(seen) if name == stage]
            for stop in {at[0], at[len(at) // 2], at[-1]}:
                run(step, stop)


def test_an_ended_encoding_leaves_no_blocks(pair, ask, small_parts):
    run = picture_run(to_map(ask("ended")), RequestID("r"), SIZE)
    sequence = pair.prefill.sequence("a", run)
    pair.prefill.scheduler.add(sequence, 0.0)
    plan = pair.prefill.scheduler.plan(0.0)
    seen = []

    def unwanted():
        seen.append(1)
        if len(seen) == 20:
            pair.prefill.scheduler.abort(b"a")
        return bool(pair.prefill.scheduler.take_unwanted())

    result = pair.prefill.pipeline.execute(plan, None, unwanted)
    assert result.abandoned
    assert len(seen) == 20
    assert pair.prefill.scheduler.apply(result, 0.0) == []


def test_steps_of_a_request_that_left_are_not_computed_again(pair, ask):
    """A request that needs its earlier steps again, and leaves in the first of them."""
    pair.adopt("a", ask())
    pair.decode.step()
    pair.decode.step()
    pair.decode.pipeline._drawings.clear()
    plan = pair.decode.scheduler.plan(0.0)
    pair.decode.scheduler.abort(b"a")
    result = pair.decode.pipeline.execute(plan)
    assert result.failed[b"a"].code == "internal"
    assert result.abandoned
    pair.decode.scheduler.apply(result, 0.0)
