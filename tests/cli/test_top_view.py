"""What ``baton top`` shows, and what its keys do."""

import re

import pytest

from baton.cli.status import describe
from baton.cli.top_view import COLUMNS, Drain, Quit, Snapshot, Top
from baton.deploy.messages import duration
from baton.deploy.report import (
    ClusterReport,
    Percentiles,
    RequestCounts,
    RouterReport,
    WorkerReport,
)


def worker(name: str, **fields) -> WorkerReport:
    role = name.partition("-")[0]
    latency = "first_token_s" if role == "prefill" else "between_tokens_s"
    found = {latency: Percentiles(count=9, p50=0.012, p90=0.02, p99=0.0345)}
    settings = {"state": "ready", "kv_blocks_total": 100, "kv_blocks_used": 25, "incarnation": 1}
    return WorkerReport(id=name, role=role, **{**settings, **found, **fields})


def snapshot(at: float, *workers: WorkerReport, restarts=None, **router) -> Snapshot:
    report = ClusterReport(workers=list(workers), router=RouterReport(**router))
    return Snapshot(at, [report], restarts or {})


def rows(top: Top, width: int = 120, height: int = 40) -> list[list[str]]:
    """The cells of the workers' lines."""
    lines = top.lines(width, height)
    start = next(i for i, line in enumerate(lines) if line.startswith("WORKER"))
    return [line.split() for line in lines[start + 1 : -1]]


@pytest.fixture
def top() -> Top:
    return Top(color=False)


def test_rates_are_differences_of_two_snapshots(top):
    top.update(
        snapshot(
            10.0,
            worker("prefill-0", prompt_tokens=100, handoff_bytes=0),
            worker("decode-0", generated_tokens=40, handoff_bytes=0),
        )
    )
    assert [row[6] for row in rows(top)] == ["0.0", "0.0"]
    top.update(
        snapshot(
            12.0,
            worker("prefill-0", prompt_tokens=300, handoff_bytes=4_000_000_000),
            worker("decode-0", generated_tokens=90, handoff_bytes=4_000_000_000),
        )
    )
    decode, prefill = rows(top)
    numbers = ["0", "0", "25.0", "100.0", "12.0", "34.5", "2.000", "0"]
    assert prefill == ["prefill-0", "prefill", "ready", *numbers, "cpu"]
    assert decode[6] == "25.0"
    assert any("handoff 2.000 GB/s" in line for line in top.lines(120, 40))


def test_a_restarted_worker_begins_at_zero(top):
    top.update(snapshot(10.0, worker("decode-0", generated_tokens=1000)))
    top.update(snapshot(11.0, worker("decode-0", generated_tokens=30, incarnation=2)))
    assert rows(top)[0][6] == "30.0"


def test_the_most_restarts_known_are_shown(top):
    top.update(snapshot(1.0, worker("decode-0", restarts=1), restarts={"decode-0": 3}))
    assert rows(top)[0][-2] == "3"


def test_the_gpu_of_a_worker_is_shown(top):
    top.update(snapshot(1.0, worker("decode-0", device=f"cuda:1 GPU-5e2f90a1-{'0' * 27}")))
    assert rows(top)[0][-2:] == ["cuda:1", "GPU-5e2f90a1"]
    line = describe(ClusterReport(workers=[worker("decode-0", device="cuda:1 GPU-5e2f90a1-00")]))
    assert any("  cuda:1 GPU-5e2f90a1  " in one for one in line)


def test_keys_sort_and_turn_the_order(top):
    top.update(
        snapshot(
            1.0,
            worker("decode-0", requests_waiting=1),
            worker("decode-1", requests_waiting=5),
            worker("decode-2", requests_waiting=3),
        )
    )
    names = lambda: [row[0][-1] for row in rows(top)]  # noqa: E731
    assert names() == ["0", "1", "2"]
    queue = [column.title for column in COLUMNS].index("QUEUE")
    for _ in range(queue):
        assert top.key("s") is None
    assert names() == ["1", "2", "0"]  # the largest number first
    top.key("r")
    assert names() == ["0", "2", "1"]
    for _ in range(len(COLUMNS) - queue):
        top.key("s")
    assert names() == ["0", "1", "2"]


