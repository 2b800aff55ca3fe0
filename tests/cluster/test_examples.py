"""Every example runs, and so does the code of docs/python.md."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from ..engine.gguf_models import write_file

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ARGUMENTS = {
    "embeddings": ROOT / "tests" / "data" / "embedders" / "bert",
    "picture": ROOT / "tests" / "data" / "pictures" / "flux",
}
SAID = {
    "chat_stream": r"> What is Baton\?\n.*two pools.*\n  \((stop|length), read by prefill-0, wri",
    "batch": r"'Once upon a time' \(\d+ tokens\)\n  0 \w+ +'.*\n  1 \w+ +'.*\n'The fox'",
    "gguf_file": r"^\['default'\] 1024 tokens\n(stop|length) '",
    "many_tasks": r"^100 answers with \d+ tokens$",
    "cancel": r"^cancelled after \d+ tokens\nDeadlineExceeded: ",
    "target_endpoint": r"(decode-\d) at \S+: \1 wrote the answer\n(decode-\d) at \S+: \2 wrote",
    "structured_output": r"^{'name': '(fox|hen)', 'legs': -?\d+} stop$",
    "picture": r"^256 x 256, seed 7: \d+% of the pixels differ$",
    "embeddings": r"(?m)^1?0?\.\d+ the cat|^-?\d\.\d{3} ",
}
"""What each example prints, in part."""


@pytest.fixture
def address(lasting_cluster, monkeypatch):
    found = lasting_cluster(prefill=1, decode=2).address
    monkeypatch.setenv("BATON_ADDRESS", found)
    return found


def test_every_example_is_here_and_in_their_readme():
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(SAID)
    readme = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\| `(\w+)\.py` \|", readme)) == files


@pytest.mark.parametrize("name", SAID)
def test_an_example(name, address, monkeypatch, capsys, tmp_path):
    arguments = [str(ARGUMENTS[name])] if name in ARGUMENTS else []
    monkeypatch.chdir(tmp_path)  # two of them write files
    if name == "gguf_file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        arguments = [str(write_file(tmp_path))]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(SAID[name], printed, re.DOTALL if name == "chat_stream" else 0), printed


def test_the_first_code_of_the_page(address, capsys):
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.S)
    exec(compile(first, "docs/python.md", "exec"), {})
    assert re.search(r" (stop|length) \d+\n$", capsys.readouterr().out)
    compile(second, "docs/python.md", "exec")


def test_the_page_names_what_exists():
    import baton

    page = (ROOT / "docs/python.md").read_text()
    table = page[page.index("| name | for |") :].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines())))
    assert named == set(baton.__all__)
