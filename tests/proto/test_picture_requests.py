"""The checks of picture requests, for both forms of a request."""

import msgspec
import numpy as np
import pytest

from baton.proto import msgpack_numpy_decoder, msgpack_numpy_encoder
from baton.proto.contexts.pixels import PixelContext, encode_png, png_bytes
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import InputError
from baton.proto.ids import RequestID
from baton.proto.limits import MAX_PICTURE_PROMPT_TOKENS, MAX_RESULT_BYTES
from baton.proto.picture_requests import (
    FLUX,
    STATE_VOCABULARY,
    Z_IMAGE,
    base_length,
    cfg_normalization,
    cfg_truncation,
    check_picture,
    check_prompts,
    encoder_tokens,
    picture_seed,
    preview_steps,
    state_length,
    state_parts,
    state_tokens,
    step_rows,
    uses_negative,
)
from baton.proto.picture_runs import committed_picture, picture_run
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.map_bytes import MapEncoder


def tokens(count=3):
    return TokenBuffer(np.arange(1, count + 1))


def public(**fields):
    return PixelContext(tokens=tokens(), tokens_2=tokens(5), **fields)


def wire(**fields):
    return to_map(public(**fields))


@pytest.fixture(params=[public, wire])
def make(request):
    return request.param


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"height": 16, "width": 4096},
        {"num_inference_steps": 1, "guidance_scale": 0.0, "true_cfg_scale": 0.0},
        {"num_inference_steps": 250, "guidance_scale": 1000.0},
        {"extra_params": {"seed": np.array([7])}, "guidance": np.array([2.5], np.float32)},
        {"negative_tokens": tokens(), "negative_tokens_2": tokens(), "true_cfg_scale": 4.0},
        {"latents": np.zeros((4096, 64), np.float32)},
    ],
)
def test_good_requests_pass(make, fields):
    check_picture(make(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 0}, r"height must be a whole number in 16..4096, not 0"),
        ({"height": 8}, r"height must be a whole number in 16..4096, not 8"),
        ({"width": 1000}, r"width must be a multiple of 16, not 1000"),
        ({"width": 4112}, r"width must be a whole number in 16..4096, not 4112"),
        ({"width": 1 << 50}, r"width must be a whole number in 16..4096"),
        ({"width": 4096, "height": 2048}, r"2048 x 4096 are 8388608 pixels, limit 4194304"),
        ({"num_inference_steps": 0}, r"num_inference_steps must be a whole number in 1..250"),
        ({"num_inference_steps": 251}, r"num_inference_steps must be .* not 251"),
        ({"guidance_scale": -0.1}, r"guidance_scale must be a number in 0..1000.0, not -0.1"),
        ({"guidance_scale": float("nan")}, r"guidance_scale must be a number"),
        ({"guidance_scale": float("inf")}, r"guidance_scale must be a number"),
        ({"true_cfg_scale": -1.0}, r"true_cfg_scale must be a number"),
        ({"true_cfg_scale": float("inf")}, r"true_cfg_scale must be a number"),
        ({"num_images_per_prompt": 2}, r"num_images_per_prompt is 2, limit 1"),
        ({"num_images_per_prompt": 0}, r"num_images_per_prompt is 0, limit 1"),
        ({"sigmas": np.ones(3, np.float32)}, r"sigmas are computed by the model"),
        ({"timesteps": np.ones(3, np.float32)}, r"timesteps are computed by the model"),
        ({"guidance": np.ones(2, np.float32)}, r"guidance must be an array of one number"),
        ({"guidance": np.array([np.nan], np.float32)}, r"guidance must be a number"),
        ({"latents": np.ones(8, np.float32)}, r"latents must be floats \[tokens, channels\]"),
        ({"latents": np.full((4, 4), np.nan, np.float32)}, r"latents must be finite numbers"),
        ({"latents": np.full((4, 4), 1e300)}, r"latents must be finite numbers"),
        ({"latents": np.full((4, 4), -3e38, np.float32)}, r"latents must be finite numbers"),
        ({"latents": np.ones((4, 4), np.int32)}, r"latents must be floats"),
        ({"extra_params": {"seed": np.array([1.0])}}, r"seed must be an array of one integer"),
        (
            {"extra_params": {"previews": np.array([1.0])}},
            r"previews must be an array of one integer",
        ),
        ({"extra_params": {"previews": np.array([17])}}, r"previews must be 0 to 16, not 17"),
        ({"extra_params": {"previews": np.array([-1])}}, r"previews must be 0 to 16, not -1"),
        ({"extra_params": {"other": np.array([1])}}, r"only seed, previews, cfg_normalization"),
        ({"extra_params": {"seed": np.array([1, 2])}}, r"seed must be an array of one integer"),
        ({"negative_tokens_2": tokens(MAX_PICTURE_PROMPT_TOKENS + 1)}, r"1025 tokens, limit 1024"),
    ],
)
def test_each_fault_has_its_message(make, fields, message):
    with pytest.raises(InputError, match=message):
        check_picture(make(**fields))


