"""Mutated model folders give transformers' logits or a refusal that names the key.

With ``RECORD=1`` in the environment a sample is written into tests/data/mutated_folders.json, which
runs without torch (tests/engine/test_mutated_folders.py).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.family_defaults import FAMILY_DEFAULTS, TRANSFORMERS
from baton.engine.loading.safetensors import SafetensorsFile
from baton.proto.errors import BatonError

from ..engine import folder_mutations as folders
from ..engine import mllama_cases, vision_cases
from .makers import load_maker
from .mutations import mutations_of

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; run make test-oracle"
)
from transformers.utils import logging as transformers_logging  # noqa: E402

transformers_logging.set_verbosity(50)
transformers_logging.disable_progress_bar()
TOLERANCE = 1e-4
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "mutated_folders.json"
SAMPLED = 12
"""Mutations of a family in the sample."""


class TheyRefuse(Exception):
    """transformers raises for the folder, or makes up weights that it lacks."""


AUTO = {
    **dict.fromkeys(folders.TEXT, "AutoModelForCausalLM"),
    **dict.fromkeys(folders.SEEING, "AutoModelForImageTextToText"),
    **dict.fromkeys(folders.EMBEDDING, "AutoModel"),
}


def load_theirs(folder, family):
    auto = getattr(transformers, AUTO[family])
    try:
        model, report = auto.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        raise TheyRefuse(f"{type(error).__name__}: {error}") from None
    missing = [name for name in report["missing_keys"] if "pooler" not in name]
    if missing or report["mismatched_keys"]:
        raise TheyRefuse(f"lacks {missing or report['mismatched_keys']}")
    return model.eval()


@torch.no_grad()
def their_answer(model, family):
    try:
        if family in folders.EMBEDDING:
            maker = load_maker("make_embedders")
            pooling = "mean" if family == "bert" else "last"
            return maker.vectors_of(model, folders.texts_of(family), pooling, normalize=True)
        if family in folders.SEEING:
            return logits_with_images(model, family)
        return greedy_logits(model)
    except Exception as error:
        raise TheyRefuse(f"{type(error).__name__}: {error}") from None


def greedy_logits(model):
    maker = load_maker("make_checkpoints")
    ends = np.cumsum(folders.CHUNKS)
    rows, tokens = [], folders.PROMPT
    for _ in range(folders.NEW_TOKENS - 1):
        logits = maker.logits_of(model, tokens)
        tokens = np.append(tokens, logits[-1].argmax()).astype(np.int32)
    logits = maker.logits_of(model, tokens)
    rows = [*(ends - 1), *range(len(folders.PROMPT), len(tokens))]
    return logits[rows]


def logits_with_images(model, family):
    if family == "mllama":
        maker = load_maker("make_mllama")
        case = mllama_cases.cases()[0]
        made = {"prompt": case.prompt, "pixels": case.pixels}
        settings = maker.SETTINGS
    else:
        maker = load_maker("make_vision")
        case = vision_cases.cases(family)[0]
        made = {"prompt": case.prompt, "pixels": case.pixels, "grids": case.grids}
        settings = maker.MODELS[family]
        model.model.rope_deltas = None
    inputs = maker.inputs_of(settings, made, case.prompt)
    return model(**inputs, use_cache=False).logits[0].float().numpy()


def their_end_tokens(model):
    """The ids that end a text. Without ids in generation_config.json transformers never ends one;
    Baton and others take those of config.json.
    """
    found = model.generation_config.eos_token_id
    if found in (None, []):
        text = model.config.get_text_config()
        found = getattr(text, "eos_token_id", None)
        if found in (None, []) or (isinstance(found, int) and found >= text.vocab_size):
            return ()
    return tuple(sorted({found} if isinstance(found, int) else set(found)))


def judge(folder, family, mutation, base):
    """Return the outcome, what is wrong with it (an empty text if nothing is), and the answer."""
    try:
        ours = folders.answer_of(folder, family)
    except BatonError as error:
        named = any(name in str(error) for name in folders.names_of(mutation))
        return "refused", "" if named else f"the refusal names no key: {error}", None
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}", None
    try:
        model = load_theirs(folder, family)
        theirs = their_answer(model, family)
    except TheyRefuse as reason:
        same = ours.shape == base.shape and np.abs(ours - base).max() <= TOLERANCE
        problem = "" if same else f"transformers refuses, Baton serves: {reason}"
        return "unchanged", problem, base
    if ours.shape != theirs.shape:
        return "equal", f"shapes {ours.shape} and {theirs.shape}", theirs
    gap = float(np.abs(ours - theirs).max())
    if not gap <= TOLERANCE or (ours.argmax(1) != theirs.argmax(1)).any():
        return "equal", f"logits differ by {gap}", theirs
    if family not in folders.EMBEDDING:
        ends = their_end_tokens(model)
        if folders.end_tokens_of(folder) != ends:
            found = folders.end_tokens_of(folder)
            return "equal", f"end tokens {found}, transformers {ends}", theirs
    return "equal", "", theirs


def all_mutations(family):
    folder = folders.FOLDERS[family]
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: entry.shape
        for name, entry in SafetensorsFile(folder / "model.safetensors").entries.items()
    }
    return mutations_of(family, config, tensors)


def run_family(family, tmp_path):
    """Judge all mutations of a family. Returns counts, and lines about third things."""
    base = folders.answer_of(folders.FOLDERS[family], family)
    counts, wrong, judged = Counter(), [], []
    for number, mutation in enumerate(all_mutations(family)):
        folder = folders.copy_of(family, tmp_path / str(number))
        folders.mutate(folder, mutation)
        outcome, problem, answer = judge(folder, family, mutation, base)
        counts[outcome] += 1
        judged.append(folders.recorded(mutation, answer))
        if problem:
            wrong.append(f"{json.dumps(mutation)}: {problem}")
    return counts, wrong, judged


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", folders.FOLDERS)
def test_no_third_thing(family, tmp_path):
    counts, wrong, judged = run_family(family, tmp_path)
    print(family, sum(counts.values()), dict(counts))
    assert not wrong, "\n".join([f"{len(wrong)} of {sum(counts.values())}", *wrong])
    if os.environ.get("RECORD") == "1":
        record(family, judged)
    assert counts["equal"] >= 10


def record(family, judged):
    """Replace the family's part of the sample."""
    sample = json.loads(SAMPLE.read_text()) if SAMPLE.exists() else []
    others = [entry for entry in sample if entry["mutation"]["family"] != family]
    chosen = [judged[int(at)] for at in np.linspace(0, len(judged) - 1, SAMPLED)]
    lines = sorted(json.dumps(entry) for entry in [*others, *chosen])
    SAMPLE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def test_the_table_of_defaults_is_that_of_the_installed_transformers():
    maker = load_maker("make_defaults")
    assert maker.table() == FAMILY_DEFAULTS, (TRANSFORMERS, transformers.__version__)
