import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.kv_types import set_kv_type
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.errors import CheckpointError, ConfigError

from .test_models import rewrite

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"


def load(model="llama", on_progress=None, **settings):
    settings = {"backend": "numpy", "num_blocks": 256, **settings}
    return load_runner(RunnerConfig(model=str(DATA / model), **settings), on_progress)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(DATA / "llama_plain", tmp_path / "model"))


def edit(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_card_describes_the_model():
    runner = load(block_size=32, name="tiny")
    card = runner.card
    assert (card.name, card.architecture) == ("tiny", "LlamaForCausalLM")
    assert (card.vocab_size, card.max_length, card.eos_token_ids) == (256, 2048, [2, 3])
    assert runner.pool.shape == (3, 256, 2, 2, 32, 8)
    assert runner.pool.shape[2:] == card.layout.block_shape
    assert runner.pool.dtype == np.float32
    assert card.weights_bytes > 100_000
    assert "F32" in card.numerics
    assert runner.backend.numerics in card.numerics
    assert load().card.name == "llama"


def test_two_loads_agree_and_other_models_do_not(folder):
    card = load().card
    assert card.mismatch(load().card) is None
    field, _, _ = card.mismatch(load("llama_plain").card)
    assert field == "fingerprint"
    assert card.mismatch(load(block_size=8).card) is None, "the handoff converts"
    assert card.mismatch(load(kv_type="int8").card)[0] == "numerics"
    before = load(folder).card
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert before.mismatch(load(folder).card)[0] == "fingerprint"
    edit(folder, rms_norm_eps=1e-4)
    assert load(folder).card.fingerprint not in (before.fingerprint, card.fingerprint)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_type_of_keys_and_values_by_the_weights(tmp_path, dtype):
    folder = rewrite(DATA / "llama_plain", tmp_path / "model", dtype)
    card = load(folder).card
    assert card.layout.dtype == ("bfloat16" if dtype == "BF16" else "float32")
    assert ("kv-bfloat16" in card.numerics) == (dtype == "BF16")
    assert load(folder, kv_type="float32").card.layout.dtype == "float32"
    narrow = load(folder, kv_type="int8")
    assert narrow.pool.dtype == np.int8
    assert narrow.card.layout.token_bytes == 3 * 2 * 2 * (8 + 2)
    with pytest.raises(ConfigError, match="kv_type must be one of auto, float32"):
        load(folder, kv_type="int4")


def test_a_gpu_has_one_type_of_keys_and_values():
    gpu = CudaBackend.__new__(CudaBackend)
    checkpoint = load_checkpoint(DATA / "llama_plain")
    one = "all pools on device cuda have one type, not bfloat16 and int8"
    for wanted, pools, message in [
        ("float32", (), "kv_type float32: device cuda keeps keys and values in bfloat16 or int8"),
        ("int8", ("int8", "float32"), "kv_type float32: device cuda"),
        ("int8", ("auto", "int8"), one),
        ("auto", ("int8",), one),
    ]:
        with pytest.raises(ConfigError, match=message):
            set_kv_type(checkpoint, gpu, wanted, pools)
    for wanted, pools, kind in [
        ("bfloat16", ("auto",), "bfloat16"),
        ("int8", ("int8",), "int8"),
        ("auto", (), "bfloat16"),
    ]:
        set_kv_type(checkpoint, gpu, wanted, pools)
        assert (gpu.kv_dtype, gpu.kv_rounding) == (kind, kind)


def test_full_digest_is_another_name_for_the_same_file():
    assert load(full_digest=True).card.fingerprint == load(full_digest=True).card.fingerprint


def test_progress_ends_with_the_whole():
    seen = []
    load(on_progress=lambda done, total: seen.append((done, total)))
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert len({t for _, t in seen}) == 1
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) > 10


def test_size_of_the_pool():
    token_bytes = load().card.layout.token_bytes
    assert load(num_blocks=0, kv_bytes=token_bytes * 16 * 5 + 1).num_blocks == 5
    with pytest.raises(ConfigError, match="pool is too small"):
        load(num_blocks=0, kv_bytes=10)
    with pytest.raises(ConfigError, match="block_size"):
        load(block_size=0)


def test_served_length():
    assert load(max_length=100).card.max_length == 100
    with pytest.raises(ConfigError, match="max_model_len 4096"):
        load(max_length=4096)


def test_a_pool_smaller_than_the_context_lowers_the_served_length():
    assert load(num_blocks=8).card.max_length == 128
    assert load(num_blocks=8, max_length=100).card.max_length == 100
    assert load(num_blocks=8).card.mismatch(load().card) is None


def test_length_that_changes_the_frequencies_changes_the_numerics(folder):
    edit(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    short, long = load(folder).card, load(folder, max_length=4096).card
    assert (short.max_length, long.max_length) == (2048, 4096)
    assert short.mismatch(long)[0] == "numerics"


def test_shape_mismatch_names_tensor_wanted_and_found(folder):
    edit(folder, intermediate_size=60)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight'.*\[56, 32\].*\[60, 32\]"):
        load(folder)


def test_missing_layer_is_named(folder):
    edit(folder, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.3\.\S+' is missing"):
        load(folder)


def test_tensor_without_a_place_is_named(folder):
    edit(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.\S+' is not used"):
        load(folder)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated: tensor"):
        load(folder)
