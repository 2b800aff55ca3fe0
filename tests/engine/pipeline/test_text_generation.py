from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline import text_generation
from baton.engine.pipeline.device_sampler import collect
from baton.engine.pipeline.model import lay_out
from baton.engine.pipeline.text_generation import report_layers
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import SchemaTooComplex
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
EMPTY = np.empty(0, np.int32)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def runner():
    return load_runner(
        RunnerConfig(model=str(DATA / "llama_plain"), backend="numpy", num_blocks=32, block_size=4)
    )


def chunk(name, tokens=(5, 6, 7), start=0, table=(3, 9), params=GREEDY, **more):
    spec = SampleSpec(params, start + len(tokens), EMPTY, len(tokens)) if params else None
    return Chunk(name, start, np.array(tokens, np.int32), np.array(table, np.int32), spec, **more)


def execute(runner, *chunks, on_layers=None):
    return runner.pipeline.execute(StepPlan(7, chunks), on_layers)


def test_batch_lays_chunks_out_as_rows():
    batch = lay_out(
        [chunk(b"a", (1, 2, 3), 5, (4, 7)), chunk(b"b", (8,), 0, (2,)), chunk(b"c", (9,), 3, (6,))],
        np.empty((1, 8, 2, 1, 4, 2), np.float32),
    )
    assert batch.tokens.tolist() == [1, 2, 3, 8, 9]
    assert batch.positions.tolist() == [5, 6, 7, 0, 3]
    assert batch.slots.tolist() == [29, 30, 31, 8, 27]
    assert batch.block_tables.tolist() == [[4, 7], [2, 0], [6, 0]]
    assert batch.row_offsets.tolist() == [0, 3, 4, 5]
    assert batch.logit_rows.tolist() == [2, 3, 4]
    assert {batch.tokens.dtype, batch.positions.dtype, batch.block_tables.dtype} == {
        np.dtype(np.int32)
    }
    assert batch.slots.dtype == np.int64


def test_result_names_step_tokens_and_time(runner):
    result = execute(runner, chunk(b"a"), chunk(b"b", (1,), table=(0,)))
    assert (result.step, result.num_tokens, result.failed) == (7, 4, {})
    assert [s.request for s in result.sampled] == [b"a", b"b"]
    assert result.seconds > 0


def test_chunks_without_a_sample_draw_nothing_but_write_the_cache(runner):
    assert execute(runner, chunk(b"a", params=None)).sampled == ()
    assert np.abs(runner.pool[:, 3, :, :, :3]).min() > 0
    split = execute(runner, chunk(b"a", (8,), start=3))
    whole = execute(runner, chunk(b"w", (5, 6, 7, 8), table=(20, 21)))
    assert split.sampled[0].token == whole.sampled[0].token


def test_the_cache_is_never_read_before_it_is_written(runner):
    clean = execute(runner, chunk(b"a"), chunk(b"b", (4, 4), table=(6,)))
    for poison in (np.nan, np.inf, 1e30):
        runner.pool.fill(poison)
        assert (
            execute(runner, chunk(b"a"), chunk(b"b", (4, 4), table=(6,))).sampled == clean.sampled
        )


@pytest.mark.parametrize(
    "bad",
    [
        chunk(b"bad", ()),
        chunk(b"bad", start=-1),
        chunk(b"bad", start=2046, table=range(32)),
        chunk(b"bad", table=()),
        chunk(b"bad", start=6),
        chunk(b"bad", (5, 256)),
        chunk(b"bad", (-999, 5)),
        chunk(b"bad", table=(32, 0)),
        chunk(b"bad", table=(-1, 0)),
    ],
)
def test_a_chunk_that_does_not_fit_fails_alone(runner, bad):
    good = chunk(b"good", table=(1, 2))
    expected = execute(runner, good).sampled
    for order in ((bad, good), (good, bad)):
        result = execute(runner, *order)
        assert list(result.failed) == [b"bad"]
        assert result.sampled == expected
    assert list(execute(runner, bad).failed) == [b"bad"]


