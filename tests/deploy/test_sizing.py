"""What a model needs on a machine: memory with and without shared weights, speed, advice."""

import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.deploy.config import ServeSettings
from baton.deploy.plan import prepare
from baton.deploy.plan.memory import (
    OTHER_BYTES,
    PROCESS_BYTES,
    kv_share,
    model_memory,
    process_bytes,
)
from baton.deploy.plan.sizing import Speed, bytes_read, lines, measure, sizing, suggestion
from baton.engine.kernels.load import load_backend
from baton.engine.loading.checkpoint import load_checkpoint

from ..engine.gguf_models import write_file

SHAPE = Shape("sized", 600, 256, 704, 2, 4, 2, 1024)
SPEED = Speed(threads=1, read=2e10, stream=20.0, eight_streams=64.0, prompt=64.0)


@pytest.fixture(scope="module", params=["F32", "BF16"])
def model(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("m") / request.param, SHAPE, request.param)


def test_shared_weights_count_once(model):
    checkpoint = load_checkpoint(model)
    found = sizing(checkpoint, 3, 1 << 20, shares=True, speed=None)
    item = {"F32": 4, "BF16": 2}[model.name]
    assert found.file_bytes == found.weights_bytes == item * found.parameters
    assert found.kv_token_bytes == 2 * item * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    assert found.private_bytes - found.shared_bytes == 2 * found.weights_bytes
    assert found.shared_bytes == found.weights_bytes + 3 * (process_bytes(600) + (1 << 20))
    assert found.tokens == (1 << 20) // found.kv_token_bytes
    narrow = sizing(checkpoint, 3, 1 << 20, shares=True, speed=None, kv_type="int8")
    row = SHAPE.head_dim + 2  # codes and a scale
    assert narrow.kv_token_bytes == 2 * row * SHAPE.layers * SHAPE.kv_heads
    assert narrow.tokens > 1.9 * item / 2 * found.tokens
    text = "\n".join(text for _, text in lines(found))
    assert f"{found.parameters:,} parameters" in text
    assert "(shared here)" in text


def test_a_token_reads_all_matrices_but_the_table(model):
    checkpoint = load_checkpoint(model)
    body, head = bytes_read(checkpoint, load_backend("auto"))
    table = SHAPE.vocab * SHAPE.hidden
    item = {"F32": 4, "BF16": 2}[model.name]
    assert head == {model.name: item * table}
    norms = SHAPE.hidden * (2 * SHAPE.layers + 1)
    assert body == {model.name: item * (checkpoint.tensors.elements - 2 * table - norms)}


def test_the_speed_is_measured_with_the_types_of_the_model(model):
    speed = measure(load_checkpoint(model), 1, sample_bytes=1 << 20)
    assert speed.threads == 1
    assert 0 < speed.stream < min(speed.eight_streams, speed.prompt)
    assert speed.read > 1e8


@pytest.mark.parametrize(
    ("cores", "fits", "options"),
    [
        (1, 8, "--mode colocated --workers 1 --threads 1: one core"),
        (8, 1, "--mode colocated --workers 1 --threads 8: memory for one worker"),
        (2, 8, "--prefill 1 --decode 1 --prefill-threads 1 --decode-threads 1: "),
        (10, 8, "--prefill 1 --decode 1 --prefill-threads 8 --decode-threads 2: "),
    ],
)
def test_cores_are_divided_as_a_usual_request_needs_them(cores, fits, options):
    assert suggestion(SPEED, cores, fits=fits).startswith(options)


def test_times_of_a_small_model_are_not_rounded_to_nothing():
    small = Speed(threads=1, read=17e9, stream=2e4, eight_streams=4e4, prompt=3.2e4)
    assert suggestion(small, 2, fits=8).endswith(
        "a prompt of 512 tokens takes 16 ms of a worker, an answer of 128 tokens in a batch of "
        "eight 3 ms"
    )


def test_shared_weights_leave_memory_for_more_workers(model, monkeypatch):
    memory = model_memory(load_checkpoint(model), 1024)
    settings = ServeSettings(model=str(model), prefill=1, decode=9, share_weights="off")
    shared = ServeSettings(model=str(model), prefill=1, decode=9, share_weights="on")
    need = 10 * (PROCESS_BYTES + (16 << 20) + memory.weights) + 2 * OTHER_BYTES
    monkeypatch.setattr(prepare, "total_memory", lambda: need - 8 * memory.weights)
    assert "need" in prepare.memory_refusal(settings, 16 << 20, {})
    assert prepare.memory_refusal(shared, 16 << 20, {}) == ""
    free = 400 << 20
    assert kv_share(free, 4, 999, memory, copies=1) > kv_share(free, 4, 999, memory)


def test_quantized_weights_are_measured_in_their_blocks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ServeSettings(model=str(write_file(tmp_path)), kv_memory="2MiB")
    found = prepare.sizing_of(settings)
    assert found is not None
    assert found.workers == 2
    assert found.kv_bytes == 2 << 20
    assert found.file_bytes < found.weights_bytes < 4 * found.parameters
    assert found.speed is not None
    body, head = bytes_read(load_checkpoint(settings.model), load_backend("auto"))
    assert "Q4_K" in body
    assert sum(body.values()) + sum(head.values()) < found.file_bytes
