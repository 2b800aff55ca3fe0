"""Clusters with CUDA workers serve the embedded models, whose heads have 32 channels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.gpu.models import forced_logits, load
from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served
from baton.cli.demo_steps import Question
from baton.deploy.config import (
    demo_model_folder,
    demo_speech_folder,
    demo_vision_model_folder,
)
from baton.deploy.demo_shapes import Thing
from baton.engine.kernels.load import load_backend
from baton.proto.sampling import SamplingParams, SamplingParamsInput
from baton.tools.demo_model.sights import Sight
from baton.tools.demo_speech.clips import WORDS
from baton.tools.demo_speech.mel import distance, log_mels

DIGITS = Path(__file__).parents[1] / "data" / "codecs" / "digits.npz"
NEAR_TIE = 0.6
"""In standard deviations of the logits: what bfloat16 between all kernels moves those of this model
by, at few positions (14 % of their norm; 1 % at the median)."""
NEW = 24
GREEDY = SamplingParamsInput(temperature=0.0)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def on_cuda(with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in with_cupy.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["auto", "int8"])
def kv_type(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@contextmanager
def served(folder: Path, kv_type: str = "auto") -> Iterator[Served]:
    flags = ("--device=cuda", "--kv-blocks=128", f"--kv-type={kv_type}")
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, folder, flags=flags) as found:
        yield found
        text = found.log.read_text(errors="replace")
    assert "Traceback" not in text, text


@pytest.mark.usefixtures("on_cuda")
def test_the_text_model_answers_as_on_the_cpu() -> None:
    """Nearly every token is the float32 kernels' for the tokens before it, no other is far off."""
    reference = load(demo_model_folder(), load_backend("numpy"), blocks=16)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(16, 1024, count).tolist() for count in (3, 17, 70)]
    greedy = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
    with served(demo_model_folder()) as cluster:
        streams = [cluster.client.generate(prompt, greedy) for prompt in prompts]
        found = [[token for output in stream for token in output.tokens] for stream in streams]
        handoffs = cluster.client.status(handoffs=8)["handoffs"]["last"]
    assert {handoff["transport"] for handoff in handoffs} == {"cuda_ipc"}
    equal = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == NEW
        logits = forced_logits(reference, [*prompt, *tokens], len(prompt) + NEW)[len(prompt) - 1 :]
        gaps = [(row.max() - row[token]) / row.std() for row, token in zip(logits, tokens)]  # noqa: B905
        assert max(gaps) < NEAR_TIE
        equal += gaps.count(0)
    assert equal >= 0.8 * NEW * len(prompts)


@pytest.mark.usefixtures("on_cuda")
def test_the_model_that_sees_names_what_is_there(kv_type: str) -> None:
    sight = Sight((Thing("red", "circle", 24, 56), Thing("blue", "square", 88, 58)))
    expected = {
        "What is in the picture?": "A red circle left of a blue square.",
        "How many objects are there?": "Two.",
    }
    with served(demo_vision_model_folder(), kv_type) as cluster:
        for question, answer in expected.items():
            asked = Question(question, sight.pixels()).ask(cluster.client)
            assert "".join(output.text for output in asked).strip() == answer


@pytest.mark.usefixtures("on_cuda")
def test_the_model_that_speaks_says_its_digits(kv_type: str) -> None:
    """The spectrum is nearest to that of the digit that was asked for."""
    said = {}
    with served(demo_speech_folder(), kv_type) as cluster:
        for word in ("three", "seven"):
            samples = np.concatenate([*cluster.client.speak(word, GREEDY)])
            said[word] = log_mels(samples.astype(np.float32) / 32768)
    with np.load(DIGITS) as spectra:
        for word, mels in said.items():
            found = [distance(mels, spectra[each].astype(np.float32)) for each in WORDS]
            assert WORDS[int(np.argmin(found))] == word