def test_a_step_that_nobody_waits_for_ends_behind_its_layer(runner):
    """No KV is written afterwards, and the next step is not affected."""
    plan, answers = StepPlan(7, (chunk(b"a"),)), iter([False, False, True])
    runner.pool.fill(7.0)
    result = runner.pipeline.execute(plan, unwanted=lambda: next(answers))
    assert result.abandoned and result.step == 7 and not result.sampled
    assert list(result.failed) == [b"a"]
    assert (runner.pool[1, 3, :, :, :3] != 7.0).all()
    assert (runner.pool[2:] == 7.0).all()
    whole = execute(runner, chunk(b"b", table=(1, 2)))
    assert execute(runner, chunk(b"a")).sampled[0].token == whole.sampled[0].token


def test_a_step_nobody_waits_for_any_more_does_not_begin(runner):
    runner.pool.fill(7.0)
    result = runner.pipeline.execute(StepPlan(7, (chunk(b"a"),)), unwanted=lambda: True)
    assert result.abandoned and (runner.pool == 7.0).all()


class OneToken:
    """A grammar that allows one token."""

    def __init__(self, token):
        self.token = token

    def allowed(self):
        return np.arange(256) == self.token


def masked_row(name, token, start, table, mask):
    spec = SampleSpec(GREEDY, start + 1, EMPTY, 1, mask=mask)
    return Chunk(name, start, np.array([token], np.int32), np.array(table, np.int32), spec)


def test_the_mask_of_a_plan_ahead_is_read_when_the_step_before_is_applied(runner):
    """After the forward pass, so that it need not wait; rows without a mask wait for nothing."""
    mask, happened = OneToken(11), []
    first = runner.pipeline.execute(StepPlan(0, (masked_row(b"a", 5, 0, (3,), mask),)))
    assert first.sampled[0].token == 11
    ahead = StepPlan(1, (masked_row(b"a", -1, 1, (3,), mask),), ahead=True)

    def applied():
        happened.append(runner.pipeline.layers_done)
        mask.token = 12

    done = runner.pipeline.layers_done
    assert runner.pipeline.execute(ahead, applied=applied).sampled[0].token == 12
    assert happened == [done + len(runner.pool)]
    plain = StepPlan(2, (chunk(b"a", (-1,), 2),), ahead=True)
    assert runner.pipeline.execute(plain, applied=applied).sampled
    assert len(happened) == 1


def test_the_mask_of_a_plan_ahead_is_not_read_too_early(runner):
    mask = OneToken(11)
    runner.pipeline.execute(StepPlan(0, (masked_row(b"a", 5, 0, (3,), mask),)))
    ahead = StepPlan(1, (masked_row(b"a", -1, 1, (3,), mask),), ahead=True)
    result = runner.pipeline.execute(ahead)
    assert not result.sampled and "not known" in str(result.failed[b"a"])


def test_what_cannot_stop_is_not_asked_to(runner):
    answers = iter([False])
    runner.pipeline._computer.can_stop = False
    result = runner.pipeline.execute(StepPlan(7, (chunk(b"a"),)), unwanted=lambda: next(answers))
    assert result.sampled and not result.abandoned


def test_non_finite_logits_fail_alone(runner):
    """Damaged keys of one request, as after a broken handoff, do not reach the others."""
    execute(runner, chunk(b"a"), chunk(b"b", table=(1, 2)))
    runner.pool[:, 3] = np.nan
    result = execute(runner, chunk(b"a", (9,), start=3), chunk(b"b", (9,), start=3, table=(1, 2)))
    assert list(result.failed) == [b"a"]
    assert "non-finite" in str(result.failed[b"a"])
    assert [s.request for s in result.sampled] == [b"b"]


def test_an_error_in_sampling_fails_alone(runner):
    def explode(row):
        raise RuntimeError("no")

    params = SamplingParams(logits_processors=[explode])
    result = execute(runner, chunk(b"a", params=params), chunk(b"b", table=(1, 2)))
    assert [s.request for s in result.sampled] == [b"b"]
    (error,) = result.failed.values()
    assert (error.code, str(error)) == ("internal", "sampling: RuntimeError: no")


