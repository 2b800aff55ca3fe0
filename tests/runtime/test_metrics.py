"""Families of metrics, their exposition, vLLM's names, and the listener for scrapes."""

import contextlib
import http.client
import math
import random
import socket
import threading
from contextlib import closing

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.deploy.plan.addresses import free_ports
from baton.runtime.keys.api_keys import digest_of
from baton.runtime.metrics import families, listener
from baton.runtime.metrics.exposition import exposition
from baton.runtime.metrics.families import (
    GAP_S,
    Family,
    Histogram,
    Limited,
    Rows,
    counter,
    gauge,
    histogram,
)
from baton.runtime.metrics.listener import MetricsListener
from baton.runtime.metrics.vllm import vllm_families
from baton.runtime.net.loop import Loop

from ..processes import wait_until


@pytest.mark.parametrize("bounds", [(512, 64), (1.0, 1.0), (1.0, math.nan, 2.0)])
def test_bounds_must_ascend(bounds):
    with pytest.raises(ValueError, match="bounds must ascend: "):
        Histogram(bounds)


@pytest.mark.parametrize("make", [counter, gauge, histogram])
def test_keys_that_are_no_tuples_of_the_labels_values_are_an_error_at_the_call(make):
    value = Histogram((1.0,)) if make is histogram else 1.0
    with pytest.raises(ValueError, match="h1") as caught:
        make("h1", "", {"handed": value}, ("way",))
    assert str(caught.value) == (
        "h1: the keys of values must be tuples of 1 label value (way), not 'handed'"
    )
    with pytest.raises(ValueError, match=r"tuples of 0 label values, not \('a',\)"):
        make("h1", "", {("a",): value})
    assert make("h1", "", {("local",): value}, ("way",)).rows[0].labels == ("local",)