def test_a_drain_is_confirmed(top):
    top.update(snapshot(1.0, worker("decode-0"), worker("decode-1")))
    assert top.key("d") is None  # nothing is selected
    top.key("j")
    top.key("j")
    top.key("d")
    assert top.lines(120, 40)[-1] == "drain decode-1? y or n"
    assert top.key("n") is None
    assert top.lines(120, 40)[-1] == "decode-1 is not drained"
    top.key("d")
    assert top.key("y") == Drain("decode-1")


def test_q_and_control_c_quit(top):
    assert top.key("q") == Quit()
    assert top.key("\x03") == Quit()
    assert top.key("x") is None


def test_the_selected_worker_stays_in_view(top):
    top.update(snapshot(1.0, *(worker(f"decode-{n:02}") for n in range(50))))
    for _ in range(45):
        top.key("j")
    shown = rows(top, height=20)
    assert len(top.lines(120, 20)) == 20
    assert "decode-44" in [row[0] for row in shown]
    for _ in range(60):
        top.key("k")
    assert rows(top, height=20)[0][0] == "decode-00"


@pytest.mark.parametrize("width", [1, 20, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 24])
def test_the_view_fits_any_terminal(width, height):
    for color in (False, True):
        top = Top(color=color)
        assert top.lines(width, height)  # before the first report
        top.update(snapshot(1.0, worker("decode-0"), worker("prefill-0", state="dead")))
        top.key("j")
        lines = top.lines(width, height)
        assert 0 < len(lines) <= height
        assert max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in lines) <= width


def test_several_routers_are_added_up(top):
    one, other = (
        snapshot(1.0, worker("decode-0", handoff_bytes=n, heard_s_ago=n / 10)).reports[0]
        for n in (1, 2)
    )
    both = Snapshot(1.0, [other, one])
    assert both.workers()["decode-0"].heard_s_ago == 0.1
    assert both.handed_over("decode-0") == 3
    top.update(both)
    assert "2 routers" in top.lines(120, 40)[0]


def test_durations_in_words():
    seconds = (0.4, 59.9, 61, 7260, 90_000)
    assert [duration(one) for one in seconds] == ["0 s", "59 s", "1 min", "2 h 1 min", "1 d 1 h"]


def test_a_screen_of_80_columns_shows_whole_columns_and_lines(top):
    counts = RequestCounts(finished=123_456, failed=12, cancelled=345, refused=67, replayed=8)
    top.update(snapshot(1.0, worker("decode-0"), requests=counts, model="a-model", uptime_s=9e5))
    wide, narrow = top.lines(120, 40), top.lines(80, 40)
    assert max(map(len, narrow)) <= 80
    titles = [column.title for column in COLUMNS]
    shown = "".join(line for line in narrow if line.startswith("WORKER"))
    assert [one for one in titles if one in shown] == [
        one for one in titles if one not in ("DEVICE", "ROLE", "RESTARTS")
    ]
    words = " ".join(" ".join(wide[:4]).split())
    assert words in " ".join(" ".join(narrow).split())  # the summary is wrapped, not cut


def test_the_column_of_the_sort_order_is_never_hidden(top):
    top.update(snapshot(1.0, worker("decode-0")))
    for column in COLUMNS:
        lines = top.lines(80, 40)
        title = next(line for line in lines if line.startswith("WORKER"))
        assert f"{column.title}"[:7] in title
        assert ("^" in title or "v" in title) or column.title == "RESTARTS"
        assert max(map(len, lines)) <= 80
        top.key("s")


def test_no_text_of_a_process_controls_the_terminal(top):
    escape = "x\n\x1b]0;owned\x07"
    hostile = worker(escape, state=escape)
    top.update(snapshot(0.0, hostile, model=escape))
    top.update(snapshot(1.0, hostile, model=escape))
    top.message = escape
    lines = top.lines(200, 40)
    assert sum("x??]0;owned?"[:8] in line for line in lines) >= 3
    assert all(line.isprintable() for line in lines)
