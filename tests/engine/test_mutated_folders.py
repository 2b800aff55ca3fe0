"""Mutated model folders: what transformers computed for them, or a refusal that names the key.

A sample of the mutations that make test-oracle compares with transformers
(tests/oracle/test_mutated_folders.py, which also records it).
"""

import json

import numpy as np
import pytest

from baton.proto.errors import BatonError

from . import folder_mutations as folders

SAMPLE = json.loads((folders.DATA / "mutated_folders.json").read_text())


@pytest.mark.parametrize("entry", SAMPLE, ids=lambda entry: json.dumps(entry["mutation"])[:90])
def test_recorded_folder(entry, tmp_path):
    mutation = entry["mutation"]
    family = mutation["family"]
    folder = folders.copy_of(family, tmp_path / "model")
    folders.mutate(folder, mutation)
    if "refused" in entry:
        with pytest.raises(BatonError) as caught:
            folders.answer_of(folder, family)
        assert any(name in str(caught.value) for name in folders.names_of(mutation))
        return
    answer = folders.answer_of(folder, family)
    assert answer.argmax(1).tolist() == entry["best"]
    np.testing.assert_allclose(answer[-1, :8], entry["some"], atol=1e-4, rtol=0)