def parsed(families: list[Family]) -> dict[str, float]:
    """Return the samples by name and labels, as Prometheus reads them."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(exposition(families).decode())
        for sample in family.samples
    }


def test_a_histogram_counts_a_value_in_the_first_bucket_that_holds_it():
    found = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        found.observe(value)
    found.observe(2.0, 3)
    assert found.counts == [2, 5, 1]
    assert found.count == 8
    assert found.total == pytest.approx(18.0)
    found.add([1, 1, 1], 4.0)
    found.add([9, 9], 9.0)  # other bounds
    assert found.counts == [3, 6, 2]


def test_many_values_are_counted_as_one_by_one():
    rng = random.Random(7)
    values = [*GAP_S, 0.0, 1e9, *(rng.lognormvariate(-4, 2) for _ in range(500))]
    one, many = Histogram(GAP_S), Histogram(GAP_S)
    for value in values:
        one.observe(value)
    many.observe_all(np.array(values))
    many.observe_all(np.array([]))
    assert many.counts == one.counts
    assert many.total == pytest.approx(one.total)


def test_rows_are_counted_before_their_memory_grows(monkeypatch):
    monkeypatch.setattr(families, "MAX_ROWS", 4)
    found: list[list[float]] = []
    rows = Rows(2, lambda columns: found.append(columns.tolist()))
    for number in range(10):
        assert len(rows) < 4
        rows.add((number, number / 2))
    assert len(rows) == 2
    rows.fold()
    rows.fold()  # nothing is left
    assert [column for column, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found[2][1] == [4.0, 4.5]
    assert len(rows) == 0


def test_prometheus_reads_what_was_counted():
    times = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 5.0):
        times.observe(value)
    families = [
        counter("baton_a_total", "Things.", {("x", 'q"\n\\'): 3}, ("kind", "name")),
        gauge("baton_b", "More.", 2.5),
        histogram("baton_c_seconds", "Times.", {("shm",): times}, ("transport",)),
        counter("baton_d_total", "Nothing yet.", {}, ("kind",)),
    ]
    families = msgspec.json.decode(msgspec.json.encode(families), type=list[Family])
    assert parsed(families) == {
        "baton_a_total[('kind', 'x'), ('name', 'q\"\\n\\\\')]": 3,
        "baton_b[]": 2.5,
        "baton_c_seconds_bucket[('le', '0.1'), ('transport', 'shm')]": 1,
        "baton_c_seconds_bucket[('le', '1.0'), ('transport', 'shm')]": 2,
        "baton_c_seconds_bucket[('le', '+Inf'), ('transport', 'shm')]": 3,
        "baton_c_seconds_count[('transport', 'shm')]": 3,
        "baton_c_seconds_sum[('transport', 'shm')]": pytest.approx(5.55),
    } | {name: value for name, value in parsed(families).items() if "baton_c_seconds_sum" in name}


def test_the_values_of_a_label_are_limited():
    limited = Limited(2, known=["shm"])
    assert [limited(name) for name in ("zmq", "shm", "bad")] == ["zmq", "shm", "other"]


def test_vllm_names_have_baton_numbers_and_the_gateways_come_first():
    router, edge = Histogram(GAP_S), Histogram(GAP_S)
    edge.observe(0.01)
    worker = ("worker", "role")
    families = vllm_families(
        [
            gauge("baton_router_info", "", {("r", "tiny"): 1}, ("router", "model_name")),
            gauge("baton_requests_queued", "", 2),
            gauge("baton_worker_requests_waiting", "", {("prefill-0", "prefill"): 3}, worker),
            counter("baton_worker_prompt_tokens_total", "", {("prefill-0", "prefill"): 5}, worker),
            counter(
                "baton_worker_prefix_hit_tokens_total", "", {("prefill-0", "prefill"): 7}, worker
            ),
            counter(
                "baton_requests_total",
                "",
                {("ok", "stop"): 4, ("failed", "worker_lost"): 1, ("failed", "internal"): 1},
                ("outcome", "reason"),
            ),
            histogram("baton_time_to_first_token_seconds", "", router),
            histogram("baton_gateway_time_to_first_token_seconds", "", edge),
        ]
    )
    found = parsed(families)
    prefill = "[('engine', 'prefill-0'), ('model_name', 'tiny')]"
    every = "('engine', '0'), "
    assert found[f"vllm:num_requests_waiting{prefill}"] == 3
    assert found["vllm:num_requests_waiting[('engine', 'router'), ('model_name', 'tiny')]"] == 2
    assert found[f"vllm:prefix_cache_queries_total{prefill}"] == 12
    assert found[f"vllm:prefix_cache_hits_total{prefill}"] == 7
    assert found[f"vllm:time_to_first_token_seconds_count[{every}('model_name', 'tiny')]"] == 1
    reasons = "('finished_reason', '%s'), ('model_name', 'tiny')"
    success = f"vllm:request_success_total[{every}{reasons}]"
    assert (found[success % "stop"], found[success % "error"]) == (4, 2)
    assert "vllm:kv_cache_usage_perc" not in str(found)  # nothing is made up


# --------------------------------------------------------------------------- listener


class Served:
    """A listener on an event loop in a thread."""

    def __init__(
        self,
        *keys: str,
        ports=(),
        families=lambda: [gauge("baton_b", "More.", 2.5)],
        patience_s=0.0,
    ) -> None:
        self.loop = Loop()
        digests = tuple(map(digest_of, keys))
        self.listener = MetricsListener(
            self.loop.asyncio_loop, "127.0.0.1", ports or free_ports(1), families, digests,
            patience_s,
        )  # fmt: skip
        self.listener.start()
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    @property
    def port(self) -> int:
        wait_until(lambda: self.listener.port, what="the listener")
        return self.listener.port

    def ask(self, method="GET", path="/metrics", **headers: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()

    def close(self) -> None:
        self.loop.post(lambda: (self.listener.close(), self.loop.stop()))
        self._thread.join(20)


@pytest.fixture
def serve():
    started = []

    def start(*keys: str, **options) -> Served:
        started.append(Served(*keys, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.integration
def test_a_scrape_gets_the_text_and_other_requests_an_error(serve):
    served = serve()
    status, text = served.ask()
    assert (status, text) == (200, exposition([gauge("baton_b", "More.", 2.5)]))
    assert [served.ask(path="/")[0], served.ask("POST")[0]] == [404, 405]
    assert served.ask(path="/metrics?x=1")[0] == 200


@pytest.mark.integration
def test_with_keys_a_scrape_must_have_one(serve):
    served = serve("secret", "other")
    refused = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}]
    assert [served.ask(**headers)[0] for headers in refused] == [401] * 3
    assert served.ask(Authorization="Bearer other")[0] == 200


@pytest.mark.integration
def test_without_a_key_a_web_page_cannot_read_the_metrics(serve):
    """Its name may resolve to this machine; the request then has the page's Host or Origin."""
    served = serve()
    foreign = [{"Host": "evil.example"}, {"Host": f"evil.example:{served.port}"}, {"Host": ""},
               {"Origin": "http://evil.example"}, {"Origin": "null"}]  # fmt: skip
    assert [served.ask(**headers)[0] for headers in foreign] == [403] * 5
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        head = b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n"
        connection.sendall(head)
        assert connection.recv(99).startswith(b"HTTP/1.1 403 ")
    local = ["localhost", "127.0.0.1", f"LOCALHOST:{served.port}", "[::1]:80"]
    assert [served.ask(Host=host)[0] for host in local] == [200] * 4
    assert serve("secret").ask(Host="evil.example", Authorization="Bearer secret")[0] == 200


