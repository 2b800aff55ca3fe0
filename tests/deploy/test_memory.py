"""The choice of KV memory: the free memory, and each worker's part."""

from pathlib import Path

import msgspec
import pytest

from baton.deploy.config import ServeSettings, demo_model_folder
from baton.deploy.plan import prepare
from baton.deploy.plan.memory import (
    LEAST_BYTES,
    OTHER_BYTES,
    PROCESS_BYTES,
    ModelMemory,
    kv_share,
    model_memory,
)
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.errors import ConfigError
from baton.runtime.process.memory import free_memory, memory_holder, size_text, total_memory

GIB = 1 << 30
SMALL = ModelMemory(weights=1 << 20, context=4 << 20)
LARGE = ModelMemory(weights=2 * GIB, context=4 * GIB)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable: 16777216 kB\n"}  # 16 GiB


def test_without_control_groups_the_machine_decides(tmp_path):
    assert free_memory(write(tmp_path, MEMINFO)) == 16 * GIB


def test_nothing_is_known_where_there_is_no_proc(tmp_path):
    assert free_memory(tmp_path) is None


def test_the_tightest_group_above_this_process_decides(tmp_path):
    group = "sys/fs/cgroup/outer"
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{group}/inner/memory.max": "max\n",
            f"{group}/inner/memory.current": "5\n",
            f"{group}/memory.max": f"{4 * GIB}\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert free_memory(root) == 2 * GIB


def test_version_1_groups_count_too(tmp_path):
    group = "sys/fs/cgroup/memory/here"
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/here\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB}\n",
            f"{group}/memory.stat": "total_inactive_file 0\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "7\n",
        },
    )
    assert free_memory(root) == 2 * GIB


def test_a_container_that_sees_only_its_own_group_is_limited_by_it(tmp_path):
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/system/of/the/host\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        },
    )
    assert free_memory(root) == 0


def test_this_machine_can_be_read():
    assert free_memory() is None or free_memory() >= 0


@pytest.mark.parametrize(
    ("free", "workers", "model", "share"),
    [
        (64 * GIB, 3, SMALL, 2 * 32 * SMALL.context),  # at most the memory of a full batch
        (64 * GIB, 4, LARGE, 6 * GIB),  # half of the memory, minus the weights
        (40 * GIB, 4, LARGE, 4 * GIB),  # one whole context
        (25 * GIB, 4, LARGE, 3 * GIB),  # less than a context: no room for more
        (4 * GIB, 4, LARGE, LEAST_BYTES),
        (0, 2, SMALL, LEAST_BYTES),
    ],
)
def test_shares(free, workers, model, share):
    assert kv_share(free, workers, 32, model) == share


@pytest.mark.parametrize("free", [m << 20 for m in (250, 300, 400, 700, 2000, 9000)])
@pytest.mark.parametrize("copies", [0, 1])
def test_full_kv_memory_and_all_processes_fit_into_a_small_control_group(free, copies):
    """Half of 250 MiB is more than two workers, a router and a gateway leave."""
    kv = kv_share(free, 2, 32, SMALL, copies=copies, others=2)
    processes = 2 * PROCESS_BYTES + 2 * OTHER_BYTES
    assert 2 * kv + processes + (copies or 2) * SMALL.weights <= free
    assert kv >= LEAST_BYTES


def test_the_demo_model_s_memory_is_what_its_files_say():
    memory = model_memory(load_checkpoint(str(demo_model_folder())), 0)
    assert memory.context == 2048 * 2 * 2 * 4 * 2 * 32  # tokens, K and V, bfloat16, layers, heads
    assert memory.weights == pytest.approx(1_900_000, rel=0.05)
    assert model_memory(load_checkpoint(str(demo_model_folder())), 100).context == 100 * 1024


def test_all_memory_is_the_least_of_machine_and_groups(tmp_path):
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
        },
    )
    assert total_memory(root) == 4 * GIB
    assert total_memory(write(tmp_path / "other", MEMINFO)) == 32000000 << 10
    assert total_memory(tmp_path / "none") is None
    assert memory_holder(4 * GIB, root) == "the limit of this control group is"
    assert memory_holder(32000000 << 10, root) == "this machine has"


@pytest.mark.parametrize(
    ("settings", "targets", "refused"),
    [
        ({}, {"decode": 2}, False),
        ({}, {"decode": 900}, True),
        ({"decode_kv_memory": "1GiB"}, {"decode": 20}, True),
        ({"decode_kv_memory": "1GiB"}, {"decode": 10}, False),
        ({"decode_kv_blocks": 1 << 16, "block_size": 16}, {"decode": 20}, True),
        ({"device": "cuda"}, {"decode": 2}, True),
        ({"device": "cuda", "decode_max": 2}, {"decode": 2}, False),
    ],
)
def test_more_than_the_machine_holds_is_refused(monkeypatch, settings, targets, refused):
    monkeypatch.setattr(prepare, "total_memory", lambda: 16 * GIB)
    text = prepare.memory_refusal(ServeSettings(**settings), 16 << 20, targets)
    assert bool(text) == refused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_memory": "1"}, r"kv_memory 1 B is too small for a prefill worker: it needs"),
        (
            {"decode_kv_memory": "4KiB"},
            r"small for a decode worker: .* of 16 tokens",
        ),
        ({"kv_memory": "4KiB", "device": "cuda"}, r"4\.0 KiB is too small"),
        ({"kv_memory": "64KiB", "block_size": 4096}, r"1 block of 4096 tokens"),
    ],
)
def test_kv_memory_below_a_block_is_refused_before_any_process_starts(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        prepare.check_model(ServeSettings(**settings))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_least_kv_memory_is_that_of_a_block(role):
    """The workers load with it, and not with a byte less."""
    block = 16 * model_memory(load_checkpoint(demo_model_folder()), 1).context
    enough, less = ({f"{role}_kv_memory": str(size)} for size in (block, block - 1))
    prepare.check_model(ServeSettings(**enough))
    with pytest.raises(ConfigError, match=f"small for a {role} worker"):
        prepare.check_model(ServeSettings(**less))
    runner = RunnerConfig(model=str(demo_model_folder()), kv_bytes=block, block_size=16)
    load_runner(runner)
    with pytest.raises(ConfigError, match="too small"):
        load_runner(msgspec.structs.replace(runner, kv_bytes=block - 1))


def test_default_kv_memory_below_a_block_is_refused(monkeypatch):
    monkeypatch.setattr(prepare, "default_kv_bytes", lambda _: 1 << 10)
    with pytest.raises(ConfigError, match=r"1\.0 KiB is too small"):
        prepare.make_plan(ServeSettings(address="ipc:///tmp/x.sock"), None)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1023 B"),
        (1536, "1.5 KiB"), ((1 << 20) - 1, "1.0 MiB"), (3 << 20, "3.0 MiB"),
        (1536 << 20, "1.5 GiB"), (int(1023.99 * (1 << 30)), "1.0 TiB"), (200 << 40, "200.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)  # fmt: skip
def test_sizes_have_readable_units(size, text):
    assert size_text(size) == text


def test_a_plan_of_more_than_the_machine_holds_is_refused(monkeypatch):
    monkeypatch.setattr(prepare, "total_memory", lambda: 16 * GIB)
    settings = ServeSettings(address="ipc:///tmp/x.sock", decode=900)
    with pytest.raises(ConfigError, match=r"and 900 decode workers need .* give fewer workers"):
        prepare.make_plan(settings, None)
