import re
from pathlib import Path

import msgspec
import pytest

from baton.deploy import messages
from baton.deploy.config import ServeSettings
from baton.deploy.local import banner
from baton.deploy.report import ClusterReport, RouterReport, WorkerReport, parse_report
from baton.deploy.supervise.core import Log
from baton.proto.errors import DecodeFailed


def worker(role="decode", **kwargs):
    return WorkerReport(id=f"{role}-0", role=role, state="ready", incarnation=1, **kwargs)


def test_throughput_shows_rates_and_levels():
    before = ClusterReport(workers=[worker(generated_tokens=100), worker("prefill")])
    after = ClusterReport(
        workers=[
            worker(generated_tokens=1100, requests_running=3, kv_blocks_total=80, kv_blocks_used=9),
            worker("prefill", prompt_tokens=300, prefix_hit_tokens=100, requests_waiting=2),
        ]
    )
    assert banner.throughput(before, after, 10.0) == (
        "prompt 30.0 tok/s, generation 100.0 tok/s, running 3, waiting 2, "
        "KV 11.2 %, prefix hit 25.0 %"
    )


def test_a_restarted_worker_counts_from_zero():
    before = ClusterReport(workers=[WorkerReport(id="d", role="decode", generated_tokens=900)])
    after = ClusterReport(
        workers=[WorkerReport(id="d", role="decode", incarnation=2, generated_tokens=50)]
    )
    assert "generation 5.0 tok/s" in banner.throughput(before, after, 10.0)


def test_an_empty_cluster_divides_by_nothing():
    line = banner.throughput(ClusterReport(), ClusterReport(), 10.0)
    assert "KV 0.0 %, prefix hit 0.0 %" in line


def test_banner_names_pools_blocks_address_and_security():
    facts = banner.BannerFacts(
        version="0", model="m", address="ipc://a", transport="zmq", security="local"
    )
    report = ClusterReport(
        workers=[worker(pid=7, kv_blocks_total=64, endpoint="ipc://d"), worker("prefill", pid=6)]
    )
    text = "\n".join(banner.startup(facts, report))
    for part in ("ipc://a", "local", "decode-0  pid 7  64 KV blocks  ipc://d", "prefill-0  pid 6"):
        assert part in text


def test_banner_names_the_dashboard_and_the_metrics():
    facts = banner.BannerFacts(
        version="0", model="m", address="ipc://a", transport="zmq", security="local",
        http="http://127.0.0.1:8000/v1 (model m)",
        dashboard=banner.dashboard_of("http://127.0.0.1:8000/v1"),
        metrics=banner.metrics_of(ServeSettings(metrics_port=9400, routers=2, gateways=3)),
    )  # fmt: skip
    lines = banner.startup(facts, ClusterReport())
    assert "  dashboard  http://127.0.0.1:8000/dashboard" in lines
    assert "  metrics    http://127.0.0.1:9400/metrics, and up to port 9404" in lines
    one = banner.metrics_of(ServeSettings(metrics_port=9400, metrics_host="::1", gateways=0))
    assert one == "http://[::1]:9400/metrics"
    assert (banner.metrics_of(ServeSettings()), banner.dashboard_of("")) == ("", "")


def test_banner_names_architecture_kernels_dtypes_and_threads():
    facts = banner.BannerFacts(
        version="0", model="m", address="ipc://a", transport="zmq", security="local"
    )

    def lines(prefill="", decode="", **router):
        workers = [
            WorkerReport(id=f"{role}-0", role=role, state="ready", device=device)
            for role, device in (("prefill", prefill), ("decode", decode), ("decode", decode))
        ]
        report = ClusterReport(router=RouterReport(**router), workers=workers)
        return banner.startup(facts, report)[2:4]

    both = "cpu, 2 threads (4 cores for 2 workers)"
    apart = "prefill: 1 thread per worker (numpy kernels); decode: 3 threads per worker (as set)"
    assert lines(
        both,
        both,
        architecture="Qwen3ForCausalLM",
        numerics="cpu-4-amx/BF16/rope-9000",
        kv_dtype="float32",
    ) == [
        "  engine     Qwen3ForCausalLM, weights BF16, KV cache float32",
        "  kernels    C, amx; 2 threads per worker (4 cores for 2 workers)",
    ]
    assert lines(
        "cpu, 1 thread (numpy kernels)",
        "cpu, 3 threads (as set)",
        architecture="BertModel",
        numerics="numpy-2.4.6-float32/F32/mean",
        task="embed",
    ) == [
        "  engine     BertModel, weights F32",
        f"  kernels    NumPy 2.4.6; {apart}",
    ]
    assert lines(
        "cuda:0 GPU-5e2f90a1-0b1c",
        "cuda:0 GPU-5e2f90a1-0b1c",
        architecture="LlamaForCausalLM",
        numerics="cuda-sm_90-3-bf16/BF16",
        kv_dtype="bfloat16",
    ) == [
        "  engine     LlamaForCausalLM, weights BF16, KV cache bfloat16",
        "  kernels    CUDA, sm_90",
    ]


def test_nobody_who_chose_the_numpy_kernels_is_warned_of_them(monkeypatch):
    monkeypatch.setattr(banner, "compiled_kernels_problem", lambda: "not built")
    assert banner.kernels_warning(ServeSettings(kernels="numpy")) == ""
    assert banner.kernels_warning(ServeSettings(device="cuda")) == ""
    assert "not built" in banner.kernels_warning(ServeSettings())


def test_banner_warns_when_no_whole_context_fits_a_worker():
    def lines(context):
        facts = banner.BannerFacts(
            version="0", model="m", address="ipc://a", transport="zmq", security="local",
            context=context, block_size=16,
        )  # fmt: skip
        report = ClusterReport(workers=[worker(kv_blocks_total=64), worker(kv_blocks_total=32)])
        return "\n".join(banner.startup(facts, report))

    assert "limited to 512 tokens" in lines(513)
    assert "warning" not in lines(512)


@pytest.mark.parametrize("what", list(messages._SENTENCES))
def test_every_sentence_formats(what):
    assert "{" not in messages.sentence(Log(what, "decode-0", "because", 1.25))


def test_load_progress_bar():
    line = messages.load_progress([("decode-0", 5 << 20, 6 << 20), ("decode-1", 1 << 20, 6 << 20)])
    assert line == "loading  [######......] 6.0 MiB/12.0 MiB  decode-0, decode-1"


def test_a_report_with_unknown_keys_is_read_and_garbage_is_a_typed_error():
    data = b'{"workers":[{"id":"a","role":"decode","state":"ready","more":1}],"x":2}'
    assert parse_report(data).workers[0].alive
    with pytest.raises(DecodeFailed):
        parse_report(b"\xff")


@pytest.mark.parametrize("file", ["supervise/core", "controller/core", "controller/pools"])
def test_everything_the_cores_say_has_a_sentence(file):
    source = (Path(messages.__file__).parent / f"{file}.py").read_text()
    found = re.findall(r'Log\(\s*"(\w+)"', source)
    assert found
    for what in found:
        assert messages.sentence(Log(what, "decode-0", "why", 1.0))


def test_only_requests_make_a_cluster_busy():
    idle = worker(generated_tokens=5, kv_blocks_used=3)
    assert not banner.is_busy(ClusterReport(workers=[idle]), ClusterReport(workers=[idle]))
    for change in ({"generated_tokens": 6}, {"requests_running": 1}, {"requests_waiting": 1}):
        busy = msgspec.structs.replace(idle, **change)
        assert banner.is_busy(ClusterReport(workers=[idle]), ClusterReport(workers=[busy]))
