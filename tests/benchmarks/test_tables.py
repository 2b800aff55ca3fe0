"""What benchmarks print, as tables of the pages."""

import subprocess
import sys

from baton.benchmarks.tables import commit, tables

PRINTED = """\
lone request, µs     p50     p10
direct                83      78
router               406     352

the router's CPU time for one: 367 µs
                 now   before
Submit          16.1     18.7
"""


def test_columns_become_tables_and_other_lines_stay():
    assert tables(PRINTED).splitlines() == [
        "| lone request, µs | p50 | p10 |",
        "|---|---|---|",
        "| direct | 83 | 78 |",
        "| router | 406 | 352 |",
        "",
        "the router's CPU time for one: 367 µs",
        "",
        "|  | now | before |",
        "|---|---|---|",
        "| Submit | 16.1 | 18.7 |",
    ]


def test_a_run_writes_its_tables_with_the_commit(tmp_path):
    table = tmp_path / "results.md"
    command = [sys.executable, "-m", "baton.benchmarks", "loop", "--table", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = table.read_text()
    assert found.startswith("## loop\n")
    assert commit() in found
    rows = [line for line in found.splitlines() if line.startswith("| ")]
    assert len(rows) > 1
    assert all(cell.strip() in done.stdout for cell in rows[-1].strip("| ").split("|"))
