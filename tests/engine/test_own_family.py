"""Model folders that a user's own class reads: equal bits, and errors that name the class."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.loader import load_embedder, load_runner
from baton.engine.loading.own_family import own_family, use_family
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.tasks import folder_task
from baton.engine.loading.warm_up import warm_up
from baton.engine.models.decoder import Decoder
from baton.engine.scheduling.step_time import StepTime
from baton.extend import ExtensionError
from baton.proto.errors import CheckpointError, ConfigError, InternalError

from .folder_mutations import logits_of
from .granite_folders import equal_llama, granite_folder

ROOT = Path(__file__).parents[2]
EXAMPLES = str(ROOT / "examples" / "extend")
GRANITE = {"family": "granite_family:Granite", "extensions": EXAMPLES}


@pytest.fixture(autouse=True)
def none_afterwards(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    use_family("", "")


def load(folder, **settings):
    return load_runner(RunnerConfig(model=str(folder), num_blocks=64, **settings))


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_the_example_computes_a_granite(tmp_path, backend):
    llama = load(equal_llama(tmp_path / "llama"), backend=backend)
    folder = granite_folder(tmp_path / "granite")
    granite = load(folder, backend=backend, **GRANITE)
    assert np.array_equal(logits_of(granite), logits_of(llama))
    assert granite.card.architecture == "LlamaForCausalLM"
    without = load(granite_folder(tmp_path / "other", residual_multiplier=1.0), **GRANITE)
    assert not np.array_equal(logits_of(without), logits_of(llama))
    assert granite.card.mismatch(without.card)[0] == "numerics"


def test_without_the_class_the_folder_is_refused(tmp_path):
    folder = granite_folder(tmp_path / "granite")
    load(folder, **GRANITE)
    assert own_family() is not None
    with pytest.raises(CheckpointError, match="unsupported architecture GraniteForCausalLM"):
        load(folder)
    assert own_family() is None


SOURCE = """
class {name}:
    def config(self, raw):
        {config}
    def decoder(self, raw, base):
        {decoder}
"""
LLAMA = "return {**raw, 'architectures': ['LlamaForCausalLM'], 'model_type': 'llama'}"
CASES = {
    "Raises": ("raise KeyError('no such key')", "", "config() raised KeyError: 'no such key'"),
    "Exits": ("raise SystemExit(3)", "", "config() raised SystemExit"),
    "Nothing": ("return None", "return base", "config() returned no dict: None"),
    "Objects": ("return {'a': object()}", "return base", "config() returned no JSON"),
    "Other": (
        "return {'architectures': ['Gpt2']}", "",
        "--model-family own_family_other:Other: config() returned unsupported architecture Gpt2",
    ),
    "WrongSize": (f"raw['hidden_size'] = -1; {LLAMA}", "return base", "hidden_size must be"),
    "Class": (LLAMA, "return dict", "decoder() returned neither Decoder nor a subclass"),
    "Late": (LLAMA, "raise OSError('gone')", "decoder() raised OSError: gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_class_that_fails_is_named(name, tmp_path):
    config, decoder, said = CASES[name]
    module = f"own_family_{name.lower()}"
    source = SOURCE.format(name=name, config=config, decoder=decoder or "return base")
    (tmp_path / f"{module}.py").write_text(source)
    folder = granite_folder(tmp_path / "granite")
    with pytest.raises(CheckpointError) as caught:
        load(folder, family=f"{module}:{name}", extensions=str(tmp_path))
    assert said in str(caught.value)


def test_an_embedding_architecture_is_refused_by_name(tmp_path):
    source = SOURCE.format(
        name="Body", decoder="return base", config=LLAMA.replace("ForCausalLM", "Model")
    )
    (tmp_path / "own_family_body.py").write_text(source)
    use_family("own_family_body:Body", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        folder_task(granite_folder(tmp_path / "granite"))
    assert str(caught.value) == (
        "--model-family own_family_body:Body: config() returned LlamaModel, an embedding model; "
        "return one that generates text, such as LlamaForCausalLM"
    )


def test_an_exception_in_a_method_of_the_model_names_class_file_and_line(tmp_path):
    decoder = """
        class Own(base):
            def _embed(self, tokens, residual):
                raise ValueError("my bug")
        return Own"""
    source = SOURCE.format(name="Bug", config=LLAMA, decoder=decoder)
    file = tmp_path / "own_family_bug.py"
    file.write_text(source)
    runner = load(
        granite_folder(tmp_path / "granite"), family="own_family_bug:Bug", extensions=str(tmp_path)
    )
    line = source.splitlines().index('                raise ValueError("my bug")') + 1
    with pytest.raises(InternalError) as caught:
        warm_up(runner.pipeline, StepTime())
    assert str(caught.value) == (
        "the first step failed: forward pass: ValueError: my bug "
        f"(--model-family own_family_bug:Bug: own_family_bug.py, line {line})"
    )


@pytest.mark.parametrize("keys", [{"model_type": "my_llama"}, {"architectures": ["MyLlama"]}])
def test_an_architecture_that_is_not_there_ends_with_the_way_out(keys, tmp_path):
    folder = equal_llama(tmp_path / "llama")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    with pytest.raises(CheckpointError, match=r"--model-family \(docs/extend\.md\)$"):
        load(folder)


def test_the_class_and_the_model_of_the_page(tmp_path):
    page = (ROOT / "docs" / "extend.md").read_text()
    (source,) = re.findall(r"```python\n(class MyLlama:.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"^(cp -r BATON.*\nsed .*)$", page, re.MULTILINE)
    (tmp_path / "my_family.py").write_text(source)
    subprocess.run(commands.replace("BATON", str(ROOT)), shell=True, check=True, cwd=tmp_path)
    model = tmp_path / "my_model"
    with pytest.raises(CheckpointError, match="unsupported architecture MyLlamaForCausalLM"):
        load(model)
    own = load(model, family="my_family:MyLlama", extensions=str(tmp_path))
    assert np.array_equal(logits_of(own), logits_of(load(ROOT / "deploy" / "demo_model")))


def test_a_class_cannot_change_the_configuration_that_others_read(tmp_path):
    use_family("granite_family:Granite", EXAMPLES)
    own, raw = own_family(), {"architectures": ["GraniteForCausalLM"], "eos_token_id": [1]}
    own.config(raw)["eos_token_id"].append(2)
    assert raw == {"architectures": ["GraniteForCausalLM"], "eos_token_id": [1]}
    assert issubclass(own.decoder(raw, Decoder), Decoder)


def test_it_serves_text_alone(tmp_path):
    folder = granite_folder(tmp_path / "granite")
    config = RunnerConfig(model=str(folder), task="embed", **GRANITE)
    with pytest.raises(ConfigError, match="a model family of your own generates text"):
        load_embedder(config)
    (folder / "model_index.json").write_text("{}")
    with pytest.raises(
        ConfigError, match="picture model, which --model-family granite_family:Granite cannot"
    ):
        folder_task(folder)


def test_a_class_that_is_not_there_is_an_extension_error():
    with pytest.raises(ExtensionError, match=r"granite_family\.py has no Gone"):
        use_family("granite_family:Gone", EXAMPLES)
