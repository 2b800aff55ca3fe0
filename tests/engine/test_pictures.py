"""The Flux pipeline against diffusers' results on a tiny random model."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.pictures.draw import PictureEngine
from baton.engine.pictures.flux import FluxTransformer, latent_image_ids
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.memory import decode_bytes, largest_picture, picture_bytes
from baton.engine.pictures.pipeline import Denoiser
from baton.engine.pictures.sampler import normals, philox_words, reduced
from baton.engine.pictures.vae import VaeDecoder
from baton.engine.sampling.philox import philox4x32
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import CheckpointError, InputError
from baton.proto.ids import RequestID
from baton.proto.limits import MAX_PICTURE_PIXELS

from .picture_model import backends, draw, load

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pictures" / "flux"
REFERENCE = dict(np.load(FOLDER / "reference.npz"))
CASES = ["plain", "guided"]


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
    if "true_cfg_scale" in fields:
        fields["negative_tokens"] = tokens(case, "negative_clip")
        fields["negative_tokens_2"] = tokens(case, "negative_t5")
    if latents:
        fields["latents"] = reference(case, "start")
    fields |= {"num_inference_steps": steps, **changes}
    return PixelContext(tokens=tokens(case, "clip"), tokens_2=tokens(case, "t5"), **fields)


@pytest.mark.parametrize("case", CASES)
def test_texts_are_encoded_as_by_transformers(loaded, case):
    state = loaded.encoder.encode(context_of(case))
    names = ["prompt", "pooled"]
    if case == "guided":
        names += ["negative_prompt", "negative_pooled"]
    assert sorted(state) == sorted(names)
    for name in names:
        np.testing.assert_allclose(state[name], reference(case, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_latents_and_pixels_equal_those_of_diffusers(loaded, case):
    drawing = draw(loaded, context_of(case))
    np.testing.assert_allclose(drawing.sigmas, reference(case, "sigmas"), atol=1e-6)
    np.testing.assert_allclose(drawing.latents, reference(case, "latents"), atol=1e-4)
    pixels, expected = loaded.denoiser.finish(drawing), reference(case, "pixels")
    assert pixels.dtype == np.uint8
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= 1
    assert expected.std() > 20, "the reference is a picture, not one colour"


# ------------------------------------------------------------------ planted bugs


def wrong(loaded, case):
    """The largest distances of latents and of pixels from those of diffusers."""
    drawing = draw(loaded, context_of(case))
    pixels = loaded.denoiser.finish(drawing).astype(int)
    far = np.abs(drawing.latents - reference(case, "latents")).max()
    return far, np.abs(pixels - reference(case, "pixels")).max()


def test_a_shift_without_scale_in_the_vae_is_noticed(compiled, monkeypatch):
    right = VaeDecoder.decode

    def shifted_only(self, latents):
        return right(self, latents * np.float32(self.config.scaling_factor))

    monkeypatch.setattr(VaeDecoder, "decode", shifted_only)
    assert wrong(compiled, "plain")[1] > 10


def test_a_scale_without_shift_in_the_vae_is_noticed(compiled, monkeypatch):
    right = VaeDecoder.decode

    def scaled_only(self, latents):
        shift = np.float32(self.config.shift_factor * self.config.scaling_factor)
        return right(self, latents - shift)

    monkeypatch.setattr(VaeDecoder, "decode", scaled_only)
    assert wrong(compiled, "plain")[1] > 10


def test_an_ignored_negative_prompt_is_noticed(compiled, monkeypatch):
    right = compiled.denoiser._backend

    class Deaf:
        def __getattr__(self, name):
            return getattr(right, name)

        def mix(self, x, base, y, scale):
            return x if base is not None else right.mix(x, base, y, scale)

    monkeypatch.setattr(compiled.denoiser, "_backend", Deaf())
    assert wrong(compiled, "guided")[0] > 0.01


def test_scale_and_shift_swapped_at_the_end_are_noticed(compiled, monkeypatch):
    right = FluxTransformer._modulation

    def swapped(self, weight, embedding):
        chunks = right(self, weight, embedding)
        return chunks[:, ::-1] if weight is self._norm_out else chunks

    monkeypatch.setattr(FluxTransformer, "_modulation", swapped)
    assert wrong(compiled, "plain")[0] > 0.01


def test_rotated_halves_instead_of_neighbours_are_noticed(monkeypatch):
    def unchanged(heads, dim):
        return np.arange(heads * dim)

    monkeypatch.setattr("baton.engine.pictures.joint.halves_order", unchanged)
    assert wrong(load("auto", FOLDER), "plain")[0] > 0.01


def test_rows_and_columns_swapped_are_noticed(compiled, monkeypatch):
    monkeypatch.setattr(
        "baton.engine.pictures.flux.latent_image_ids",
        lambda rows, columns: latent_image_ids(rows, columns)[:, [0, 2, 1]],
    )
    monkeypatch.setattr(compiled.denoiser.transformer, "_shapes", {})
    far = wrong(compiled, "plain")[0]
    compiled.denoiser.transformer._shapes.clear()
    assert far > 0.01


def test_a_guidance_scale_matters(compiled):
    one = draw(compiled, context_of("plain", guidance_scale=1.0)).latents
    assert np.abs(one - reference("plain", "latents")).max() > 0.01


# ------------------------------------------------------------------ batches and replay


def requests():
    """Pictures of two shapes, some with a negative prompt, of 2 to 5 steps."""
    ids = (RequestID(f"picture-{i}") for i in range(6))
    return [
        context_of("plain", latents=False, steps=5, request_id=next(ids)),
        context_of("guided", latents=False, steps=3, request_id=next(ids)),
        context_of("plain", latents=False, steps=2, request_id=next(ids)),
        context_of("guided", latents=False, steps=4, request_id=next(ids)),
        context_of("guided", latents=False, steps=2, request_id=next(ids), true_cfg_scale=1.0),
    ]


def test_a_picture_does_not_depend_on_its_batch(compiled):
    alone = [draw(compiled, context).latents for context in requests()]
    drawings = [compiled.denoiser.start(c, compiled.encoder.encode(c)) for c in requests()]
    rounds = 0
    while not all(drawing.is_done for drawing in drawings):
        compiled.denoiser.step(drawings if rounds else drawings[1:])
        rounds += 1
    assert rounds == 6
    for drawing, expected in zip(drawings, alone, strict=True):
        assert drawing.latents.tobytes() == expected.tobytes()


def test_batches_beyond_the_limit_are_split(compiled):
    narrow = Denoiser(open_folder(FOLDER), load_backend("cpu"), max_samples=1)
    drawings = []
    for context in requests():
        drawing = narrow.start(context, compiled.encoder.encode(context))
        while not drawing.is_done:
            narrow.step([drawing])
        drawings.append(drawing)
    for drawing, context in zip(drawings, requests(), strict=True):
        assert drawing.latents.tobytes() == draw(compiled, context).latents.tobytes()


@pytest.mark.parametrize(("tokens", "together"), [(1, 1), (79, 1), (80, 2), (1 << 20, 4)])
def test_the_tokens_of_a_call_are_limited(compiled, monkeypatch, tokens, together):
    nbytes = tokens * open_folder(FOLDER).family.row_bytes
    limited = Denoiser(open_folder(FOLDER), load_backend("cpu"), memory=nbytes)
    monkeypatch.setattr(compiled.denoiser, "_max_tokens", limited._max_tokens)
    right, sizes = compiled.denoiser.transformer.execute, []

    def counted(inputs):
        sizes.append(len(inputs.latents))
        return right(inputs)

    monkeypatch.setattr(compiled.denoiser.transformer, "execute", counted)
    contexts = [context_of("guided", request_id=RequestID(name)) for name in ("one", "two")]
    drawings = [compiled.denoiser.start(c, compiled.encoder.encode(c)) for c in contexts]
    compiled.denoiser.step(drawings)
    assert sizes == [together] * (4 // together)


def traced(work, *arguments):
    """The most bytes that NumPy holds during a call."""
    tracemalloc.start()
    try:
        work(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_of_the_vae_is_as_computed(compiled):
    vae, channels = compiled.denoiser.vae, compiled.denoiser.vae.config.latent_channels
    sizes = [vae.config.scale**2 * side**2 for side in (72, 96)]
    latents = [np.zeros((side, side, channels), np.float32) for side in (72, 96)]
    peaks = [traced(vae.decode, one) for one in latents]
    limits = [decode_bytes(vae.config, size) for size in sizes]
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert peaks[1] - peaks[0] == pytest.approx(limits[1] - limits[0], rel=0.2)


def test_the_memory_of_a_step_is_as_computed(compiled):
    peaks, rows = [], []
    for side in (128, 256):
        context = context_of("plain", latents=False, width=side, height=side)
        drawing = compiled.denoiser.start(context, compiled.encoder.encode(context))
        compiled.denoiser.transformer.release()
        peaks.append(traced(compiled.denoiser.step, [drawing]))
        rows.append(drawing.rows * drawing.columns)
    needed = open_folder(FOLDER).family.row_bytes
    assert 0.7 * needed < (peaks[1] - peaks[0]) / (rows[1] - rows[0]) <= needed


def test_the_largest_picture_is_the_last_that_fits():
    folder = open_folder(FOLDER)
    for nbytes in (picture_bytes(folder, 256), 64 << 20, 1 << 34):
        pixels = largest_picture(folder, nbytes)
        assert picture_bytes(folder, pixels) <= nbytes
        assert pixels == MAX_PICTURE_PIXELS or picture_bytes(folder, pixels + 256) > nbytes
    assert largest_picture(folder, 1) == 0


@pytest.mark.parametrize("case", CASES)
def test_the_last_preview_is_the_picture_and_changes_nothing(compiled, case):
    expected = draw(compiled, context_of(case))
    drawing = compiled.denoiser.start(expected.context, compiled.encoder.encode(expected.context))
    with pytest.raises(ValueError, match="no step was computed"):
        compiled.denoiser.preview(drawing)
    far = []
    while not drawing.is_done:
        compiled.denoiser.step([drawing])
        far.append(compiled.denoiser.preview(drawing).astype(int))
    assert drawing.latents.tobytes() == expected.latents.tobytes()
    pixels = compiled.denoiser.finish(drawing)
    assert compiled.denoiser.preview(drawing).tobytes() == pixels.tobytes()
    distances = [np.abs(one - pixels).mean() for one in far]
    assert distances[0] > distances[-1] == 0


def test_a_preview_of_a_large_picture_is_small(compiled):
    context = context_of("plain", latents=False, height=336, width=560)
    drawing = compiled.denoiser.start(context, compiled.encoder.encode(context))
    compiled.denoiser.step([drawing])
    assert compiled.denoiser.preview(drawing).shape == (168, 280, 3)
    latents = np.arange(5 * 7, dtype=np.float32).reshape(5, 7, 1)
    means = [[np.mean([0, 1, 7, 8]), 6, 8], [18, 20, 22]]
    assert reduced(latents, 2)[..., 0].tolist() == means


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_drawing_resumes_at_any_step(compiled, at):
    context = context_of("guided", latents=False)
    state = compiled.encoder.encode(context)
    whole = compiled.denoiser.start(context, state)
    for _ in range(at):
        compiled.denoiser.step([whole])
    resumed = compiled.denoiser.start(context, state, step=at, latents=whole.latents.copy())
    for drawing in (whole, resumed):
        while not drawing.is_done:
            compiled.denoiser.step([drawing])
    assert resumed.latents.tobytes() == whole.latents.tobytes()
    pixels = compiled.denoiser.finish(whole)
    assert compiled.denoiser.finish(resumed).tobytes() == pixels.tobytes()


def test_an_aborted_drawing_leaves_no_trace(compiled):
    first, second = context_of("plain"), context_of("plain", guidance_scale=1.0)
    kept = compiled.denoiser.start(first, compiled.encoder.encode(first))
    aborted = compiled.denoiser.start(second, compiled.encoder.encode(second))
    compiled.denoiser.step([kept, aborted])
    assert kept.progress == 0.25
    while not kept.is_done:
        compiled.denoiser.step([kept])
    assert aborted.step == 1
    np.testing.assert_allclose(kept.latents, reference("plain", "latents"), atol=1e-4)


def test_noise_follows_from_the_seed_else_from_the_id(compiled):
    def start(**fields):
        context = context_of("plain", latents=False, **fields)
        return compiled.denoiser.start(context, compiled.encoder.encode(context)).latents

    seven = {"extra_params": {"seed": np.array([7])}}
    eight = {"extra_params": {"seed": np.array([8])}}
    one, other = RequestID("one"), RequestID("other")
    assert np.array_equal(start(**seven, request_id=one), start(**seven, request_id=other))
    assert not np.array_equal(start(**seven), start(**eight))
    assert np.array_equal(start(request_id=one), start(request_id=one))
    assert not np.array_equal(start(request_id=one), start(request_id=other))


def test_noise_is_normal_and_uses_philox():
    words = philox_words(0x1234_5678_9ABC, 5, 77)
    for position in range(5):
        expected = philox4x32((position, 0, 77, 0), (0x5678_9ABC, 0x1234))
        assert tuple(int(word) for word in words[position]) == expected
    found = normals(3, 100_001, 1)
    assert found.dtype == np.float32
    assert np.array_equal(found[:10], normals(3, 10, 1))
    assert abs(found.mean()) < 0.01
    assert abs(found.std() - 1) < 0.01
    assert abs((found**3).mean()) < 0.03
    assert abs((found**4).mean() - 3) < 0.1
    assert abs(np.mean(found < -1.6448536) - 0.05) < 0.003


def test_series_equal_the_library():
    from baton.engine.pictures.sampler import _log, _turn

    uniform = (np.array([0, 1, 7, 1 << 20, 1 << 31, (1 << 32) - 1], float) + 0.5) / 2**32
    np.testing.assert_allclose(_log(uniform), np.log(uniform), rtol=1e-14, atol=1e-16)
    cosine, sine = _turn(np.linspace(0, 1, 1001))
    np.testing.assert_allclose(cosine, np.cos(np.linspace(0, 2 * np.pi, 1001)), atol=1e-15)
    np.testing.assert_allclose(sine, np.sin(np.linspace(0, 2 * np.pi, 1001)), atol=1e-15)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_2": None}, "tokens_2 are missing"),
        ({"negative_tokens": None}, "negative_tokens are missing"),
        ({"tokens": TokenBuffer(np.array([5, 100]))}, r"token ids must be in 0..99, not 5 .. 100"),
        ({"tokens": TokenBuffer(np.ones(78, np.int64))}, "1 to 77 tokens, not 78"),
        ({"tokens_2": TokenBuffer(np.array([1 << 40]))}, "does not fit 32 bits"),
        ({"height": 20}, "height must be a multiple of 16"),
        ({"num_inference_steps": 0}, "num_inference_steps must be"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(loaded, changes, message):
    context = context_of("guided")
    for name, value in changes.items():
        setattr(context, name, value)
    with pytest.raises(InputError, match=message):
        loaded.encoder.encode(context)


def test_states_that_do_not_fit_are_refused(compiled):
    context = context_of("plain")
    state = compiled.encoder.encode(context)
    start = compiled.denoiser.start
    with pytest.raises(InputError, match=r"the state has \['pooled'\]"):
        start(context, {"pooled": state["pooled"]})
    with pytest.raises(InputError, match="prompt of the state"):
        start(context, {**state, "prompt": state["prompt"][:, :5]})
    with pytest.raises(InputError, match="pooled of the state is float64"):
        start(context, {**state, "pooled": state["pooled"].astype(float)})
    with pytest.raises(InputError, match="cannot be resumed at step 5"):
        start(context, state, step=5, latents=context.latents)
    with pytest.raises(InputError, match="cannot be resumed at step 1"):
        start(context, state, step=1)
    with pytest.raises(InputError, match=r"latents must be floats \[24, 16\]"):
        start(context, state, latents=np.zeros((23, 16), np.float32))
    with pytest.raises(ValueError, match="step 0 of 4 is next"):
        compiled.denoiser.finish(start(context, state))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("model_index.json", {"_class_name": "OtherPipeline"}, "a OtherPipeline is not supported"),
        ("text_encoder/config.json", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("text_encoder_2/config.json", {"feed_forward_proj": "relu"}, "not gated-gelu"),
        ("text_encoder_2/config.json", {"d_model": -1}, "d_model"),
        ("transformer/config.json", {"axes_dims_rope": [4, 4, 4]}, "axes_dims_rope"),
        ("transformer/config.json", {"num_layers": 1 << 40}, "num_layers"),
        ("transformer/config.json", {"joint_attention_dim": 33}, "joint_attention_dim"),
        ("vae/config.json", {"act_fn": "relu"}, "act_fn 'relu'"),
        ("vae/config.json", {"norm_num_groups": 3}, "norm_num_groups"),
        ("vae/config.json", {"scaling_factor": 0.0}, "scaling_factor"),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas"),
        ("scheduler/scheduler_config.json", {"time_shift_type": "linear"}, "time_shift_type"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, part, change, message):
    folder = tmp_path / "flux"
    shutil.copytree(FOLDER, folder)
    path = folder / part
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_weights_of_another_shape_are_refused(tmp_path):
    folder = tmp_path / "flux"
    shutil.copytree(FOLDER, folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_single_layers": 1}))
    with pytest.raises(CheckpointError, match=r"single_transformer_blocks\.1.*is not used"):
        Denoiser(open_folder(folder), load_backend("numpy"))
    with pytest.raises(CheckpointError, match="model_index"):
        open_folder(tmp_path)


# ------------------------------------------------------------------ a prompt becomes a picture


def test_a_prompt_becomes_a_picture():
    engine, steps = PictureEngine(FOLDER, prompt_tokens=24), []
    fields = {"height": 32, "width": 32, "num_inference_steps": 3}
    context = engine.request("a red house", seed=5, **fields)
    pixels = engine.draw(context, lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert pixels.shape == (32, 32, 3)
    assert context.to_generation_output().output[0].format == "png"
    again = engine.draw(engine.request("a red house", seed=5, **fields))
    assert np.array_equal(pixels, again)
    changed = [
        engine.request("a red house", seed=6, **fields),
        engine.request("the blue sea", seed=5, **fields),
        engine.request("a red house", "the sea", seed=5, true_cfg_scale=3.0, **fields),
    ]
    for other in changed:
        assert not np.array_equal(pixels, engine.draw(other))


def test_a_callback_can_abort_a_drawing():
    engine = PictureEngine(FOLDER, prompt_tokens=24)
    context = engine.request("the sea", height=16, width=16, num_inference_steps=3)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.draw(context, stop)
    assert engine.draw(context).shape == (16, 16, 3)
