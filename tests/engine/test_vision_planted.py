"""The comparisons of test_vision.py see these bugs when they are planted."""

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.models import vision_tower
from baton.engine.scheduling import sequence
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.engine.scheduling.sequence import Sequence

from .vision_cases import cases, load, prompt_logits


def mistakes(name: str) -> int:
    """Number of cases whose logits or greedy tokens differ from those of transformers."""
    runner = load(name)
    engine, wrong = LLMEngine(runner), 0
    for case in cases(name):
        wrong += not np.allclose(prompt_logits(load(name), case), case.logits, atol=1e-4)
        context = case.context()
        engine.add(context)
        while engine.has_work:
            engine.step()
        wrong += context.tokens.all[len(case.prompt) :].tolist() != case.greedy
    return wrong


def swap_the_grid(patch):
    merged = sequence.merged_grids
    patch.setattr(sequence, "merged_grids", lambda *a: [(c, r) for r, c in merged(*a)])


def swap_the_patches(patch):
    at = vision_tower.patch_positions
    patch.setattr(vision_tower, "patch_positions", lambda *a: at(*a)[:, ::-1])


def forget_the_delta(patch):
    patch.setattr(sequence, "context_rope_delta", lambda _: 0)


def forget_the_deep_features(patch):
    merge = vision_tower.VisionTower._merge

    def without(self, states, merger, orders):
        return [f * (not merger.wide) for f in merge(self, states, merger, orders)]

    patch.setattr(vision_tower.VisionTower, "_merge", without)


def leave_the_windows_order(patch):
    patch.setattr(vision_tower.np, "argsort", lambda order: np.arange(len(order)))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("qwen2_5_vl", swap_the_grid),
        ("qwen3_vl", swap_the_grid),
        ("qwen2_5_vl", swap_the_patches),
        ("qwen3_vl", swap_the_patches),
        ("qwen2_5_vl", forget_the_delta),
        ("qwen3_vl", forget_the_delta),
        ("qwen2_5_vl", leave_the_windows_order),
        ("qwen3_vl", forget_the_deep_features),
    ],
)
def test_a_planted_bug_is_seen(name, plant, monkeypatch):
    assert not mistakes(name)
    plant(monkeypatch)
    assert mistakes(name)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_planted_cut_through_an_image_is_seen(name, monkeypatch):
    def cuts() -> int:
        engine, found = LLMEngine(load(name), SchedulerConfig(token_budget=7)), 0
        for case in cases(name):
            engine.add(case.context(new=1))
            while (plan := engine.scheduler.plan(0.0)) is not None:
                ends = [c.start + len(c.tokens) for c in plan.chunks]
                found += sum(a < end < b for end in ends for a, b in case.spans)
                engine.scheduler.apply(engine.pipeline.execute(plan), 0.0)
        return found

    assert not cuts()

    def cut(self, budget, *, alone):
        return min(budget, self.num_tokens - self.num_computed_tokens)

    monkeypatch.setattr(Sequence, "next_count", cut)
    assert cuts()
