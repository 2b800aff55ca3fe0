"""The README's example runs as it is printed."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]


def test_the_python_example_runs(cluster, capsys, monkeypatch):
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = (text for text in shown if text.startswith("from baton import"))
    running = cluster(prefill=1, decode=1)
    monkeypatch.setenv("BATON_ADDRESS", running.address)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "read by prefill-0, written by decode-0" in printed
    assert len(printed.split()) > 8
