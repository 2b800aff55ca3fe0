"""The comparisons of test_mllama.py see these bugs when they are planted."""

from dataclasses import replace

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.models import cross_decoder, cross_views, tiled_tower
from baton.proto.contexts import tiled_images

from .mllama_cases import cases, load, prompt_logits


def mistakes() -> int:
    """Number of cases whose logits or greedy tokens differ from those of transformers."""
    engine, wrong = LLMEngine(load()), 0
    for case in cases():
        wrong += not np.allclose(prompt_logits(load(), case), case.logits, atol=1e-4)
        context = case.context()
        engine.add(context)
        while engine.has_work:
            engine.step()
        wrong += context.tokens.all[context.prompt_length :].tolist() != case.greedy
    return wrong


def shift_the_aspect_ratio_id(patch):
    known = tiled_tower.TiledTower.ratio_id
    patch.setattr(tiled_tower.TiledTower, "ratio_id", lambda *a: known(*a) - 1)


def ignore_the_cross_mask(patch):
    every = tiled_images.SeenImages
    patch.setattr(every, "visible", lambda self, position: (0, len(self.ranges)))


def forget_the_group_of_images(patch):
    known = tiled_images.SeenImages.visible

    def last_alone(self, position):
        first, last = known(self, position)
        return (first, last) if first == last else (last - 1, last)

    patch.setattr(tiled_images.SeenImages, "visible", last_alone)


def leave_the_gates_out(patch):
    known = cross_decoder.gate
    patch.setattr(cross_decoder, "gate", lambda *a: known(*a) ** 0)


def leave_the_towers_gates_out(patch):
    known = tiled_tower.TiledTower._gate
    patch.setattr(tiled_tower.TiledTower, "_gate", lambda *a: known(*a) ** 0)


def attend_to_padded_tiles(patch):
    known = cross_views._Run.counts

    def whole(self, shape):
        return ((one, shape.image_tokens) for one, _ in known(self, shape))

    patch.setattr(cross_views._Run, "counts", whole)


def let_padding_attend_to_padding(patch):
    known = tiled_tower.row_groups

    def open_groups(config, tiles):
        groups = known(config, tiles)
        return replace(groups, ends=np.full_like(groups.ends, groups.ends.max()))

    patch.setattr(tiled_tower, "row_groups", open_groups)


def compute_the_mlp_of_rows_without_images(patch):
    known = cross_decoder.cross_view

    def unmasked(*arguments):
        view = known(*arguments)
        return view and replace(view, scale=np.ones_like(view.scale))

    patch.setattr(cross_decoder, "cross_view", unmasked)


def mix_up_the_features_of_layers(patch):
    patch.setattr(tiled_tower, "feature_order", lambda hidden, deep: np.arange(hidden * (deep + 1)))


def attend_to_the_positions_of_images(patch):
    known = cross_decoder.text_rows

    def unshifted(inputs):
        return replace(known(inputs), block_tables=inputs.block_tables)

    patch.setattr(cross_decoder, "text_rows", unshifted)


@pytest.mark.parametrize(
    "plant",
    [
        shift_the_aspect_ratio_id,
        ignore_the_cross_mask,
        forget_the_group_of_images,
        leave_the_gates_out,
        leave_the_towers_gates_out,
        attend_to_padded_tiles,
        let_padding_attend_to_padding,
        compute_the_mlp_of_rows_without_images,
        mix_up_the_features_of_layers,
        attend_to_the_positions_of_images,
    ],
)
def test_a_planted_bug_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    assert mistakes()


def test_without_a_bug_there_is_no_mistake():
    assert not mistakes()
