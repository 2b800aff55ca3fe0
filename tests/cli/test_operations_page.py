"""The settings in docs/operations.md equal those of the code."""

from pathlib import Path

from baton.cli.settings import HELP
from baton.deploy.config import ServeSettings

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def _table(head: str) -> list[str]:
    """Return the rows of the table with this head, without the head and the group rows."""
    lines = PAGE[PAGE.index(head) :].partition("\n\n")[0].splitlines()
    return [line for line in lines[2:] if line.startswith("| `--")]


def test_every_setting_has_its_row_with_its_default():
    rows = {line.split("|")[1].strip(): line for line in _table("| flag and file key")}
    for field in ServeSettings.__struct_fields__:
        if field == "model":
            continue
        row = rows.pop(f"`--{field.replace('_', '-')}`")
        default = getattr(ServeSettings(), field)
        assert f"`BATON_{field.upper()}`" in row
        assert (f"`{default}`" if default != "" else "empty") in row
        assert HELP[field] in row
    assert rows == {}
