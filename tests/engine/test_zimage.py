"""Z-Image against diffusers' results on a tiny random model."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.engine.pictures import zimage
from baton.engine.pictures.draw import PictureEngine
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.guidance import ClassicCfg
from baton.engine.pictures.prompt_decoder import _EarlyStates
from baton.engine.pictures.zimage import ZImageTransformer
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import CheckpointError, InputError
from baton.proto.ids import RequestID

from .picture_model import backends, draw, load

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pictures" / "zimage"
REFERENCE = dict(np.load(FOLDER / "reference.npz"))
CASES = ["plain", "guided", "limited"]
FAR = 0.01
"""A distance of latents that a bug makes; that of the right model is below 1e-4."""


@pytest.fixture(scope="module", params=backends())
def loaded(request):
    return load(request.param, FOLDER)


@pytest.fixture(scope="module")
def compiled():
    if "cpu" not in backends():
        pytest.skip("the C kernels were not built")
    return load("cpu", FOLDER)


def reference(case, name):
    return REFERENCE[f"{case}_{name}"]


def tokens(case, name):
    return TokenBuffer(reference(case, name).astype(np.int64))


def context_of(case, *, latents=True, steps=4, **changes):
    """The request of a reference case; with its own noise unless ``latents`` is False."""
    fields = json.loads(reference(case, "case").tobytes())
    named = {
        name: np.array([fields.pop(name)])
        for name in ("cfg_normalization", "cfg_truncation")
        if name in fields
    }
    for name in ("prompt", "negative_prompt"):
        fields.pop(name, None)
    if fields["guidance_scale"] > 0:
        fields["negative_tokens"] = tokens(case, "negative_tokens")
    if latents:
        fields["latents"] = reference(case, "start")
    fields |= {"tokens": tokens(case, "tokens"), "num_inference_steps": steps}
    return PixelContext(**{**fields, "extra_params": named, **changes})


def far(loaded, case):
    """The largest distance of latents from those of diffusers."""
    return np.abs(draw(loaded, context_of(case)).latents - reference(case, "latents")).max()


@pytest.mark.parametrize("case", CASES)
def test_prompts_become_the_tokens_of_diffusers(case):
    engine = PictureEngine(FOLDER, backend="numpy")
    fields = json.loads(reference(case, "case").tobytes())
    given = {"guidance_scale": fields["guidance_scale"]}
    context = engine.request(fields["prompt"], fields.get("negative_prompt"), **given)
    assert context.tokens.all.tolist() == reference(case, "tokens").tolist()
    assert context.tokens_2 is None
    if case != "plain":
        expected = reference(case, "negative_tokens").tolist()
        assert context.negative_tokens.all.tolist() == expected


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_encoded_as_by_diffusers(loaded, case):
    state = loaded.encoder.encode(context_of(case))
    names = ["prompt"] if case == "plain" else ["negative_prompt", "prompt"]
    assert sorted(state) == names
    for name in names:
        np.testing.assert_allclose(state[name], reference(case, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_latents_and_pixels_equal_those_of_diffusers(loaded, case):
    context = context_of(case)
    drawing = loaded.denoiser.start(context, loaded.encoder.encode(context))
    np.testing.assert_allclose(drawing.sigmas, reference(case, "sigmas"), atol=1e-6)
    loaded.denoiser.step([drawing])
    if case == "plain":  # the reference has the noise before guidance
        np.testing.assert_allclose(drawing.noise, reference(case, "noise"), atol=1e-4)
    loaded.denoiser.step([drawing])
    np.testing.assert_allclose(drawing.latents, reference(case, "middle"), atol=1e-4)
    while not drawing.is_done:
        loaded.denoiser.step([drawing])
    np.testing.assert_allclose(drawing.latents, reference(case, "latents"), atol=1e-4)
    pixels, expected = loaded.denoiser.finish(drawing), reference(case, "pixels")
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= 1
    assert expected.std() > 20, "the reference is a picture, not one colour"


# ------------------------------------------------------------------ planted bugs


@pytest.mark.parametrize("name", ["_text_pad", "_image_pad"])
def test_a_missing_pad_token_is_noticed(compiled, monkeypatch, name):
    pad = getattr(compiled.denoiser.transformer, name)
    monkeypatch.setattr(compiled.denoiser.transformer, name, np.zeros_like(pad))
    assert far(compiled, "plain") > FAR


def test_padding_that_is_left_out_is_noticed(monkeypatch):
    monkeypatch.setattr(zimage, "padded", lambda count: count)
    assert far(load("auto", FOLDER), "plain") > FAR


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids - np.array([1, 0, 0], np.int32) * (ids[:, :1] > 0),
        lambda ids: ids[:, [0, 2, 1]],
        lambda ids: np.where(ids[:, :1] == 0, ids[:1], ids),
    ],
    ids=["offset", "axes", "padding"],
)
def test_wrong_positions_of_the_image_are_noticed(compiled, monkeypatch, change):
    right = zimage.image_ids
    monkeypatch.setattr(zimage, "image_ids", lambda *sizes: change(right(*sizes)))
    monkeypatch.setattr(compiled.denoiser.transformer, "_shapes", {})
    distance = far(compiled, "plain")
    compiled.denoiser.transformer._shapes.clear()
    assert distance > FAR


def test_positions_of_the_text_from_0_are_noticed(compiled, monkeypatch):
    right = zimage.text_ids
    shift = np.array([1, 0, 0], np.int32)
    monkeypatch.setattr(zimage, "text_ids", lambda text: right(text) - shift)
    monkeypatch.setattr(compiled.denoiser.transformer, "_shapes", {})
    distance = far(compiled, "plain")
    compiled.denoiser.transformer._shapes.clear()
    assert distance > FAR


def test_a_negative_prompt_that_is_ignored_is_noticed(compiled, monkeypatch):
    monkeypatch.setattr(ClassicCfg, "combine", lambda self, request, noise, *_: noise)
    assert far(compiled, "guided") > FAR


@pytest.mark.parametrize("name", ["cfg_normalization", "cfg_truncation"])
def test_limits_of_guidance_that_are_ignored_are_noticed(compiled, monkeypatch, name):
    neutral = 0.0 if name == "cfg_normalization" else 1.0
    monkeypatch.setattr(f"baton.engine.pictures.guidance.{name}", lambda request: neutral)
    assert far(compiled, "limited") > FAR
    assert far(compiled, "guided") < 1e-4  # there is no limit to ignore


def test_states_after_the_norm_are_noticed(compiled, monkeypatch):
    normed = lambda self, *inputs: self._run_layers(*inputs)[1]  # noqa: E731
    monkeypatch.setattr(_EarlyStates, "_states", normed)
    assert far(compiled, "plain") > FAR


def test_states_after_the_last_layer_are_noticed(monkeypatch):
    monkeypatch.setattr("baton.engine.pictures.prompt_decoder._without_last", lambda config: config)
    wrong = load("auto", FOLDER)
    assert len(wrong.encoder.encoders.decoder._decoder._layers) == 3
    state = wrong.encoder.encode(context_of("plain"))["prompt"]
    assert np.abs(state - reference("plain", "prompt")).max() > FAR
    assert far(wrong, "plain") > FAR


def test_a_missing_shift_is_noticed(compiled, monkeypatch):
    opened = compiled.denoiser._folder
    plain = msgspec.structs.replace(opened.scheduler, shift=1.0)
    other = type(opened)(opened.folder, opened.family, opened.vae, plain)
    monkeypatch.setattr(compiled.denoiser, "_folder", other)
    assert far(compiled, "plain") > FAR


def test_gates_without_tanh_are_noticed(compiled, monkeypatch):
    right = compiled.denoiser.transformer._backend

    class Linear:
        def __getattr__(self, name):
            return getattr(right, name)

        def activate(self, x, kind, out):
            if kind != "tanh":
                right.activate(x, kind, out)

    monkeypatch.setattr(compiled.denoiser.transformer, "_backend", Linear())
    assert far(compiled, "plain") > FAR


def test_times_that_fall_are_noticed(compiled, monkeypatch):
    right = ZImageTransformer.conditions

    def falling(self, inputs):
        return right(self, replace(inputs, timesteps=np.float32(1000) - inputs.timesteps))

    monkeypatch.setattr(ZImageTransformer, "conditions", falling)
    assert far(compiled, "plain") > FAR


# ------------------------------------------------------------------ batches, seeds, memory


def requests():
    """Pictures of two shapes and prompts of several lengths, some guided, of 2 to 5 steps."""
    ids = (RequestID(f"picture-{i}") for i in range(6))
    longer = TokenBuffer(np.resize(tokens("plain", "tokens").all, 30))
    return [
        context_of("plain", latents=False, request_id=next(ids), steps=3),
        context_of("guided", latents=False, request_id=next(ids), steps=5),
        context_of("plain", latents=False, request_id=next(ids), width=32, steps=2),
        context_of("guided", latents=False, request_id=next(ids), steps=4, guidance_scale=1.5),
        context_of("limited", latents=False, request_id=next(ids), height=32, steps=4),
        PixelContext(
            tokens=longer, request_id=next(ids), height=32, width=32, num_inference_steps=4,
            guidance_scale=0.0,
        ),
    ]  # fmt: skip


def test_a_batch_has_the_bits_of_single_pictures(compiled, monkeypatch):
    sizes, right = [], compiled.denoiser.transformer.execute

    def counted(inputs):
        sizes.append(len(inputs.latents))
        return right(inputs)

    monkeypatch.setattr(compiled.denoiser.transformer, "execute", counted)
    together = [
        compiled.denoiser.start(context, compiled.encoder.encode(context)) for context in requests()
    ]
    while any(not drawing.is_done for drawing in together):
        compiled.denoiser.step(together)
    assert max(sizes) >= 5, "prompts of other lengths with as many rows share a call"
    for drawing, context in zip(together, requests(), strict=True):
        alone = draw(compiled, context)
        assert drawing.latents.tobytes() == alone.latents.tobytes()
        pixels = compiled.denoiser.finish(drawing)
        assert pixels.tobytes() == compiled.denoiser.finish(alone).tobytes()


def test_the_seed_decides_the_noise(compiled):
    engine = PictureEngine(FOLDER)
    sizes = {"height": 32, "width": 32, "num_inference_steps": 2}
    one, same, other = (
        engine.draw(engine.request("a cat", seed=seed, **sizes)) for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_a_preview_is_what_the_last_step_predicts(compiled):
    context = context_of("plain", steps=1)
    whole = compiled.denoiser.finish(draw(compiled, context))
    longer = context_of("plain", steps=2)
    drawing = compiled.denoiser.start(longer, compiled.encoder.encode(longer))
    compiled.denoiser.step([drawing])
    preview = compiled.denoiser.preview(drawing)
    assert np.abs(preview.astype(int) - whole).max() <= 1  # one step from all noise to none


def test_the_memory_of_a_step_is_as_computed(compiled):
    peaks, rows = [], []
    for side in (128, 256):
        context = context_of("plain", latents=False, width=side, height=side)
        drawing = compiled.denoiser.start(context, compiled.encoder.encode(context))
        compiled.denoiser.transformer.release()
        tracemalloc.start()
        compiled.denoiser.step([drawing])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        rows.append(drawing.rows * drawing.columns)
    needed = open_folder(FOLDER).family.row_bytes
    assert 0.7 * needed < (peaks[1] - peaks[0]) / (rows[1] - rows[0]) <= needed


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens_2": TokenBuffer(np.ones(3, np.int64))}, "tokens_2 has no meaning"),
        ({"true_cfg_scale": 2.0}, "true_cfg_scale has no meaning"),
        ({"guidance": np.array([2.0])}, "guidance has no meaning"),
        ({"guidance_scale": 1.0}, "needs negative_tokens"),
        ({"extra_params": {"cfg_truncation": np.array([1.5])}}, "must be in 0..1"),
        ({"extra_params": {"cfg_normalization": np.array([-1.0])}}, "must be 0 or more"),
        ({"extra_params": {"cfg_normalization": np.array([np.nan])}}, "must be finite"),
        ({"extra_params": {"cfg_truncation": np.array(["a"])}}, "an array of one number"),
        ({"tokens": TokenBuffer(np.array([60_000]))}, r"token ids must be in 0..266"),
        ({"tokens": TokenBuffer(np.ones(1025, np.int64))}, "limit 1024"),
        (
            {"tokens": TokenBuffer(np.ones(1010, np.int64))},
            "prompt too large: 1026 positions, limit 1024",
        ),
    ],
)
def test_wrong_requests_are_input_errors(compiled, fields, message):
    with pytest.raises(InputError, match=message):
        draw(compiled, context_of("plain", **{"latents": False, **fields}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model_index.json", {"_class_name": "ZImageOmniPipeline"}, "is not supported"),
        ("transformer/config.json", {"all_patch_size": [2, 4]}, "all_patch_size"),
        ("transformer/config.json", {"all_f_patch_size": [2]}, "all_f_patch_size"),
        ("transformer/config.json", {"n_kv_heads": 1}, "n_kv_heads"),
        ("transformer/config.json", {"axes_dims": [4, 4, 6]}, "axes_dims"),
        ("transformer/config.json", {"siglip_feat_dim": 8}, "siglip_feat_dim"),
        ("transformer/config.json", {"cap_feat_dim": 32}, "cap_feat_dim"),
        ("transformer/config.json", {"in_channels": 8}, "in_channels"),
        ("transformer/config.json", {"dim": "wide"}, "dim"),
        ("text_encoder/config.json", {"architectures": ["LlamaModel"]}, "LlamaModel"),
        ("text_encoder/config.json", {"architectures": 1}, "None is not supported"),
        (
            "text_encoder/config.json",
            {"num_hidden_layers": 1, "layer_types": None},
            "num_hidden_layers",
        ),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, name, change, message):
    folder = tmp_path / "zimage"
    shutil.copytree(FOLDER, folder)
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)
