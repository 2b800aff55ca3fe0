"""Write the tiny embedding checkpoints under tests/data/embedders with transformers' results.

Run with a Python that has torch and transformers::

    python tests/oracle/make_embedders.py [FOLDER]

Every folder is in the layout of sentence-transformers, beside ``reference.npz``: the token ids
of some texts (``tokens_0`` ...) and their vectors (``vectors``, one row each), computed in one
padded batch with an attention mask.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

FOLDER = Path(__file__).resolve().parents[1] / "data" / "embedders"
LENGTHS = (1, 2, 7, 16, 33, 64, 100)
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN3 = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights that make every part of the model matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "embed" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    return model.eval()


def make_bert(seed: int, **changes: object) -> torch.nn.Module:
    """A BertModel."""
    return randomise(transformers.BertModel(transformers.BertConfig(**{**BERT, **changes})), seed)


def make_qwen3(seed: int, **changes: object) -> torch.nn.Module:
    """The body of a Qwen3."""
    config = transformers.Qwen3Config(**{**QWEN3, **changes})
    return randomise(transformers.Qwen3Model(config), seed)


@torch.no_grad()
def vectors_of(
    model: torch.nn.Module, texts: list[np.ndarray], pooling: str, *, normalize: bool
) -> np.ndarray:
    """Vectors ``[n, dim]`` of token ids, by transformers, in one batch padded on the right."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
        mask[row, : len(text)] = 1
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    if pooling == "mean":
        kept = mask.unsqueeze(-1).float()
        vectors = (states * kept).sum(1) / kept.sum(1)
    else:
        at = mask.sum(1) - 1 if pooling == "last" else torch.zeros(len(texts), dtype=torch.long)
        vectors = states[torch.arange(len(texts)), at]
    if normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    return vectors.numpy()


def texts_of(seed: int, vocab: int, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    """Random token ids, no special ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, vocab, length).astype(np.int32) for length in lengths]


def write_layout(folder: Path, pooling: str, *, normalize: bool, max_length: int = 0) -> None:
    """The files that define how vectors are made."""
    base = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{base}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{base}.Pooling"},
    ]
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{base}.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules, indent=1))
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    modes = {key: name == pooling for name, key in POOLING_KEYS.items()}
    modes |= {"pooling_mode_max_tokens": False, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes, indent=1))
    if max_length:
        said = {"max_seq_length": max_length, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(said))


def word_pieces(size: int) -> tokenizers.Tokenizer:
    """WordPiece over letters, digits and a few words; ``[CLS] text [SEP]``."""
    words = ["the", "cat", "sat", "on", "mat", "##ing", "##ed"]
    letters = string.ascii_lowercase
    entries = [*SPECIAL, *letters, *(f"##{c}" for c in letters), *words, *string.digits, ".", ","]
    vocab = {entry: index for index, entry in enumerate(entries[:size])}
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    core.decoder = tokenizers.decoders.WordPiece()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    core.add_special_tokens(list(SPECIAL))
    core.enable_truncation(16)  # as real ones come; who serves the model takes it off
    core.enable_padding(length=16)
    return core


def save(
    model: torch.nn.Module,
    folder: Path,
    pooling: str,
    *,
    normalize: bool,
    max_length: int = 0,
    architecture: str = "",
) -> None:
    """A folder as sentence-transformers has it."""
    model.save_pretrained(folder)
    write_layout(folder, pooling, normalize=normalize, max_length=max_length)
    word_pieces(model.config.vocab_size).save(str(folder / "tokenizer.json"))
    if architecture:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "architectures": [architecture]}, indent=1))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    bert, qwen3 = make_bert(1), make_qwen3(2)
    save(bert, folder / "bert", "mean", normalize=True, max_length=100)
    save(qwen3, folder / "qwen3", "last", normalize=True, architecture="Qwen3ForCausalLM")
    for name, model, pooling in (("bert", bert, "mean"), ("qwen3", qwen3, "last")):
        texts = texts_of(7, model.config.vocab_size)
        arrays = {f"tokens_{i}": tokens for i, tokens in enumerate(texts)}
        arrays["vectors"] = vectors_of(model, texts, pooling, normalize=True)
        np.savez_compressed(folder / name / "reference.npz", **arrays)
        size = sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file())
        print(f"{name}: {size / 1024:.0f} KiB, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
