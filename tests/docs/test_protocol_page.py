"""docs/protocol.md must describe the structs as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_message_tables_are_fresh():
    spec = importlib.util.spec_from_file_location("make_protocol", DOCS / "make_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "protocol.md").read_text("utf-8")
    assert module.render(page) == page, "run: python docs/make_protocol.py"
