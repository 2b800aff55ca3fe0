"""Fresh random checkpoints with vision written by transformers, computed by both."""

import json

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence

from ..engine.vision_cases import Case, load, prompt_logits
from .makers import load_maker

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")


maker = load_maker("make_vision")
SEED = int(np.random.SeedSequence().entropy % (1 << 31))
CLOSE = 1e-3
"""Gap between the two best logits below which rounding may decide."""


def split(rng, total: int) -> list[int]:
    """Three positive sections of ``total`` pairs, as even as interleaving needs."""
    third = total // 3
    sections = [total - 2 * third, third, third]
    give = int(rng.integers(0, third))
    return [sections[0] + give, sections[1] - give, sections[2]] if rng.random() < 0.5 else sections


def settings_of(family: str, rng) -> dict:
    """Random shapes of a family."""
    base = maker.MODELS[family]
    heads, dim = 4, int(rng.choice([8, 12, 16]))
    text = {**base["text"], "num_attention_heads": heads, "num_key_value_heads": 2}
    text |= {"hidden_size": heads * dim, "num_hidden_layers": 4}
    if family == "qwen3_vl":
        text["head_dim"] = dim
    text["rope_parameters"] = {
        **text["rope_parameters"],
        "rope_theta": float(rng.choice([1e4, 1e6])),
        "mrope_section": split(rng, dim // 2),
    }
    vision = {**base["vision"], "out_hidden_size": heads * dim, "depth": 4}
    vision |= {"hidden_size": int(rng.choice([32, 48])), "patch_size": int(rng.choice([4, 6]))}
    if family == "qwen3_vl":
        vision["num_position_embeddings"] = int(rng.choice([9, 36, 49]))
        vision["deepstack_visual_indexes"] = [int(rng.integers(0, 2)), 3]
    else:
        vision["window_size"] = vision["patch_size"] * 2 * int(rng.choice([1, 2, 3]))
        vision["fullatt_block_indexes"] = [int(rng.integers(0, 4))]
    return {"family": base["family"], "text": text, "vision": vision}


def grids_of(rng, count: int) -> tuple:
    return tuple(tuple(2 * int(n) for n in rng.integers(1, 8, 2)) for _ in range(count))


def case_of(model, settings, rng, count: int) -> tuple[Case, np.ndarray]:
    """A case with ``count`` images, and the margins of its greedy tokens."""
    made = maker.make_case(settings, grids_of(rng, count), rng)
    features, deep = maker.features_of(model, settings, made)
    reference = maker.reference_of(model, settings, made)
    case = Case(
        prompt=made["prompt"],
        grids=made["grids"],
        pixels=made["pixels"],
        features=features,
        deep=deep or [np.zeros(0)] * count,
        logits=reference["logits"],
        greedy=reference["greedy"].tolist(),
        positions=reference["positions"],
        delta=int(reference["delta"][0]),
    )
    return case, reference["margins"]


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


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def made(request, tmp_path_factory):
    """A checkpoint of random shape, and cases with one to four images."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    settings = settings_of(request.param, rng)
    model = maker.make_model(settings, SEED)
    folder = tmp_path_factory.mktemp(request.param)
    maker.save(model, folder)
    return folder, settings, [case_of(model, settings, rng, count) for count in (1, 2, 3, 4)]


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_features_and_logits(made, backend):
    folder, _, cases = made
    runner = load(folder, backend)
    for case, _ in cases:
        images = [(p, tuple(g[1:].tolist())) for p, g in zip(case.pixels, case.grids, strict=True)]
        found = runner.pipeline.model._tower.encode(images)
        for mine, theirs, deep in zip(found, case.features, case.deep, strict=True):
            np.testing.assert_allclose(mine.features, theirs, atol=1e-4)
            for one, other in zip(mine.deep, deep, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)
        np.testing.assert_allclose(prompt_logits(runner, case), case.logits, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 5, 17, 40])
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_greedy_tokens_with_budgets_that_end_between_images(made, backend, budget):
    folder, _, cases = made
    engine = LLMEngine(load(folder, backend), SchedulerConfig(max_batch=3, token_budget=budget))
    found = finish(engine, [case.context() for case, _ in cases])
    for tokens, (case, margins) in zip(found, cases, strict=True):
        assert same(tokens, case, margins)


def test_prefix_hits_depend_on_the_image(made):
    folder, _, cases = made
    engine = LLMEngine(load(folder))
    for case, margins in cases:
        before = engine.scheduler.load().prefix_hit_tokens
        assert same(finish(engine, [case.context()])[0], case, margins)
        first = engine.scheduler.load().prefix_hit_tokens
        assert first == before
        assert same(finish(engine, [case.context()])[0], case, margins)
        again = engine.scheduler.load().prefix_hit_tokens
        assert again - first == (len(case.prompt) - 1) // 4 * 4
        other = [255 - pixels for pixels in case.pixels]
        finish(engine, [case.context(pixels=other)])
        missed = engine.scheduler.load().prefix_hit_tokens - again
        assert missed == case.spans[0][0] // 4 * 4


def test_a_prompt_split_between_two_engines(made):
    """One engine computes the prompt, another one without a tower generates from its blocks."""
    folder, _, cases = made
    whole, part = load(folder), load(folder, vision=False)
    for case, margins in cases:
        before = Sequence(b"r", case.context(), block_size=4)
        before.allocation = whole.pipeline.kv.new_cache().reserve([], len(case.prompt))
        plan = StepPlan(0, (before.chunk(len(case.prompt)),))
        token = whole.pipeline.execute(plan).sampled[0].token
        second = case.context(
            pixels=[p[:0] for p in case.pixels],
            rope_delta=np.array([before.images.delta], np.int32),
        )
        second.update(token)
        after = Sequence(b"r", second, block_size=4)
        scheduler = Scheduler(SchedulerConfig(), part.pipeline.kv.new_cache())
        after.allocation = scheduler.cache.reserve([], len(case.prompt) + 1)
        count = len(before.allocation.block_table)
        moved = after.allocation.block_table[:count]
        part.pool[:, moved] = whole.pool[:, before.allocation.block_table]
        after.num_computed_tokens = len(case.prompt)
        scheduler.adopt(after)
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.apply(part.pipeline.execute(plan), 0.0)
        assert same(second.tokens.all[len(case.prompt) :].tolist(), case, margins)


def test_a_checkpoint_in_the_layout_of_the_hub(made, tmp_path):
    """A flat config with ``rope_scaling`` of type mrope, or tensors with the other prefixes."""
    from safetensors.numpy import load_file, save_file

    folder, settings, cases = made
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    nested = any(name.startswith("model.language_model.") for name in tensors)
    if nested:
        tensors = {
            n.replace("model.language_model.", "model.").replace("model.visual.", "visual."): t
            for n, t in tensors.items()
        }
    else:
        tensors = {
            n.replace("model.", "model.language_model.").replace("visual.", "model.visual."): t
            for n, t in tensors.items()
        }
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    if settings["family"] == "Qwen2_5_VL":
        raw |= {k: v for k, v in text.items() if k != "model_type"}
        raw |= {"rope_theta": rope["rope_theta"], "torch_dtype": "float32"}
        raw["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    else:
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
        raw["text_config"] = text
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for name in ("generation_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    for case, _ in cases[:2]:
        np.testing.assert_allclose(prompt_logits(load(tmp_path), case), case.logits, atol=1e-4)


def test_pixels_equal_those_of_the_image_processor(made):
    pytest.importorskip("PIL", reason="Pillow is not installed")
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    folder, settings, _ = made
    side = settings["vision"]["patch_size"]
    tower = load(folder).pipeline.model._tower
    rng = np.random.default_rng(SEED)
    for rows, columns in grids_of(rng, 3):
        pixels = rng.integers(0, 256, (rows * side, columns * side, 3)).astype(np.uint8)
        processor = Qwen2VLImageProcessorPil(
            patch_size=side,
            image_mean=maker.MEAN,
            image_std=maker.STD,
            size={"shortest_edge": 1, "longest_edge": 1 << 20},
        )
        theirs = processor(Image.fromarray(pixels), return_tensors="np")
        assert theirs["image_grid_thw"].tolist() == [[1, rows, columns]]
        mine = tower._patches(pixels, np.arange(rows * columns // 4))
        mine = mine.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        expected = theirs["pixel_values"].reshape(-1, 3, 2, side, side)
        for time in (0, 1):
            np.testing.assert_allclose(mine, expected[:, :, time], rtol=0, atol=2e-6)
