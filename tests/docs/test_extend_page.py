"""docs/extend.md has the fields and types of the facts, and examples that a newcomer can read."""

import re
from pathlib import Path

import pytest

import baton.extend
from baton.engine.models.registry import ARCHITECTURES
from baton.extend import Ended, Placing, Prompt, Ways, WorkerFacts
from baton.extend.resolve import POINTS
from baton.router.custom import checked
from baton.runtime.metrics.exposition import exposition
from baton.simulator.__main__ import OWN_SCENARIOS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text()
MOST_LINES = 60


@pytest.mark.parametrize("facts", [Placing, WorkerFacts, Ways, Prompt, Ended])
def test_a_table_has_the_fields_and_their_types(facts):
    table = PAGE[PAGE.index(f"| `{facts.__name__}` | type |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| \S", table, re.MULTILINE)
    types = {name: text.replace("\\|", "|") for name, text in rows}
    assert types == {name: facts.__annotations__[name] for name in facts.__struct_fields__}


def test_the_page_names_every_point_and_method():
    first = PAGE.partition("\n## ")[0]
    for point in POINTS.values():
        assert f"--{point.name.replace('_', '-')} module:Class" in first
        for method in point.methods:
            assert f"`{method}(" in first


def test_every_example_is_short_and_on_the_page():
    files = sorted((ROOT / "examples" / "extend").glob("*.py"))
    assert len(files) >= 4
    for file in files:
        assert len(file.read_text().splitlines()) <= MOST_LINES
        assert f"examples/extend/{file.name})" in PAGE


@pytest.mark.parametrize(
    ("name", "first"), [("rack_policy", "import os"), ("slo_metric", "from collections")]
)
def test_the_page_shows_the_whole_example(name, first):
    code = (ROOT / "examples" / "extend" / f"{name}.py").read_text()
    assert f"```python\n{code[code.index(first) :]}```" in PAGE


def test_the_histogram_of_the_page_is_exposed():
    (code,) = re.findall(r"```python\n(class PromptMetric:.*?)```", PAGE, re.DOTALL)
    names = dict(vars(baton.extend))
    exec(code, names)
    metric = names["PromptMetric"]()
    for way, tokens in (("local", 10), ("handed_over", 600), ("local", 64)):
        metric.ended(Ended(request_id="r", outcome="finished", way=way, prompt_tokens=tokens))
    (family,) = metric.families()
    lines = exposition([checked(family)])
    assert b'prompt_tokens_by_way_bucket{le="64",way="local"} 2' in lines.replace(b".0", b"")
    assert b'prompt_tokens_by_way_bucket{le="+Inf",way="handed_over"} 1' in lines


@pytest.mark.parametrize(
    ("row", "generates"), [("generate text", True), ("embeddings alone", False)]
)
def test_the_page_of_compatibility_lists_the_architectures(row, generates):
    page = (ROOT / "docs" / "compatibility.md").read_text()
    (cell,) = re.findall(rf"^\| {row} \| (.*) \|$", page, re.MULTILINE)
    named = [
        name for name, one in ARCHITECTURES.items() if (one.generator is not None) == generates
    ]
    assert re.findall(r"`(\w+)`", cell) == named
    assert "(compatibility.md#architectures)" in PAGE


def test_the_page_names_the_scenarios_that_run_by_default():
    shown = ", ".join(f"`{name}`" for name in OWN_SCENARIOS[:-1])
    assert f"{shown} and `{OWN_SCENARIOS[-1]}`" in PAGE


def test_what_is_exported_exists():
    assert all(hasattr(baton.extend, name) for name in baton.extend.__all__)
