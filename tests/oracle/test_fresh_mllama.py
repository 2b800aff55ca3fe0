"""Fresh random checkpoints of mllama written by transformers, computed by both."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.tiled_images import aspect_ratios

from ..engine.mllama_cases import Case, load, prompt_logits
from .makers import load_maker

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")


maker = load_maker("make_mllama")
SEED = int(np.random.SeedSequence().entropy % (1 << 31))
CLOSE = 1e-3
"""Gap between the two best logits below which rounding may decide."""


def settings_of(rng) -> dict:
    """Random shapes."""
    base = maker.SETTINGS
    heads, dim = 4, int(rng.choice([8, 12, 16]))
    cross = sorted(rng.choice(np.arange(1, 9), 3, replace=False).tolist())
    text = {**base["text"], "num_attention_heads": heads, "hidden_size": heads * dim}
    text |= {"num_key_value_heads": int(rng.choice([1, 2, 4]))}
    text |= {"num_hidden_layers": 9, "cross_attention_layers": cross}
    side = int(rng.choice([4, 5]))
    deep = [int(rng.integers(0, 2)), 3]
    vision = {**base["vision"], "patch_size": side, "image_size": side * int(rng.choice([3, 4, 5]))}
    vision |= {"num_hidden_layers": 4, "num_global_layers": int(rng.integers(1, 4))}
    vision |= {"intermediate_layers_indices": deep, "vision_output_dim": 48, "norm_eps": 1e-3}
    return {"text": text, "vision": vision}


def parts_of(rng, images: int, side: int) -> tuple:
    """Text and images in random order; the images fit a canvas of tiles of ``side`` pixels."""
    parts: list = [int(rng.integers(1, 6))]
    ratios = aspect_ratios(maker.TILES)
    for number in range(images):
        rows, columns = ratios[int(rng.integers(len(ratios)))]
        low = [side * (count - 1) + 1 for count in (rows, columns)]
        size = [int(rng.integers(a, a + side)) for a in low]
        if max(size) < side:
            size[int(rng.integers(2))] = side
        parts.append(tuple(size))
        if rng.random() < 0.5 or number == images - 1:
            parts.append(int(rng.integers(1, 6)))
    return tuple(parts)


@dataclass
class Made:
    """A checkpoint of random shape, with cases and the margins of their greedy tokens."""

    folder: Path
    settings: dict
    cases: list
    margins: list


@pytest.fixture(scope="module", params=[0, 1])
def made(request, tmp_path_factory):
    seed = SEED + request.param
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    settings = settings_of(rng)
    model = maker.make_model(settings, seed)
    folder = tmp_path_factory.mktemp("mllama")
    maker.save(model, settings, folder)
    positions = load(folder=folder).card.image_positions
    cases, margins = [], []
    for images in (0, 1, 1, 2, 3, 3):
        one = maker.make_case(parts_of(rng, images, settings["vision"]["image_size"]), rng)
        arrays = maker.arrays_of(model, settings, one)
        margins.append(arrays.pop("margins"))
        ids, features = arrays.pop("ids", np.zeros(0)).tolist(), arrays.pop("features", None)
        arrays["greedy"] = arrays["greedy"].tolist()
        cases.append(
            Case(pixels=one["pixels"], ids=ids, features=features, positions=positions, **arrays)
        )
    return Made(folder, settings, cases, margins)


def same(found: list[int], case: Case, margins: np.ndarray) -> bool:
    """True if the tokens are equal up to the first whose choice rounding may decide."""
    close = np.flatnonzero(margins < CLOSE)
    end = int(close[0]) if len(close) else len(margins)
    return found[:end] == case.greedy[:end]


def finish(engine, contexts) -> list[list[int]]:
    for context in contexts:
        engine.add(context)
    while engine.has_work:
        engine.step()
    return [c.tokens.all[c.prompt_length :].tolist() for c in contexts]


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_features_and_logits(made, backend):
    runner = load(backend, made.folder)
    tower = runner.pipeline.model._tower
    for case in made.cases:
        for at, (pixels, ratio) in enumerate(zip(case.pixels, case.ids, strict=True)):
            found = tower.encode(pixels, aspect_ratios(maker.TILES)[ratio - 1])
            np.testing.assert_allclose(found, case.features[at], atol=1e-4)
        np.testing.assert_allclose(prompt_logits(runner, case), case.logits, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 3, 17, 90])
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_greedy_tokens_with_budgets_that_end_between_images(made, backend, budget):
    config = SchedulerConfig(max_batch=3, token_budget=budget)
    engine = LLMEngine(load(backend, made.folder, num_blocks=512), config)
    found = finish(engine, [case.context() for case in made.cases])
    for tokens, case, margins in zip(found, made.cases, made.margins, strict=True):
        assert same(tokens, case, margins)


def test_prefix_hits_depend_on_the_image(made):
    engine = LLMEngine(load(folder=made.folder, num_blocks=512))

    def hits(context) -> int:
        before = engine.scheduler.load().prefix_hit_tokens
        finish(engine, [context])
        return engine.scheduler.load().prefix_hit_tokens - before

    for case in made.cases[1:]:
        assert hits(case.context()) == 0
        assert hits(case.context()) == (len(case.context().tokens) - 1) // 4 * 4
        other = [*case.pixels[:-1], 255 - case.pixels[-1]]
        assert hits(case.context(pixels=other)) == case.context().images[-1].start_idx - 1


def test_a_prompt_split_between_two_engines(made):
    """One computes a part of the prompt, another without a tower the rest and the answer."""
    whole, part = load(folder=made.folder), load(folder=made.folder, vision=False)
    for case, margins in zip(made.cases[1:], made.margins[1:], strict=True):
        for left in (1, 2, len(case.prompt)):
            first = case.context()
            computed = len(first.tokens) - left
            before = Sequence(b"r", first, block_size=4)
            before.allocation = whole.pipeline.kv.new_cache().reserve([], len(first.tokens))
            assert not whole.pipeline.execute(StepPlan(0, (before.chunk(computed),))).failed
            second = case.context(
                pixels=[p[:0] for p in case.pixels],
                rope_delta=np.array([before.images.delta], np.int32),
            )
            after = Sequence(b"r", second, block_size=4)
            scheduler = Scheduler(SchedulerConfig(), part.pipeline.kv.new_cache())
            after.allocation = scheduler.cache.reserve([], len(second.tokens) + 1)
            moved = after.allocation.block_table[: len(before.allocation.block_table)]
            part.pool[:] = np.nan
            part.pool[:, moved] = whole.pool[:, before.allocation.block_table]
            after.num_computed_tokens = len(second.tokens) - 1
            if left > 1:
                after.num_computed_tokens = computed
                plan = StepPlan(0, (after.chunk(left - 1),))
                assert not part.pipeline.execute(plan).failed
                after.num_computed_tokens = len(second.tokens) - 1
            scheduler.adopt(after)
            while (plan := scheduler.plan(0.0)) is not None:
                scheduler.apply(part.pipeline.execute(plan), 0.0)
            found = second.tokens.all[second.prompt_length :].tolist()
            assert same(found, case, margins)


def test_a_checkpoint_in_the_layout_of_memory(made, tmp_path):
    """Tensors with the names that the modules have in transformers; rope_scaling as on the hub."""
    from safetensors.numpy import load_file, save_file

    raw = json.loads((made.folder / "config.json").read_text())
    tensors = load_file(made.folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        new = name.replace("language_model.lm_head", "lm_head")
        new = new.replace("language_model.model.", "language_model.")
        renamed[new if new.startswith("lm_head") else f"model.{new}"] = tensor
    rope = raw["text_config"].pop("rope_parameters")
    raw["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for name in ("generation_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((made.folder / name).read_text())
    save_file(renamed, tmp_path / "model.safetensors")
    for case in made.cases[:3]:
        found = prompt_logits(load(folder=tmp_path), case)
        np.testing.assert_allclose(found, case.logits, atol=1e-4)


def test_pixels_equal_those_of_the_image_processor(made):
    tower = load(folder=made.folder).pipeline.model._tower
    side, patch = (made.settings["vision"][name] for name in ("image_size", "patch_size"))
    for case in made.cases[1:]:
        theirs = maker.images_of(made.settings, {"pixels": case.pixels})["pixel_values"][0].numpy()
        for pixels, ratio, values in zip(case.pixels, case.ids, theirs, strict=True):
            canvas = aspect_ratios(maker.TILES)[ratio - 1]
            grid, tiles = side // patch, canvas[0] * canvas[1]
            mine = tower.patches(pixels, canvas).reshape(tiles, grid, grid, patch, patch, 3)
            mine = mine.transpose(0, 5, 1, 3, 2, 4).reshape(tiles, 3, side, side)
            np.testing.assert_allclose(mine, values[:tiles], rtol=0, atol=2e-6)
            assert not values[tiles:].any()


def test_bf16_checkpoint(tmp_path):
    """Weights rounded to bfloat16, gates and tables too. AMX and AVX512-BF16 round as well."""
    print(f"seed {SEED}")
    model = maker.make_model(maker.SETTINGS, SEED).bfloat16()
    maker.save(model, maker.SETTINGS, tmp_path)
    exact = maker.transformers.MllamaForConditionalGeneration.from_pretrained(
        tmp_path, dtype="float32"
    )
    runner = load(folder=tmp_path)
    rng = np.random.default_rng(SEED)
    for parts in maker.CASES[:3]:
        one = maker.make_case(parts, rng)
        arrays = maker.arrays_of(exact, maker.SETTINGS, one)
        del arrays["margins"]
        case = Case(pixels=one["pixels"], **{**arrays, "ids": arrays["ids"].tolist()})
        rounded = runner.backend.numerics.endswith(("amx", "bf16"))
        tolerance = 0.1 if rounded else 1e-4
        np.testing.assert_allclose(prompt_logits(runner, case), case.logits, atol=tolerance)