@pytest.mark.parametrize("value", [1024.0, "1024", True, None])
def test_sizes_are_integers(value):
    with pytest.raises(InputError, match="height must be a whole number"):
        check_picture(public(height=value))


def test_a_seed_is_taken_modulo_two_to_the_64():
    assert picture_seed(public()) is None
    assert picture_seed(public(extra_params={"seed": np.array([-1])})) == (1 << 64) - 1
    seed = np.array([1 << 63], np.uint64)
    assert picture_seed(public(extra_params={"seed": seed})) == 1 << 63


@pytest.mark.parametrize(
    ("steps", "count", "expected"),
    [(4, 3, {1, 2, 3}), (28, 3, {7, 14, 21}), (28, 0, set()), (2, 3, {1}), (1, 16, set()),
     (250, 16, {250 * n // 17 for n in range(1, 17)})],
)  # fmt: skip
def test_previews_divide_the_steps(make, steps, count, expected):
    request = make(num_inference_steps=steps, extra_params={"previews": np.array([count])})
    assert preview_steps(request) == expected
    assert preview_steps(make()) == set()


# --------------------------------------------------------------------------- the row of a picture

GUIDED = {"negative_tokens": tokens(2), "negative_tokens_2": tokens(4), "true_cfg_scale": 3.0}


def test_the_work_of_a_step_follows_the_size_and_the_prompts(make):
    assert step_rows(make(height=16, width=32)) == 2 + 5
    assert step_rows(make(height=1024, width=1024)) == 4096 + 5
    assert step_rows(make(height=64, width=64, **GUIDED)) == 2 * 16 + 5 + 4
    assert step_rows(make(height=64, width=64, **{**GUIDED, "true_cfg_scale": 1.0})) == 16 + 5
    assert step_rows(msgspec.structs.replace(wire(), tokens_2=None)) == 4096 + 3


def test_the_work_of_encoding_follows_the_prompts_that_take_effect(make):
    assert encoder_tokens(make(height=1024, width=1024)) == 5
    assert encoder_tokens(make(**GUIDED)) == 5 + 4
    assert encoder_tokens(make(**{**GUIDED, "true_cfg_scale": 1.0})) == 5
    assert encoder_tokens(msgspec.structs.replace(wire(), tokens_2=None)) == 3  # one encoder


def test_a_row_has_whole_blocks_and_one_position(make):
    parts = state_parts(make(), 8)
    assert [(part.prefix, part.start, part.texts, part.end) for part in parts] == [("", 0, 5, 8)]
    assert state_length(parts) == 9 == len(state_tokens(make(), 8))
    guided = state_parts(make(**GUIDED), 8)
    assert [(part.prefix, part.start, part.end) for part in guided] == [
        ("", 0, 8), ("negative_", 8, 16),
    ]  # fmt: skip
    assert not uses_negative(make(**{**GUIDED, "true_cfg_scale": 1.0}))


def test_rows_of_one_prompt_are_equal_whatever_else_differs(make):
    other = make(height=64, num_inference_steps=3, extra_params={"seed": np.array([9])})
    assert state_tokens(make(), 8).tolist() == state_tokens(other, 8).tolist()
    guided = state_tokens(make(**GUIDED), 8)
    assert guided[:8].tolist() == state_tokens(make(), 8)[:8].tolist()
    assert 0 <= guided.min() <= guided.max() < STATE_VOCABULARY


@pytest.mark.parametrize("name", ["tokens", "tokens_2", "negative_tokens", "negative_tokens_2"])
def test_each_prompt_changes_the_row(name):
    first, second = public(**GUIDED), public(**GUIDED)
    setattr(second, name, TokenBuffer(getattr(first, name).all[::-1].copy()))
    rows = [state_tokens(one, 8) for one in (first, second)]
    at = 8 if name.startswith("negative") else 0
    assert rows[0][at : at + 8].tolist() != rows[1][at : at + 8].tolist()
    assert rows[0][:at].tolist() == rows[1][:at].tolist()


def test_a_missing_prompt_has_no_row(make):
    with pytest.raises(InputError, match="negative_tokens_2 are missing"):
        state_tokens(make(negative_tokens=tokens(), true_cfg_scale=2.0), 8)


# --------------------------------------------------------------------------- one text encoder


def single(**fields):
    """A request for a model with one text encoder."""
    return PixelContext(**{"tokens": tokens(), "guidance_scale": 0.0, **fields})


CLASSIC = {"negative_tokens": tokens(9), "guidance_scale": 3.0}


def test_guidance_makes_the_negative_prompt_take_effect():
    assert uses_negative(single(**CLASSIC))
    assert not uses_negative(single(**{**CLASSIC, "guidance_scale": 0.0}))
    assert not uses_negative(single(guidance_scale=3.0))
    assert step_rows(single(height=64, width=64, **CLASSIC)) == 2 * 16 + 3 + 9
    assert encoder_tokens(single(**CLASSIC)) == 3 + 9


def test_a_row_of_one_encoder_has_no_pooled_vector():
    parts = state_parts(single(tokens=tokens(8)), 8)
    assert [(part.texts, part.end) for part in parts] == [(8, 8)]
    parts = state_parts(single(**CLASSIC), 8)
    assert [(part.prefix, part.texts, part.end) for part in parts] == [
        ("", 3, 8), ("negative_", 9, 24),
    ]  # fmt: skip


def test_a_committed_row_of_one_encoder_has_the_parts_of_its_prompts():
    """The row takes the place of the tokens, whose number is ``base``."""
    fresh = to_map(single(tokens=tokens(20), **CLASSIC))
    run = picture_run(fresh, RequestID("r"), 8)
    run.tokens.advance_with_token(0)
    wire = committed_picture(run)
    assert base_length(wire) == 20 and base_length(fresh) == 0
    frames = list(MapEncoder().packed(wire))
    public = msgpack_numpy_decoder(PixelContext)([frames[0], *frames[1]])
    assert msgpack_numpy_encoder().frames(public) == [frames[0], *frames[1]]
    assert public.tokens == run.tokens and public.request_id.value == "r"
    assert state_parts(wire, 8) == state_parts(fresh, 8) == run.picture.parts
    again = picture_run(wire, RequestID("r"), 8)
    assert again.picture.step_rows == run.picture.step_rows == step_rows(fresh)
    assert again.picture.encoder_tokens == run.picture.encoder_tokens == encoder_tokens(fresh)


def test_each_prompt_of_one_encoder_changes_the_row():
    row = state_tokens(single(**CLASSIC), 8)
    other = state_tokens(single(**{**CLASSIC, "tokens": tokens(4)}), 8)
    negative = state_tokens(single(**{**CLASSIC, "negative_tokens": tokens(10)}), 8)
    assert row[:8].tolist() != other[:8].tolist()
    assert row[:8].tolist() == negative[:8].tolist()
    assert row[8:].tolist() != negative[8:].tolist()
    assert row[:8].tolist() != state_tokens(public(), 8)[:8].tolist()


@pytest.mark.parametrize(
    ("request_", "architecture", "message"),
    [
        (single(), FLUX, "tokens_2 are missing"),
        (single(**CLASSIC), FLUX, "tokens_2 are missing"),
        (public(extra_params={"cfg_truncation": np.array([0.5])}), FLUX, "cfg_truncation has no"),
        (public(guidance_scale=0.0), Z_IMAGE, "tokens_2 has no meaning"),
        (single(negative_tokens_2=tokens()), Z_IMAGE, "negative_tokens_2 has no meaning"),
        (single(true_cfg_scale=2.0), Z_IMAGE, "use guidance_scale"),
        (single(guidance=np.array([2.0])), Z_IMAGE, "use guidance_scale"),
        (single(guidance_scale=0.5), Z_IMAGE, "needs negative_tokens"),
    ],
)
def test_prompts_that_do_not_fit_the_model(request_, architecture, message):
    with pytest.raises(InputError, match=message):
        check_prompts(request_, architecture)


def test_prompts_that_fit_the_model():
    check_prompts(public(**GUIDED), FLUX)
    check_prompts(single(), Z_IMAGE)
    limits = {"cfg_normalization": np.array([1]), "cfg_truncation": np.array([0.5], np.float32)}
    request = single(**CLASSIC, extra_params=limits)
    check_picture(request)
    check_prompts(request, Z_IMAGE)
    assert (cfg_normalization(request), cfg_truncation(request)) == (1.0, 0.5)
    assert (cfg_normalization(single()), cfg_truncation(single())) == (0.0, 1.0)


def test_incompressible_pixels_fit_the_bound():
    noise = np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    assert 64 * 96 * 3 < len(encode_png(noise)) <= png_bytes(64, 96)
    assert png_bytes(2048, 2048) <= MAX_RESULT_BYTES
