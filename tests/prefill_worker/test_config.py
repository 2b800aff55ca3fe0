"""How large KV frames are."""

import pytest

from baton.engine.loading.runner_config import RunnerConfig
from baton.prefill_worker.config import PrefillWorkerConfig, kv_frame_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("keys", "endpoint", "asked", "expected"),
    [
        ("", "tcp://10.0.0.1:0", 2 * MIB, 2 * MIB),
        ("", "ipc:///run/p", 2 * MIB, 2 * MIB),
        ("/keys", "ipc:///run/p", 2 * MIB, 2 * MIB),
        ("/keys", "tcp://10.0.0.1:0", 2 * MIB, MIB),
        ("/keys", "tcp://10.0.0.1:0", MIB // 2, MIB // 2),
    ],
)
def test_encrypted_frames_are_smaller(keys, endpoint, asked, expected):
    config = PrefillWorkerConfig(
        worker_id="p", endpoint=endpoint, routers={}, runner=RunnerConfig(model=""),
        frame_bytes=asked, keys=keys,
    )  # fmt: skip
    assert kv_frame_bytes(config) == expected
