"""Fresh random Z-Image models written by diffusers, computed by both."""

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.pictures.draw import PictureEngine
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.pipeline import Denoiser, PromptEncoder
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer

from .makers import load_maker

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")
pytest.importorskip("diffusers", reason="diffusers is not installed; run make test-oracle")


maker = load_maker("make_zimage")
SEED = int(np.random.SeedSequence().entropy % (1 << 31))
WIDE = {
    "transformer": {
        "in_channels": 8, "dim": 72, "n_layers": 3, "n_refiner_layers": 2, "n_heads": 3,
        "n_kv_heads": 3, "cap_feat_dim": 40, "axes_dims": [8, 6, 10], "norm_eps": 1e-4,
        "rope_theta": 100.0, "t_scale": 500.0,
    },
    "text": {
        "hidden_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    },
    "vae": {
        "latent_channels": 8, "block_out_channels": (8, 16, 24), "layers_per_block": 2,
        "use_post_quant_conv": True, "use_quant_conv": True,
    },
}  # fmt: skip
BARE = {"transformer": {"n_refiner_layers": 0, "n_layers": 1, "qk_norm": False}}
PLAIN = {"height": 32, "width": 48, "guidance_scale": 0.0, "prompt": "a red cube"}
GUIDED = {
    "height": 64, "width": 16, "guidance_scale": 4.0, "prompt": "two cats on one mat, and a hat",
    "negative_prompt": "a dog",
}  # fmt: skip
FULL = {"height": 64, "width": 64, "guidance_scale": 1.0, "prompt": "sea " * 200}
"""256 tokens of the picture need no padding, and the prompt is cut."""
LIMITED = {**GUIDED, "cfg_normalization": 0.7, "cfg_truncation": 0.15}


def backends():
    try:
        load_backend("cpu")
    except Exception:
        return ["numpy"]
    return ["numpy", "cpu"]


def near(actual, expected, tolerance, kernels, bfloat16):
    """Fail beyond the tolerance, or on tiles, which round activations to bfloat16, beyond 2 %."""
    if bfloat16 and kernels.numerics.endswith(("amx", "bf16")):
        off = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert 1e-5 < off <= 0.02, f"seed {SEED}: {off:.4f}"
    else:
        np.testing.assert_allclose(actual, expected, atol=tolerance, err_msg=f"seed {SEED}")


def tokens(found, name):
    return TokenBuffer(found[name].astype(np.int64))


def context_of(found, case):
    named = {n: np.array([case[n]]) for n in ("cfg_normalization", "cfg_truncation") if n in case}
    return PixelContext(
        tokens=tokens(found, "tokens"),
        negative_tokens=tokens(found, "negative_tokens") if case["guidance_scale"] > 0 else None,
        latents=found["start"],
        num_inference_steps=4,
        height=case["height"],
        width=case["width"],
        guidance_scale=case["guidance_scale"],
        extra_params=named,
    )


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    ("changes", "case", "options"),
    [
        ({}, PLAIN, {}),
        ({}, GUIDED, {"shift": 6.0}),
        (WIDE, PLAIN, {}),
        (WIDE, GUIDED, {}),
        (WIDE, LIMITED, {"shift": 6.0}),
        ({}, FULL, {}),
        (BARE, GUIDED, {}),
        (WIDE, GUIDED, {"bfloat16": True}),
    ],
    ids=["turbo", "base", "wide", "guided", "limited", "full", "bare", "bfloat16"],
)
def test_pictures_equal_those_of_diffusers(tmp_path, changes, case, options, backend):
    pipeline = maker.make_pipeline(SEED, shift=options.get("shift", 3.0), **changes)
    bfloat16 = bool(options.get("bfloat16"))
    if bfloat16:
        maker.rounded(pipeline, torch.bfloat16)
    found = maker.results(pipeline, SEED, **case)
    if bfloat16:
        pipeline.to(torch.bfloat16)
    pipeline.save_pretrained(tmp_path)
    folder, kernels = open_folder(tmp_path), load_backend(backend)
    engine = PictureEngine(tmp_path, backend="numpy")
    asked = engine.request(case["prompt"], case.get("negative_prompt"), guidance_scale=1.0)
    assert asked.tokens.all.tolist() == found["tokens"].tolist()
    if "negative_tokens" in found:
        assert asked.negative_tokens.all.tolist() == found["negative_tokens"].tolist()
    context = context_of(found, case)
    state = PromptEncoder(folder, kernels).encode(context)
    for name, array in state.items():
        near(array, found[name], 2e-5, kernels, bfloat16)
    denoiser = Denoiser(folder, kernels)
    drawing = denoiser.start(context, state)
    np.testing.assert_allclose(drawing.sigmas, found["sigmas"], atol=1e-6)
    for _ in range(2):
        denoiser.step([drawing])
    near(drawing.latents, found["middle"], 1e-4, kernels, bfloat16)
    for _ in range(2):
        denoiser.step([drawing])
    near(drawing.latents, found["latents"], 1e-4, kernels, bfloat16)
    distance = np.abs(denoiser.finish(drawing).astype(int) - found["pixels"])
    tiles = bfloat16 and kernels.numerics.endswith(("amx", "bf16"))
    assert distance.max() <= (8 if tiles else 1), f"seed {SEED}"


def test_names_with_a_prefix_are_read(tmp_path):
    """As a decoder with its head writes them, which the text encoder leaves out."""
    from safetensors.torch import load_file, save_file

    pipeline = maker.make_pipeline(SEED)
    pipeline.save_pretrained(tmp_path)
    text = np.arange(3, 40, dtype=np.int32)
    expected = PromptEncoder(open_folder(tmp_path), load_backend("numpy")).encoders.decoder
    path = tmp_path / "text_encoder" / "model.safetensors"
    tensors = {f"model.{name}": array.clone() for name, array in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    found = PromptEncoder(open_folder(tmp_path), load_backend("numpy")).encoders.decoder
    assert np.array_equal(found.states(text), expected.states(text))


def test_shards_are_read(tmp_path):
    pipeline = maker.make_pipeline(SEED)
    pipeline.save_pretrained(tmp_path, max_shard_size="200KB")
    assert list((tmp_path / "transformer").glob("*.index.json"))
    Denoiser(open_folder(tmp_path), load_backend("numpy"))
