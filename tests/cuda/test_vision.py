"""Models with images on the CUDA kernels: against the NumPy reference, and with planted bugs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.reference import from_bf16
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.models import vision_tower
from baton.engine.models.vision_decoder import VisionDecoder
from baton.engine.pipeline import decode_graph, device_steps
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.errors import ConfigError
from baton.proto.sampling import SamplingParams

from .host_device import HostDevice
from .vision_model import GREEDY, SHAPES, VisionShape, picture, request, write_vision_model

BLOCK = 8
CLOSE = 2e-2
"""Relative error of features and logits; with bfloat16 between all kernels it is 0.8 to 1.4 %."""
GRIDS = [(10, 14), (2, 2), (8, 8), (4, 20)]
"""Windows of 8 x 8 patches and parts of them, one token, exactly one window."""
Prompt = list[int | npt.NDArray[np.uint8]]


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> VisionShape:
    return SHAPES[request.param]


@pytest.fixture
def model(shape: VisionShape, tmp_path: Path, rng: np.random.Generator) -> Path:
    return write_vision_model(tmp_path / "model", shape, int(rng.integers(1 << 30)))


def load(folder: Path, device: Device | None = None, **more: bool | str) -> Runner:
    config = RunnerConfig(model=str(folder), backend="numpy", block_size=BLOCK, num_blocks=96)
    config = msgspec.structs.replace(config, **more)
    return load_runner(config, backend=None if device is None else CudaBackend(device))


def decoder(runner: Runner) -> VisionDecoder:
    model = runner.pipeline.model
    assert isinstance(model, VisionDecoder)
    return model


def seen(runner: Runner, array: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """An array of the runner's backend."""
    if not isinstance(runner.backend, CudaBackend):
        return array.astype(np.float64)
    found = runner.backend.device.download(array)
    return from_bf16(found) if found.dtype == np.uint16 else found.astype(np.float64)


