"""The progress bar's text, and when it is drawn."""

from baton.offline.llm import Progress, line_of


def test_the_line():
    line = line_of(30, 120, 960, 65.0, "prompts")
    assert line.startswith(" 25% [######..................] 30/120 prompts, 1:05 (left 3:15)")
    assert line.endswith(", 0.5 prompts/s, 15 tokens/s")
    assert line_of(0, 5, 0, 0.0, "texts").endswith("0/5 texts, 0:00 (left ?), 0.0 texts/s")
    assert "100%" in line_of(0, 0, 0, 1.0, "texts")
    assert "2:00:00 (left 2:00:00)" in line_of(1, 2, 0, 7200.0, "texts")


def test_it_is_drawn_on_a_terminal_or_when_asked_for(capsys):
    now = [0.0]
    with Progress(3, "prompts", clock=lambda: now[0]) as progress:  # standard error is captured
        progress.add(1)
    assert capsys.readouterr().err == ""
    with Progress(3, "prompts", True, clock=lambda: now[0]) as progress:
        for _ in range(3):
            progress.add(1, 10)  # at the same time: not drawn again
    drawn = capsys.readouterr().err.split("\r\x1b[K")
    assert ["0/3" in drawn[1], "3/3" in drawn[2], drawn[2][-1]] == [True, True, "\n"]
    assert len(drawn) == 3
