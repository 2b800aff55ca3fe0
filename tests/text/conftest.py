"""The demo model's byte-level tokenizer, and small tokenizers in the style of SentencePiece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from baton.text.tokenizer import Tokenizer

DEMO_FOLDER = Path(__file__).parents[2] / "deploy" / "demo_model"
SENTENCES = [
    "the baton is passed from the prefill worker to the decode worker",
    "a fox and an owl walked to the river on a sunny day",
    "keys and values of all tokens are kept in blocks",
]


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(DEMO_FOLDER)


def sentencepiece_core(decoder: decoders.Decoder) -> Core:
    """BPE over ``▁``-marked words with byte fallback: 3 specials, 256 bytes, words."""
    trained = Core(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    core = Core(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoder
    core.add_special_tokens(specials)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", names.index("<s>"))]
    )
    return core


SENTENCEPIECE_DECODERS = {
    "fallback": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


@pytest.fixture(scope="session", params=sorted(SENTENCEPIECE_DECODERS))
def sentencepiece(request: pytest.FixtureRequest) -> Tokenizer:
    core = sentencepiece_core(SENTENCEPIECE_DECODERS[request.param])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    config["chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    return Tokenizer.from_files(
        {
            "tokenizer.json": core.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        },
        trusted=True,
    )
