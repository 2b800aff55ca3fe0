import numpy as np
import pytest

import baton.proto as proto
from baton.proto import ImageMetadata, InputError, TextAndVisionContext, TextContext

VALIDATORS = [getattr(proto, name) for name in proto.__all__ if name.startswith("validate_")]


def vision(count=1, ndim=2, old=0, **args):
    tokens = np.full(4 * max(1, count), 9)
    images = [
        ImageMetadata(start_idx=4 * i, end_idx=4 * i + 2, pixel_values=np.zeros((1,) * ndim))
        for i in range(count)
    ]
    pixels = (np.zeros((1,) * ndim),) * old
    return TextAndVisionContext(
        max_length=99, tokens=tokens, vision_token_ids=[9], images=images,
        pixel_values=pixels, extra_model_args={k: np.zeros(1) for k in args},
    )  # fmt: skip


def refuses(validator, context, match):
    with pytest.raises(InputError, match=match):
        validator(context)


def test_there_are_seven_and_only_the_first_refuses_text():
    text = TextContext(max_length=9, tokens=[1])
    assert len(VALIDATORS) == 7
    for validator in VALIDATORS:
        if validator is proto.validate_requires_vision_context:
            refuses(validator, text, "TextAndVisionContext")
        else:
            assert validator(text) is None


def test_requires_vision_context():
    assert proto.validate_requires_vision_context(vision()) is None


def test_only_one_image():
    check = proto.validate_only_one_image
    for fine in (vision(0), vision(1), vision(0, old=1)):
        assert check(fine) is None
    refuses(check, vision(2), "one image, not 2")
    refuses(check, vision(1, old=1), "one image, not 2")


def test_initial_prompt_has_image():
    check = proto.validate_initial_prompt_has_image
    for fine in (vision(1), vision(0, old=1)):
        assert check(fine) is None
    context = vision(0)
    refuses(check, context, "needs an image")
    context.update(1)
    assert check(context) is None
    context.reset()
    refuses(check, context, "needs an image")


def test_aspect_ratio_args():
    check = proto.validate_aspect_ratio_args
    assert check(vision(0)) is None
    refuses(check, vision(1), "aspect_ratio_ids")
    refuses(check, vision(0, old=1), "aspect_ratio_ids")
    refuses(check, vision(1, aspect_ratio_ids=1), "aspect_ratio_mask")
    assert check(vision(1, aspect_ratio_ids=1, aspect_ratio_mask=1)) is None


def test_image_shape_5d():
    check = proto.validate_image_shape_5d
    for fine in (vision(0), vision(2, ndim=5), vision(0, ndim=5, old=1)):
        assert check(fine) is None
    context = vision(2, ndim=5)
    context.images[1].pixel_values = np.zeros((1, 1))
    refuses(check, context, "5 dimensions")
    for ndim in (4, 6):
        refuses(check, vision(0, ndim=ndim, old=1), "5 dimensions")


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (proto.validate_image_grid_thw_args, "image_grid_thw"),
        (proto.validate_vision_position_ids, "vision_position_ids"),
    ],
)
def test_arguments_of_images_that_wait(check, name):
    assert check(vision(0)) is None
    assert check(vision(1, **{name: 1})) is None
    refuses(check, vision(1), name)
    context = vision(1)
    context.update(1)
    assert check(context) is None