def test_a_grammar_that_gives_up_fails_alone_and_under_its_own_code(runner):
    class Mask:
        def allowed(self):
            raise SchemaTooComplex("cannot be followed")

    hard = chunk(b"a")
    hard = replace(hard, sample=replace(hard.sample, mask=Mask()))
    result = execute(runner, hard, chunk(b"b", table=(1, 2)))
    assert [s.request for s in result.sampled] == [b"b"]
    (error,) = result.failed.values()
    assert (error.code, str(error)) == ("schema_too_complex", "cannot be followed")


def test_a_failing_pass_fails_its_requests_and_not_the_executor(runner, monkeypatch):
    def out_of_memory(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(runner.pipeline.model, "execute", out_of_memory)
        assert set(execute(runner, chunk(b"a"), chunk(b"b", table=(1,))).failed) == {b"a", b"b"}
    assert len(execute(runner, chunk(b"a")).sampled) == 1


def test_finished_layers_are_reported_while_the_step_runs(runner):
    runner.pool.fill(np.nan)
    seen = []

    def on_layers(request, layer_end):
        written = np.isfinite(runner.pool[:, 3, :, :, :3]).all(axis=(1, 2, 3, 4))
        assert written.tolist() == [layer < layer_end for layer in range(3)]
        seen.append((request, layer_end))

    streaming = chunk(b"a", stream_layers=True)
    result = execute(runner, streaming, chunk(b"b", table=(1, 2)), on_layers=on_layers)
    assert not result.failed
    assert seen == [(b"a", 1), (b"a", 2), (b"a", 3)]
    runner.pipeline.layer_group = 2
    runner.pool.fill(np.nan)
    seen.clear()
    monitored = []
    execute(runner, streaming, on_layers=lambda request, end: monitored.append(end))
    assert monitored == [2, 3]


@pytest.mark.parametrize(
    ("layers", "mebibytes", "expected"),
    [
        (32, 32, [8, 16, 24, 28, 30, 31, 32]),  # 8,192 tokens of an 8B model: 1 of 32 parts is left
        (32, 2, [8, 16, 24, 28, 30, 32]),
        (32, 0, [8, 16, 24, 32]),  # more chunks follow
        (28, 8, [7, 14, 21, 25, 27, 28]),
        (10, 0, [3, 6, 9, 10]),
        (4, 9, [1, 2, 3, 4]),
        (2, 9, [1, 2]),
        (1, 9, [1]),
    ],
)
def test_less_and_less_is_left_to_send_after_the_last_layer(layers, mebibytes, expected):
    assert report_layers(layers, mebibytes << 20) == expected


def test_the_end_of_a_prompt_is_reported_in_smaller_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(text_generation, "LEFT_BYTES", 1)
    shape = Shape("deep", vocab=16, hidden=16, intermediate=16, layers=12, heads=2, kv_heads=1)
    folder = write_checkpoint(tmp_path, shape, "BF16")
    deep = load_runner(
        RunnerConfig(model=str(folder), backend="numpy", num_blocks=32, block_size=4)
    )
    seen = []
    last = chunk(b"a", stream_layers=True)
    part = chunk(b"b", table=(1, 2), params=None, stream_layers=True)
    execute(deep, last, part, on_layers=lambda request, end: seen.append((request, end)))
    assert [end for request, end in seen if request == b"a"] == [3, 6, 9, 11, 12]
    assert [end for request, end in seen if request == b"b"] == [3, 6, 9, 12]


def test_last_layer_skips_rows_nobody_samples(runner):
    """Whether all, some or no chunks of a step sample, the sampled tokens are the same."""
    a, b = chunk(b"a"), chunk(b"b", (9, 8, 7, 6, 5), table=(1, 2))
    both = {s.request: s.token for s in execute(runner, a, b).sampled}
    silent = chunk(b"b", (9, 8, 7, 6, 5), table=(1, 2), params=None)
    assert {s.request: s.token for s in execute(runner, a, silent).sampled} == {b"a": both[b"a"]}


def same_inputs(one, two):
    names = ("tokens", "positions", "slots", "block_tables", "row_offsets", "logit_rows")
    return all(
        np.array_equal(getattr(one, n), getattr(two, n))
        and getattr(one, n).dtype == getattr(two, n).dtype
        for n in names
    )


def test_decode_steps_are_made_of_the_step_before_and_only_then(runner, monkeypatch):
    """Rows derived from the step before equal rows laid out from the chunks."""
    model, made, ways = runner.pipeline.model, [], []
    execute, following = model.execute, model.prepare_next_token_inputs
    monkeypatch.setattr(model, "execute", lambda inputs: made.append(inputs) or execute(inputs))
    monkeypatch.setattr(
        model, "prepare_next_token_inputs", lambda *a: ways.append("next") or following(*a)
    )
    tables = [np.array(t, np.int32) for t in ((3, 9), (1, 2), (5, 6))]

    def step(*chunks, by_next):
        before = len(ways)
        assert not execute_plan(chunks).failed
        assert (len(ways) > before) == by_next
        assert same_inputs(made[-1], lay_out(chunks, runner.pool))

    def execute_plan(chunks):
        return runner.pipeline.execute(StepPlan(7, chunks))

    def row(name, tokens, start, table, params=GREEDY):
        spec = SampleSpec(params, start + len(tokens), EMPTY, 1) if params else None
        return Chunk(name, start, np.array(tokens, np.int32), table, spec)

    a, b, c = tables
    step(row(b"a", (5, 6, 7), 0, a), row(b"b", (8,), 0, b), by_next=False)
    step(row(b"a", (9,), 3, a), row(b"b", (4,), 1, b), by_next=True)
    step(row(b"a", (3,), 4, a), row(b"b", (2,), 2, b), by_next=True)
    step(row(b"b", (2,), 3, b), row(b"a", (3,), 5, a), by_next=False)  # another order
    step(row(b"b", (2,), 4, b), by_next=False)  # one has ended
    step(row(b"b", (7,), 5, b), by_next=True)
    step(row(b"b", (7,), 5, b), by_next=False)  # the same again
    step(row(b"b", (7, 8), 6, b), by_next=False)  # two tokens
    step(row(b"c", (7,), 0, c, params=None), by_next=False)
    step(row(b"c", (7,), 1, c), by_next=True)
    step(row(b"c", (7,), 2, c.copy()), by_next=False)  # another array, so the blocks may differ


def test_log_probabilities_of_a_device_are_packed_as_one_by_one():
    """Rows ask for different numbers; a small vocabulary pads with -1; a failed row has none."""
    rng = np.random.default_rng(3)
    asked = [3, 0, 20, 3, 1, 20]
    chunks = [
        Chunk(bytes([at]), 0, EMPTY, EMPTY, SampleSpec(GREEDY, 1, EMPTY, 0, (), count))
        for at, count in enumerate(asked)
    ]
    own = rng.standard_normal(6).astype(np.float32)
    ids = np.array([rng.permutation(1 << 20)[:20] for _ in asked], np.int32)
    values = rng.standard_normal((6, 20)).astype(np.float32)
    ids[5, 7:], values[5, 7:] = -1, -np.inf
    for failing in (None, 3):
        errors, failed = np.zeros(6, np.int32), {}
        if failing is not None:
            errors[failing], ids[failing] = 1, -1
        found = collect(
            chunks, np.arange(6, dtype=np.int32), errors, (own, ids, values), set(), failed
        )
        assert [each.token for each in found] == [at for at in range(6) if at != failing]
        assert set(failed) == ({bytes([failing])} if failing is not None else set())
        for each in found:
            at = each.token
            top = {
                int(i): float(v)
                for i, v in zip(ids[at][: asked[at]], values[at], strict=False)
                if i >= 0
            }
            expected = TokenLogProbs.of(float(own[at]), top) if asked[at] else None
            assert each.logprobs == expected
