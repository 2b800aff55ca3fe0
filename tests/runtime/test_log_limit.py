"""Rate-limited log lines: the first line at once, then one line with a count."""

from baton.runtime.process.log_limit import LimitedLog, LogLimit


def test_a_burst_is_two_lines_with_every_occurrence():
    limit = LogLimit(interval_s=10.0)
    passed = [limit.passes("bad", 100.0 + n / 100, error=str(n)) for n in range(500)]
    assert passed == [True] + [False] * 499
    assert limit.due(109.9) == []
    assert limit.due(110.0) == [("bad", {"error": "499", "count": 499})]
    assert limit.due(119.0) == []


def test_a_flood_is_one_line_in_each_interval():
    limit = LogLimit(interval_s=10.0)
    lines = 0
    for second in range(60):
        for _ in range(10):
            lines += limit.passes("bad", float(second))
        lines += len(limit.due(float(second)))
    assert lines == 1 + 5


def test_after_a_quiet_interval_the_next_one_passes_at_once():
    limit = LogLimit(interval_s=10.0)
    assert limit.passes("bad", 0.0)
    assert limit.passes("other", 1.0)
    assert limit.due(10.0) == []
    assert limit.passes("bad", 12.0)
    assert not limit.passes("other", 10.5)


def test_each_thing_that_an_event_is_about_has_its_own_lines():
    limit = LogLimit(interval_s=10.0)
    assert [limit.passes("bad", 0.0, of, of=of) for of in ("a", "b", "a", "b", "b")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert limit.due(10.0) == [("bad", {"of": "a", "count": 1}), ("bad", {"of": "b", "count": 2})]


def test_limited_warnings_are_logged_without_a_further_call(loop, drive, capsys):
    log = LimitedLog(loop, interval_s=0.05)
    for number in range(500):
        log.warning("bad", error=str(number))
    lines: list[str] = []
    drive.until(lambda: lines.extend(capsys.readouterr().err.splitlines()) or len(lines) > 1)
    assert len(lines) == 2
    assert all("bad" in line for line in lines)
    assert "499" in lines[1]
    drive.until(lambda: log._limit.quiet and log._looks is None)


def test_a_count_is_logged_although_looking_raised_once(loop, drive, monkeypatch, capsys):
    log = LimitedLog(loop, interval_s=0.05)
    log.warning("bad")
    log.warning("bad")
    real, calls = log._limit.due, []

    def raising(now):
        calls.append(now)
        if len(calls) == 1:
            raise KeyError("planted")
        return real(now)

    monkeypatch.setattr(log._limit, "due", raising)
    drive.until(lambda: log._looks is None)
    assert "count=1" in capsys.readouterr().err.replace("'", "")


def test_a_burst_passes_and_the_rest_is_counted():
    limit = LogLimit(10.0, burst=3)
    assert [limit.passes("joined", 1.0, worker=n) for n in range(5)] == [True] * 3 + [False] * 2
    assert limit.due(11.0) == [("joined", {"worker": 4, "count": 2})]
