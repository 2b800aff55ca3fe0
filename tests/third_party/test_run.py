"""The runner of third-party files, on files written here in their manner."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .differences import DIFFERENCES, explain
from .names import MODULES, reference_names

ROOT = Path(__file__).parents[2]

EARLIER = """
import numpy as np
from max.interfaces import GenerationStatus
from max.pipelines.core import TextContext

def test_indices():
    context = TextContext(max_length=9, tokens=np.array([4, 5, 6], dtype=np.int32))
    context.bump_token_indices(start_idx=1)
    assert (context.start_idx, context.active_idx, context.end_idx) == (1, 3, 3)
    context.update(7)
    assert context.outstanding_completion_tokens() == [(7, None)]
    assert context.status is GenerationStatus.ACTIVE
"""
LATER = """
import pytest
import numpy as np
from max.interfaces.tokens import TokenBuffer
from max.interfaces.utils.serialization import msgpack_numpy_decoder, msgpack_numpy_encoder
from max.pipelines.core.context import FUTURE_TOKEN, TextContext
from max.interfaces import TextGenerationContext

@pytest.mark.parametrize("token", [7, 8])
def test_realized(token):
    context = TextContext(max_length=9, tokens=TokenBuffer(array=np.arange(1, 4)))
    assert isinstance(context, TextGenerationContext)
    context.update_with_future_token()
    assert context.tokens[-1] == FUTURE_TOKEN
    context.realize_future_token(token)
    again = msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context))
    assert again.to_generation_output().tokens == [token]

def test_not_here():
    pytest.skip("needs what nobody has")
"""
DEVIATES = """
import numpy as np
from max.interfaces.request.open_responses import ImageDetail, OutputImageContent

def test_output_image_from_numpy_grayscale():
    OutputImageContent.from_numpy(np.full((3, 3), 0.5), detail=ImageDetail.low)
"""
FAILS = """
from max.interfaces import Range

def test_longer_than_it_is():
    assert len(Range(1, 3)) == 5
"""
HIDES = """
import numpy as np
from max.interfaces import OutputImageContent, Range

def test_output_image_from_numpy_grayscale():  # the case of a deviation with another error
    Range(3, 1)

def test_another_case():  # the error of a deviation in another case
    OutputImageContent.from_numpy(np.full((3, 3), 0.5))
"""


def run(folder, **files):
    """Exit code and output of the verb's command on files with these texts."""
    paths = []
    for name, text in files.items():
        path = folder / name / "test_same_name.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return command(*paths)


def command(*paths):
    done = subprocess.run(
        [sys.executable, "-m", "third_party.run", *paths],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def row(output, name):
    """The numbers of a file's line: cases, passed, differing, skipped, failing."""
    line = re.search(rf"^{name}/test_same_name.py +(.*)$", output, re.MULTILINE)
    return [int(number) for number in line[1].split()]


def test_both_generations_and_a_documented_deviation_are_good(tmp_path):
    code, output = run(tmp_path, earlier=EARLIER, later=LATER, deviates=DEVIATES)
    assert row(output, "earlier") == [1, 1, 0, 0, 0]
    assert row(output, "later") == [3, 2, 0, 1, 0]
    assert row(output, "deviates") == [1, 0, 1, 0, 0]
    assert "V20 (docs/compatibility.md): test_output_image_from_numpy_grayscale" in output
    assert code == 0, output


def test_what_fails_is_shown_and_decides(tmp_path):
    code, output = run(
        tmp_path,
        earlier=EARLIER,
        fails=FAILS,
        hides=HIDES,
        empty="",
        broken="from max.interfaces import NobodyHasThis",
    )
    assert row(output, "earlier") == [1, 1, 0, 0, 0]
    assert row(output, "fails") == [1, 0, 0, 0, 1]
    assert row(output, "hides") == [2, 0, 0, 0, 2]
    assert row(output, "empty") == [0, 0, 0, 0, 0]
    assert row(output, "broken") == [1, 0, 0, 0, 1]
    for part in ("failing: test_longer_than_it_is", "no cases in it", "NobodyHasThis", "== 5"):
        assert part in output
    assert code == 1


@pytest.mark.parametrize("text", [FAILS, "", "import nothing_like_it"])
def test_one_bad_file_is_enough(tmp_path, text):
    assert run(tmp_path, earlier=EARLIER, bad=text)[0] == 1


def test_files_must_be_there(tmp_path):
    code, output = command(tmp_path / "missing.py")
    assert (code, "missing.py" in output) == (2, True)
    assert command()[0] == 2


def test_every_difference_is_documented_and_matches_name_and_error():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for difference in DIFFERENCES:
        assert f"| {difference.id} |" in page
    floats = "ValueError: pixels must be uint8, not float32"
    assert explain("test_output_image_from_numpy_rgba", floats) == "V20"
    assert explain("test_output_image_from_numpy_rgba", floats + " or so") is None
    assert explain("test_output_image_from_numpy_rgba", "") is None
    assert explain("test_output_image_from_numpy_rgba_more", floats) is None


def test_the_page_names_the_modules():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for module in MODULES:
        assert module.rpartition(".")[2] in page, module
    assert reference_names()["VLMTextGenerationContext"].__name__ == "TextAndVisionContext"
