"""The shipped demo model: it loads, answers well, ends its answers, and is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.tools.demo_model.corpus import ANIMALS

FOLDER = Path(__file__).parents[2] / "deploy" / "demo_model"
ANSWERS = {
    "Hello!": "Hello! It is nice to meet you. How can I help you?",
    "What is 7 plus 8?": "7 plus 8 is 15.",
    "Who are you?": "I am the demo model of Baton, a very small language model.",
    "What is a prefill worker?": "A prefill worker reads the whole prompt at once "
    "and fills the KV cache.",
}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine(load_runner(RunnerConfig(model=str(FOLDER), num_blocks=256)))


def ask(engine: LLMEngine, questions: list[str]) -> list[str]:
    """Return greedy answers as text with special tokens."""
    tokenizer = Tokenizer.from_folder(FOLDER)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions]
    params = SamplingParams(temperature=0, max_new_tokens=120)
    texts = []
    for context, prompt in zip(engine.generate(prompts, params), prompts, strict=True):
        tokens = context.tokens.all[len(prompt) :].tolist()
        texts.append(tokenizer.decode(tokens, skip_special_tokens=False))
    return texts


def test_fixed_answers(engine):
    assert ask(engine, list(ANSWERS)) == [f"{text}<|im_end|>" for text in ANSWERS.values()]


def test_stories_end_and_nearly_all_are_about_what_was_asked(engine):
    """15 of 16 stories are about the right animal."""
    texts = ask(engine, [f"Tell me a story about a {animal}." for animal in ANIMALS])
    named = [f" {animal} " in text for animal, text in zip(ANIMALS, texts, strict=True)]
    assert sum(named) >= 14
    for text in texts:
        assert text.endswith(".<|im_end|>")
        assert text.count(". ") + text.count('." ') >= 3


def test_questions_outside_its_world_are_answered_too(engine):
    (text,) = ask(engine, ["How does a compiler work?"])
    assert text.startswith("I am a very small model.")


def test_the_files_are_small_and_agree():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes["model.safetensors"] < 4 << 20
    assert sum(sizes.values()) < 5 << 20
    config = json.loads((FOLDER / "config.json").read_text())
    tokenizer = Tokenizer.from_folder(FOLDER)
    assert config["vocab_size"] == tokenizer.vocab_size
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["eos_token_id"] == tokenizer.eos_token_id
