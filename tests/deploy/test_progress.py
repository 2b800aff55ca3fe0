from baton.deploy.progress import INTERVAL, LoadProgress


def test_shows_now_and_then_and_at_the_end():
    lines, now = [], [0.0]
    progress = LoadProgress(lines.append, lambda: now[0])
    for name in ("a", "b"):
        progress.update(name, 0, 100)
    assert lines == []
    now[0] = INTERVAL
    progress.update("a", 50, 100)
    progress.update("b", 60, 100)
    assert len(lines) == 1
    progress.update("a", 100, 100)
    progress.update("b", 100, 100)
    progress.update("b", 100, 100)
    assert len(lines) == 2


def test_a_worker_that_ended_no_longer_counts():
    lines = []
    progress = LoadProgress(lines.append, lambda: 0.0)
    progress.update("a", 1, 2)
    progress.forget("a")
    progress.update("b", 2, 2)
    assert len(lines) == 1
    assert "a " not in lines[0].removeprefix("loading")
