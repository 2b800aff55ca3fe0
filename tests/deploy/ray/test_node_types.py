"""The maximum number of members of a cluster."""

import json

import pytest

from baton.deploy.ray.api import autoscaling_config, capacity_of

CONFIG = {
    "max_workers": 6,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 0, "router": 2}, "max_workers": 0},
        "prefill": {"resources": {"prefill": 1}, "max_workers": 2},
        "decode": {"resources": {"decode": 1}, "max_workers": 3},
        "big": {"resources": {"decode": 8}, "max_workers": 1},
        "plain": {},
    },
}


def test_maxima_of_all_types_are_added():
    assert capacity_of(CONFIG) == {"router": 2, "prefill": 2, "decode": 11}


def test_a_type_without_a_maximum_has_that_of_the_cluster():
    types = {"a": {"resources": {"decode": 1}}, "b": {"resources": {"prefill": 1}}}
    assert capacity_of({"available_node_types": types, "max_workers": 4})["decode"] == 4
    assert capacity_of({"available_node_types": types})["prefill"] == 2


@pytest.fixture
def proc(tmp_path):
    def add(pid: int, *words: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes("\0".join(words).encode() + b"\0")

    add(7, "bash", "-c", "echo --autoscaling-config=nothing")
    (tmp_path / "self").mkdir()
    return add, tmp_path


def test_the_file_is_found_by_the_autoscaler_s_command_line(proc, tmp_path):
    pytest.importorskip("yaml", reason="comes with Ray")
    add, folder = proc
    file = tmp_path / "bed.json"
    file.write_text(json.dumps(CONFIG))
    monitor = "site-packages/ray/autoscaler/v2/monitor.py"
    add(8, "python", monitor, "--gcs-address=127.0.0.1:6380", "--autoscaling-config=/other")
    add(9, "python", monitor, "--gcs-address=127.0.0.1:6379", f"--autoscaling-config={file}")
    assert autoscaling_config("10.0.0.1:6379", folder) == CONFIG
    assert autoscaling_config("10.0.0.1:6381", folder) is None
    file.write_text("{unclosed")
    assert autoscaling_config("10.0.0.1:6379", folder) is None
