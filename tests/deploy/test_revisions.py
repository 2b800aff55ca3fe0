"""Settings by revision: allowed changes of a rollout, and changes that are refused early."""

import shutil

import pytest

from baton.deploy.config import ServeSettings, demo_model_folder
from baton.deploy.plan.plan import ipc_addresses, resolve_plan
from baton.deploy.plan.revisions import Revisions, changed
from baton.proto.errors import CheckpointError, ConfigError

KEY = "ab" * 32


@pytest.fixture
def revisions(tmp_path):
    book = ipc_addresses({"router": f"ipc://{tmp_path}/s.sock"}, str(tmp_path))
    return Revisions(resolve_plan(ServeSettings(kv_memory="8MiB"), book, KEY, 16 << 20))


def test_a_revision_is_the_one_before_with_changes(revisions):
    revision = revisions.add(0, {"max_num_seqs": "7", "policy": "round_robin"})
    assert (revision, revisions.newest) == (1, 1)
    assert revisions.settings(0).max_num_seqs == 32
    assert revisions.settings(1).max_num_seqs == 7
    old, new = (revisions.spec("decode-0", "decode", r).process.config for r in (0, 1))
    assert (old.max_batch, new.max_batch) == (32, 7)
    assert old.endpoint == new.endpoint
    assert revisions.spec("router", "router", 1).process.config.policy.name == "round_robin"


def test_the_trial_of_new_settings_takes_no_gpu(tmp_path):
    book = ipc_addresses({"router": f"ipc://{tmp_path}/s.sock"}, str(tmp_path))
    revisions = Revisions(resolve_plan(ServeSettings(device="cuda"), book, KEY))
    gpu = revisions.spec("decode-0", "decode", 0).process.config.runner.ordinal
    revisions.release("prefill-0")
    revision = revisions.add(0, {"max_num_seqs": 7})
    assert "prefill-0" not in book.gpus
    assert revisions.spec("decode-0", "decode", revision).process.config.runner.ordinal == gpu


def test_an_added_worker_is_as_large_as_the_others(revisions):
    first, late = (revisions.spec(f"decode-{n}", "decode", 0).process.config for n in (0, 9))
    assert first.runner == late.runner
    assert first.endpoint != late.endpoint


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"decode": 2}, ConfigError, "cannot change decode; use baton scale"),
        ({"routers": 2}, ConfigError, "cannot change routers; launch"),
        ({"address": "ipc:///x"}, ConfigError, "cannot change address"),
        ({"http_port": 80}, ConfigError, "cannot change http_port"),
        ({"api_key_file": "/no/such"}, ConfigError, "--api-key-file /no/such"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": "many"}, ConfigError, "max_num_seqs is 'many', not a whole number"),
        ({"colour": "red"}, ConfigError, "colour"),
        ({"policy": "random"}, ConfigError, "policy"),
        ({"model": "/no/such"}, ConfigError, "/no/such"),
    ],
)
def test_what_cannot_be_changes_nothing(revisions, changes, error, words):
    with pytest.raises(error, match=words):
        revisions.add(0, changes)
    assert revisions.newest == 0


def test_a_damaged_model_is_seen_before_anything_is_touched(revisions, tmp_path):
    shutil.copytree(demo_model_folder(), tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        revisions.add(0, {"model": str(tmp_path / "m")})


def test_a_class_that_is_missing_is_seen_before_anything_is_touched(revisions, tmp_path):
    (tmp_path / "own_rolled.py").write_text("class Other: ...")
    changes = {"policy": "own_rolled:Mine", "extensions": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"own_rolled\.py has no Mine"):
        revisions.add(0, changes)
    assert revisions.newest == 0


def test_one_way_to_size_memory_replaces_the_other():
    after = changed(ServeSettings(kv_memory="8MiB"), {"kv_blocks": 64})
    assert (after.kv_blocks, after.kv_memory) == (64, "")
    after = changed(ServeSettings(decode_kv_blocks=3), {"decode_kv_memory": "1MiB"})
    assert (after.decode_kv_blocks, after.decode_kv_memory) == (0, "1MiB")