@pytest.mark.integration
def test_a_long_head_and_a_failing_source_do_not_end_the_listener(serve):
    broken = [math.nan]

    def families():
        if broken.pop():
            raise ValueError("a bug")
        return []

    served = serve(families=families)
    assert served.ask(path="/metrics" + "x" * listener.MAX_HEAD_BYTES)[0] == 431
    assert served.ask()[0] == 500
    broken.append(0.0)
    assert served.ask() == (200, b"")


@pytest.mark.integration
def test_of_several_ports_the_first_free_one_is_taken_even_if_it_comes_later(serve, monkeypatch):
    """As in a rollout, where the new gateway gets the port of the ending gateway."""
    monkeypatch.setattr(listener, "RETRY_S", 0.01)
    ports = free_ports(2)
    first = serve(ports=ports)
    assert first.port == ports[0]
    assert serve(ports=ports).port == ports[1]
    late = serve(ports=ports[::-1])
    assert late.listener.port == 0
    first.close()
    assert late.port == ports[0]
    assert late.ask()[0] == 200


@pytest.mark.integration
def test_only_ports_that_stay_in_use_are_a_warning(serve, monkeypatch, capfd):
    """In a rollout the predecessor has the ports until it ends."""
    monkeypatch.setattr(listener, "RETRY_S", 0.01)
    ports = free_ports(1)
    first = serve(ports=ports)
    assert first.port == ports[0]
    seen: list[str] = []

    def warnings() -> int:
        seen.append(capfd.readouterr().err)
        return "".join(seen).count("metrics.not_listening")

    late = [serve(ports=ports, patience_s=seconds) for seconds in (1000.0, 0.05)]
    wait_until(lambda: warnings(), what="the warning")
    first.close()
    wait_until(lambda: any(one.listener.port for one in late), what="a successor to listen")
    assert warnings() == 1


@pytest.mark.integration
def test_a_connection_that_asks_for_nothing_is_closed(serve, monkeypatch):
    monkeypatch.setattr(listener, "TIMEOUT_S", 0.05)
    served = serve()
    idle = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    with idle, contextlib.suppress(ConnectionError):
        assert idle.recv(1) == b""


@pytest.mark.integration
def test_connections_are_limited(serve):
    served = serve()
    held = []
    for _ in range(listener.MAX_CONNECTIONS):
        held.append(socket.create_connection(("127.0.0.1", served.port), timeout=20))
    one_more = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    with one_more, contextlib.suppress(ConnectionError):
        assert one_more.recv(1) == b""
    held.pop().close()
    for one in held:
        one.close()
