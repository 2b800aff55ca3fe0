"""docs/operations.md says the same of the settings as the code."""

from pathlib import Path

from baton.cli.settings import HELP
from baton.deploy.config import ServeSettings

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_every_setting_has_its_row_with_its_default():
    rows = {
        line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| `--")
    }
    for field in ServeSettings.__struct_fields__:
        if field == "model":
            continue
        row = rows.pop(f"`--{field.replace('_', '-')}`")
        default = getattr(ServeSettings(), field)
        assert f"`BATON_{field.upper()}`" in row
        assert (f"`{default}`" if default != "" else "empty") in row
        assert HELP[field] in row
    assert rows == {}