def distance(got: npt.NDArray[np.float64], exact: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


# ------------------------------------------------------------------------------------------ tower


def features(runner: Runner, shape: VisionShape) -> list[npt.NDArray[np.float64]]:
    """All features of four images."""
    tower = decoder(runner)._tower
    assert tower is not None
    found = tower.encode([(picture(shape, grid, i), grid) for i, grid in enumerate(GRIDS)])
    return [seen(runner, part) for one in found for part in (one.features, *one.deep)]


def far_features(folder: Path, device: Device, shape: VisionShape) -> list[float]:
    """Relative errors that are too large."""
    exact, got = features(load(folder), shape), features(load(folder, device), shape)
    errors = [distance(g, e) for g, e in zip(got, exact, strict=True)]
    assert len(errors) == len(GRIDS) * (1 + len(shape.tower.get("deepstack_visual_indexes", ())))
    return [error for error in errors if not error < CLOSE]


def test_features_are_the_reference_s_but_for_bfloat16(
    model: Path, device: Device, shape: VisionShape
) -> None:
    assert not far_features(model, device, shape)


def test_heads_of_other_sizes_are_padded(
    device: Device, tmp_path: Path, rng: np.random.Generator
) -> None:
    """16 to 64, 64 to 64 and 96 to 128 channels."""
    for heads, hidden in ((4, 64), (2, 128), (1, 96)):
        shape = replace(SHAPES["qwen3_vl"], tower_heads=heads, tower_hidden=hidden)
        folder = write_vision_model(tmp_path / f"{heads}", shape, int(rng.integers(1 << 30)))
        assert not far_features(folder, device, shape)


def test_no_order_of_threads_changes_a_bit_of_a_feature(
    shape: VisionShape, model: Path, device: Device, schedules: Callable[..., list]
) -> None:
    tower = decoder(load(model, device))._tower
    assert tower is not None
    images = [(picture(shape, grid, 1), grid) for grid in ((10, 8), (2, 2))]

    def run() -> list[npt.NDArray[np.generic]]:
        found = tower.encode(images)
        arrays = [part for one in found for part in (one.features, *one.deep)]
        return [device.download(array) for array in arrays]

    schedules(run)


def swap_the_patches(patch: pytest.MonkeyPatch) -> None:
    at = vision_tower.patch_positions
    patch.setattr(vision_tower, "patch_positions", lambda *a: at(*a)[:, ::-1])


def pad_heads_at_their_end(patch: pytest.MonkeyPatch) -> None:
    """Rotation would pair other channels than in the model."""

    def at_the_end(heads: int, dim: int, to: int) -> npt.NDArray[np.intp] | None:
        if dim == to:
            return None
        order = np.full((heads, to), -1, np.intp)
        order[:, :dim] = np.arange(heads * dim).reshape(heads, dim)
        return order.reshape(-1)

    patch.setattr(vision_tower, "padded_heads", at_the_end)


def leave_the_windows_out(patch: pytest.MonkeyPatch) -> None:
    attend = vision_tower.VisionTower._attend

    def everywhere(self, block, groups, *rest):  # type: ignore[no-untyped-def]
        whole = [a * b for a, b in GRIDS]
        return attend(self, block, vision_tower.segments(whole, self._backend), *rest)

    patch.setattr(vision_tower.VisionTower, "_attend", everywhere)


def plan_with_another_group(patch: pytest.MonkeyPatch) -> None:
    """The plan, not the rows' ends, decides which keys are read."""
    made = vision_tower.segments

    def shifted(sizes, backend):  # type: ignore[no-untyped-def]
        found = made(sizes, backend)
        offsets = np.cumsum([0, *sizes]).astype(np.int32)
        ends = np.concatenate([np.full(n, max(n - 5, 0)) for n in sizes]).astype(np.int32)
        return replace(found, plan=backend.plan_attention(offsets, ends))

    patch.setattr(vision_tower, "segments", shifted)


def leave_the_windows_order(patch: pytest.MonkeyPatch) -> None:
    merge = vision_tower.VisionTower._merge

    def in_order(self, states, merger, orders):  # type: ignore[no-untyped-def]
        return merge(self, states, merger, [np.arange(len(order)) for order in orders])

    patch.setattr(vision_tower.VisionTower, "_merge", in_order)


def forget_the_learned_positions(patch: pytest.MonkeyPatch) -> None:
    learned = vision_tower.learned_positions
    patch.setattr(vision_tower, "learned_positions", lambda *a: 0 * learned(*a))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("qwen2_5_vl", swap_the_patches),
        ("qwen3_vl", swap_the_patches),
        ("qwen3_vl", pad_heads_at_their_end),
        ("qwen2_5_vl", leave_the_windows_out),
        ("qwen2_5_vl", plan_with_another_group),
        ("qwen3_vl", plan_with_another_group),
        ("qwen2_5_vl", leave_the_windows_order),
        ("qwen3_vl", forget_the_learned_positions),
    ],
)
def test_a_bug_planted_in_the_tower_is_seen(
    host_device: HostDevice,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    shape = SHAPES[name]
    folder = write_vision_model(tmp_path / "model", shape, int(rng.integers(1 << 30)))
    exact = features(load(folder), shape)
    plant(monkeypatch)
    got = features(load(folder, host_device), shape)
    errors = [distance(g, e) for g, e in zip(got, exact, strict=True)]
    assert max(errors) > 3 * CLOSE, errors


def test_encoding_ends_before_its_time_is_taken(
    shape: VisionShape, model: Path, host_device: HostDevice
) -> None:
    """Otherwise a GPU's time for images would count as the time of tokens."""
    runner = load(model, host_device.late(3))
    context = request(shape, [5, picture(shape, (6, 8), 1), 7])
    images = decoder(runner).prepare_initial_token_inputs([chunk_of(context)])
    decoder(runner)._features(images)
    key, grid = images.images[0].key, images.images[0].grid
    found = decoder(runner).encoded.get(key, grid)
    assert found is not None
    assert found.nbytes == len(context.tokens.all[1:-1]) * shape.hidden * 2 * (1 + len(found.deep))
    # Read without waiting: memory that no kernel has written yet is full of NaN.
    assert np.isfinite(from_bf16(np.asarray(found.features))).all()
    assert decoder(runner).encode_seconds > 0


# ---------------------------------------------------------------------------------------- decoder


def chunk_of(
    context: TextAndVisionContext,
    start: int = 0,
    end: int | None = None,
    table: npt.NDArray[np.int32] | None = None,
) -> Chunk:
    """Some rows of a prompt."""
    images = Sequence(b"r", context, block_size=BLOCK).images
    assert images is not None
    end = len(context.tokens.all) if end is None else end
    blocks = np.arange(-(-end // BLOCK), dtype=np.int32) if table is None else table
    return Chunk(
        b"r",
        start,
        context.tokens.all[start:end].astype(np.int32),
        blocks,
        SampleSpec(GREEDY, end, np.empty(0, np.int32), 0),
        images=images.parts(start, end),
        rope_positions=images.rope_positions(start, end),
        rope_delta=images.delta,
    )


def all_logits(runner: Runner, chunks: list[Chunk]) -> npt.NDArray[np.float64]:
    """Logits of every row."""
    model = decoder(runner)
    inputs = model.prepare_initial_token_inputs(chunks)
    inputs.logit_rows = np.arange(len(inputs.tokens), dtype=np.int32)
    logits = model.execute(inputs).next_token_logits
    assert logits is not None
    return seen(runner, logits)


def prompt_of(shape: VisionShape, rng: np.random.Generator, *grids: tuple[int, int]) -> Prompt:
    """Some tokens before, between and after random pictures."""
    prompt: Prompt = []
    for grid in grids:
        prompt += [int(t) for t in rng.integers(3, 100, rng.integers(1, 6))]
        prompt.append(picture(shape, grid, int(rng.integers(1 << 30))))
    return [*prompt, *(int(t) for t in rng.integers(3, 100, 5))]


def steps_of(shape: VisionShape, rng: np.random.Generator) -> list[list[Chunk]]:
    """Prompts in two chunks that end at an image's end, then their next tokens."""
    first = request(shape, prompt_of(shape, rng, (6, 8), (2, 2), (4, 10)))
    second = request(shape, prompt_of(shape, rng, (8, 4)))
    blocks, cut = rng.permutation(96).astype(np.int32), first.images[0].end_idx
    tables = blocks[:20], blocks[20:40]
    ends = len(first.tokens.all), len(second.tokens.all)
    steps = [
        [chunk_of(first, 0, cut, tables[0])],
        [chunk_of(first, cut, ends[0], tables[0]), chunk_of(second, 0, ends[1], tables[1])],
    ]
    for _ in range(3):
        for context in (first, second):
            context.update(int(rng.integers(3, 100)))
        steps.append(
            [
                chunk_of(context, len(context.tokens.all) - 1, None, table)
                for context, table in ((first, tables[0]), (second, tables[1]))
            ]
        )
    return steps


def logit_errors(
    folder: Path, device: Device, steps: list[list[Chunk]], kv_type: str = "auto"
) -> list[float]:
    """The largest relative error of a row in each step."""
    exact, got = load(folder, kv_type=kv_type), load(folder, device, kv_type=kv_type)
    errors = []
    for chunks in steps:
        wanted, found = all_logits(exact, chunks), all_logits(got, chunks)
        error = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        errors.append(float(error.max()))
    return errors


@pytest.mark.parametrize("kv_type", ["auto", "int8"])
def test_logits_are_the_reference_s_but_for_bfloat16(
    shape: VisionShape, model: Path, device: Device, rng: np.random.Generator, kv_type: str
) -> None:
    """Of prompts with images in chunks and of tokens after them, at positions with the delta."""
    steps = steps_of(shape, rng)
    assert all(chunk.rope_delta < 0 for chunks in steps for chunk in chunks)
    errors = logit_errors(model, device, steps, kv_type)
    assert max(errors) < 2 * CLOSE, errors


@pytest.mark.parametrize("name", list(SHAPES))
def test_rows_put_in_a_wrong_place_are_seen(
    host_device: HostDevice, tmp_path: Path, rng: np.random.Generator, name: str
) -> None:
    shape = SHAPES[name]
    folder = write_vision_model(tmp_path / "model", shape, int(rng.integers(1 << 30)))
    wrong = host_device.with_defines("BATON_PLANT_PUT")
    errors = logit_errors(folder, wrong, steps_of(shape, rng))
    assert max(errors) > 10 * CLOSE, errors


# ----------------------------------------------------------------------------------------- engine


def run(engine: LLMEngine, *contexts: TextContext) -> list[list[int]]:
    """The tokens of each context."""
    for context in contexts:
        engine.add(context)
    while engine.has_work:
        engine.step()
    return [c.tokens.all[c.prompt_length :].tolist() for c in contexts]


def shortfall(reference: Runner, prompt: TextAndVisionContext, tokens: list[int]) -> float:
    """How far the reference's logits of the tokens are below the largest at most; they are ~1."""
    context = prompt
    for token in tokens:
        context.update(token)
    start, end = context.prompt_length - 1, len(context.tokens.all) - 1
    logits = all_logits(reference, [chunk_of(context, 0, end)])[start:]
    return float((logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]).max())


def computer(runner: Runner) -> DeviceSteps:
    steps = runner.pipeline._computer
    assert isinstance(steps, DeviceSteps)
    return steps


NEAR = 0.15
"""Logits of which the reference has the larger one: differences that bfloat16 makes."""


def test_captured_steps_give_the_tokens_of_single_launches(
    shape: VisionShape,
    model: Path,
    device: Device,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt_of(shape, rng, (6, 8), (2, 4)), prompt_of(shape, rng, (4, 4))]
    drawn = SamplingParams(temperature=0.8, seed=7, max_new_tokens=8, ignore_eos=True)
    reference, outcomes = load(model), []
    for buckets in ((), (2, 4)):
        monkeypatch.setattr(device_steps, "BUCKETS", buckets)
        runner = load(model, device)
        contexts = [request(shape, p) for p in prompts]
        found = run(LLMEngine(runner), *contexts, request(shape, prompts[0], params=drawn))
        for prompt, tokens in zip(prompts, found, strict=False):
            assert len(tokens) == 8
            assert shortfall(reference, request(shape, prompt), tokens) < NEAR
        assert bool(computer(runner).replays) == bool(buckets)
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]


def test_a_captured_step_without_the_delta_is_seen(
    host_device: HostDevice,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = decode_graph.DecodeGraph._fill

    def plain(self, turn):  # type: ignore[no-untyped-def]
        self._rows.deltas[:] = 0
        fill(self, turn)

    shape, worst = SHAPES["qwen2_5_vl"], 0.0
    for i in range(8):  # one random model in five gives the same tokens
        if worst > 2 * NEAR:
            return
        folder = write_vision_model(tmp_path / f"{i}", shape, int(rng.integers(1 << 30)))
        prompt = prompt_of(shape, rng, (10, 14))
        with monkeypatch.context() as patch:
            patch.setattr(decode_graph.DecodeGraph, "_fill", plain)
            (found,) = run(LLMEngine(load(folder, host_device)), request(shape, prompt, new=16))
        worst = max(worst, shortfall(load(folder), request(shape, prompt, new=16), found))
    assert worst > 2 * NEAR, worst


def test_the_same_image_hits_the_prefix_cache_and_another_misses(
    shape: VisionShape, model: Path, device: Device, rng: np.random.Generator
) -> None:
    runner, reference = load(model, device), load(model)
    engine = LLMEngine(runner)
    first, second = (picture(shape, (4, 8), i) for i in (1, 2))
    other = 255 - second
    text = [int(t) for t in rng.integers(3, 100, 9)]

    def hit(*prompt: int | npt.NDArray[np.uint8]) -> int:
        before = engine.scheduler.load().prefix_hit_tokens
        (tokens,) = run(engine, request(shape, list(prompt)))
        assert shortfall(reference, request(shape, list(prompt)), tokens) < NEAR
        return engine.scheduler.load().prefix_hit_tokens - before

    prompt = (5, first, *text, second, 9, 10, 11, 12)
    length, start = 1 + 8 + 9 + 8 + 4, 1 + 8 + 9
    assert hit(*prompt) == 0
    assert hit(*prompt) == (length - 1) // BLOCK * BLOCK
    assert decoder(runner).encoded.misses == 2
    assert hit(5, first, *text, other, 9, 10, 11, 12) == start // BLOCK * BLOCK
    assert decoder(runner).encoded.misses == 3


def test_one_row_of_an_image_is_not_a_captured_step(
    shape: VisionShape, model: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a hit only the last row of the last image is left: it has features and three axes."""
    prompt = [5, 6, 7, 8, 9, picture(shape, (4, 8), 1)]
    for _ in range(4):
        prompt.insert(3, 10)
    assert len(request(shape, prompt).tokens.all) == 2 * BLOCK + 1
    runner, reference = load(model, device), load(model)
    engine, queued = LLMEngine(runner), [0]
    launch = decode_graph.DecodeGraph.launch

    def counting(self, pool, turn):  # type: ignore[no-untyped-def]
        queued[0] += 1
        return launch(self, pool, turn)

    monkeypatch.setattr(decode_graph.DecodeGraph, "launch", counting)
    for new, hits in ((1, 0), (1, 2 * BLOCK), (6, 2 * BLOCK)):
        before, captured = engine.scheduler.load().prefix_hit_tokens, queued[0]
        (tokens,) = run(engine, request(shape, prompt, new=new))
        assert engine.scheduler.load().prefix_hit_tokens - before == hits
        assert shortfall(reference, request(shape, prompt, new=new), tokens) < NEAR
        assert queued[0] - captured == new - 1


def test_a_second_engine_goes_on_without_tower_and_pixels(
    shape: VisionShape, model: Path, device: Device, rng: np.random.Generator
) -> None:
    """Blocks and delta move, as from a prefill to a decode worker."""
    whole, part = load(model, device), load(model, device, vision=False)
    assert part.card.mismatch(whole.card) is None
    assert decoder(part).weights_bytes < decoder(whole).weights_bytes
    prompt = prompt_of(shape, rng, (6, 8), (4, 4))
    first, second = request(shape, prompt), request(shape, prompt)
    count = len(first.tokens.all)
    before = Sequence(b"r", first, block_size=BLOCK)
    assert before.images is not None
    before.allocation = whole.pipeline.kv.new_cache().reserve([], count)
    sampled = whole.pipeline.execute(StepPlan(0, (before.chunk(count),))).sampled
    for image in second.images:
        object.__setattr__(image, "pixel_values", image.pixel_values[:0])
    second.extra_model_args["rope_delta"] = np.array([before.images.delta], np.int32)
    second.update(sampled[0].token)
    after = Sequence(b"r", second, block_size=BLOCK)
    scheduler = Scheduler(SchedulerConfig(), part.pipeline.kv.new_cache())
    after.allocation = scheduler.cache.reserve([], count + 1)
    blocks = before.allocation.block_table
    payload = np.empty(shape.layers * len(blocks) * whole.card.layout.block_bytes, np.uint8)
    digest = whole.backend.gather_blocks(whole.pool, 0, shape.layers, blocks, payload)
    moved = after.allocation.block_table[: len(blocks)]
    assert part.backend.scatter_blocks(part.pool, 0, shape.layers, moved, payload) == digest
    after.num_computed_tokens = count
    scheduler.adopt(after)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.apply(part.pipeline.execute(plan), 0.0)
    tokens = second.tokens.all[count:].tolist()
    assert len(tokens) == 8
    assert shortfall(load(model), request(shape, prompt), tokens) < NEAR


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("tower", "words"),
    [
        ({"num_heads": 1, "hidden_size": 136}, "tower heads of up to 128 channels, not 136"),
        ({"hidden_size": 156, "num_heads": 3}, "tower's hidden_size must be a multiple of 8"),
        ({"hidden_size": 4160, "num_heads": 65}, "norms of up to 16384 channels, not 16640"),
    ],
)
def test_a_tower_that_no_kernel_has_is_refused_before_it_is_read(
    device: Device, tmp_path: Path, tower: dict[str, int], words: str
) -> None:
    folder = write_vision_model(tmp_path / "model", SHAPES["qwen3_vl"], 1)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"].update(tower)
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        load(folder, device)
    assert load(folder, device, vision=False).card.architecture == SHAPES["qwen3_vl"].architecture
