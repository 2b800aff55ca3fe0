"""Write the Llama: ``python -m baton.tools.demo_speech.voice --out DIR``, after :mod:`.codec`.

Needs numpy, torch, safetensors and tokenizers. The Llama speaks one to twelve digits, written as
words or numerals; it skips other words and punctuation. Its weights are computed, not trained, as
compiled transformers are (Lindner et al., 2023, "Tracr"). :class:`Compiler` describes them. Writes
the files of a speech model beside the codec in ``DIR``.
"""
# mypy: disable-error-code="unused-ignore"
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from baton.engine.audio.chunks import AudioLayout

from ..demo_model.networks import write_json
from .clips import CODEC_CONFIG, F32, WORDS

SPECIALS = ("<|endoftext|>", "<|text|>", "<|speech|>", "<|end|>", "<|unknown|>")
END_OF_TEXT, TEXT, SPEECH, END, UNKNOWN = range(len(SPECIALS))
FIRST_WORD, FIRST_NUMERAL = len(SPECIALS), len(SPECIALS) + len(WORDS)
FIRST_TOKEN = 32
LAYOUT = AudioLayout(FIRST_TOKEN, CODEC_CONFIG["codebook_size"], tuple(CODEC_CONFIG["vq_strides"]))
WIDTH, HEAD, ROPE_THETA = 176, 32, 1e8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": LAYOUT.end_token,
    "hidden_size": WIDTH,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": HEAD,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": ROPE_THETA,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": TEXT,
    "eos_token_id": END,
    "pad_token_id": END_OF_TEXT,
    "torch_dtype": "bfloat16",
}
LONGEST = 12
"""Maximum digits of a text."""

Clips = list[list[int]]


# ----------------------------------------------------------------------------------- texts


def digit_tokens(path: Path) -> Clips:
    """Return the audio tokens of each digit from the codec's ``entries.npz``."""
    clips = []
    with np.load(path) as arrays:
        for word in WORDS:
            books = [arrays[f"{word}_{i}"] for i in range(len(LAYOUT.strides))]
            frames = np.zeros((len(books[0]), LAYOUT.frame_tokens), np.int64)
            for book, ids in enumerate(books):
                frames[:, np.array(LAYOUT.slots) == book] = ids.reshape(len(frames), -1)
            frames += FIRST_TOKEN + np.arange(LAYOUT.frame_tokens) * LAYOUT.codebook_size
            clips.append(frames.ravel().tolist())
    return clips


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer that has one token per word or numeral of the ten digits."""
    names = [f"<|audio_{i}|>" for i in range(LAYOUT.end_token - FIRST_TOKEN)]
    spare = [f"<|spare_{i}|>" for i in range(FIRST_TOKEN - FIRST_NUMERAL - len(WORDS))]
    numerals = [str(i) for i in range(len(WORDS))]
    vocabulary = [*SPECIALS, *WORDS, *numerals, *spare, *names]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(vocabulary)}, unk_token=SPECIALS[UNKNOWN]
        )
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Whitespace()]
    )
    tokenizer.add_special_tokens(list(SPECIALS[:UNKNOWN]))
    return tokenizer


# --------------------------------------------------------------------------------- weights


class Dims:
    """The parts of the residual stream, as slices of its dimensions.

    ``big`` and ``one`` are constants of every token. The rest is 0 or 1, or a code of length 1.
    """

    def __init__(self) -> None:
        self._next = 0
        self.big = self._part(1)
        self.one = self._part(1)
        self.slot = self._part(LAYOUT.frame_tokens)  # of an audio token
        self.coarse = self._part(1)  # this token is a coarse one
        self.ends_here = self._part(1)  # ... of the last frame of a digit, or <|speech|>
        self.is_word = self._part(1)  # this token is a digit, or <|speech|>
        self.is_first = self._part(1)  # this token is <|text|>
        self.word = self._part(len(WORDS) + 1)  # the digit; the last one is <|speech|>
        self.frame_here = self._part(HEAD - 1)  # code of this coarse token's frame
        # Written by layer 0:
        self.frame = self._part(HEAD - 1)  # code of the present frame
        self.ends = self._part(1)  # the present frame is a digit's last
        self.words_share = self._part(1)  # 1 / (1 + words so far)
        self.spoken_share = self._part(1)  # 1 / (1 + digits begun)
        self.words = self._part(LONGEST + 1)  # words so far
        self.spoken = self._part(LONGEST + 1)  # digits begun
        # Written by layer 1:
        self.next_word = self._part(len(WORDS) + 1)
        self.out = self._part(WIDTH - self._next)  # code of the next token

    def _part(self, size: int) -> slice:
        part = slice(self._next, self._next + size)
        self._next += size
        return part


BIG = 64.0
"""A constant dimension that dominates the norm, so that RMSNorm hardly changes the others."""
LAST_PAIR = HEAD // 2 - 1
"""The pair of a head's dimensions that RoPE turns least: by 3e-8 per token."""


def codes(count: int, size: int, seed: int) -> F32:
    """Return ``count`` vectors of length 1 that are far from parallel, ``[count, size]``."""
    vectors = np.random.default_rng(seed).normal(size=(count, size))
    for _ in range(60):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        products = vectors @ vectors.T - np.eye(count)
        vectors -= 0.5 * np.sign(products) * np.abs(products) ** 5 @ vectors
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found: F32 = vectors.astype(np.float32)
    return found


class Compiler:
    """Computes the weights.

    Coarse tokens are all different, so one names its digit and frame. Layer 0 finds for each token
    the coarse token of its frame, and the numbers of words so far and of digits begun: the share of
    ``<|text|>`` in a uniform attention over it and them. Its MLP makes one-hot numbers of these. A
    unit of an MLP recognises a frame and a slot, and writes the code of the next token. After the
    last frame of a digit, layer 1 reads the next word, and a unit writes the code of its first
    token. The word after the last is ``<|speech|>``, which gives ``<|end|>``.
    """

    def __init__(self, clips: Clips) -> None:
        size = LAYOUT.frame_tokens
        self.at = Dims()
        self._frames = [clip[i : i + size] for clip in clips for i in range(0, len(clip), size)]
        lasts = np.cumsum([len(clip) // size for clip in clips]) - 1
        self._last = {self._frames[i][0] for i in lasts}
        if len({frame[0] for frame in self._frames}) != len(self._frames):
            raise ValueError("two frames have the same coarse token")
        self._firsts = [clip[0] for clip in clips] + [END]
        self._frame_codes = codes(len(self._frames), HEAD - 1, 1)
        self._out_codes = codes(CONFIG["vocab_size"], self.at.out.stop - self.at.out.start, 2)
        self._units: list[list[tuple[F32, F32, F32]]] = [[], []]

    def tensors(self) -> dict[str, F32]:
        """Return the checkpoint's tensors."""
        self._count_units(self.at.words_share, self.at.words)
        self._count_units(self.at.spoken_share, self.at.spoken)
        self._frame_units()
        self._word_units()
        found = {
            "model.embed_tokens.weight": self._embedding(),
            "lm_head.weight": self._row(self.at.out, 60.0 * self._out_codes),
            "model.norm.weight": self._norm(),
        }
        for layer, attention in enumerate((self._attention_0(), self._attention_1())):
            prefix = f"model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}.{name}.weight"] = self._norm()
            for name, matrix in zip("qkvo", attention, strict=True):
                found[f"{prefix}.self_attn.{name}_proj.weight"] = matrix
            for name, matrix in self._mlp(layer).items():
                found[f"{prefix}.mlp.{name}_proj.weight"] = matrix
        return found

    @staticmethod
    def _norm() -> F32:
        return np.full(WIDTH, BIG / WIDTH**0.5, np.float32)

    @staticmethod
    def _row(part: slice, values: Any) -> F32:
        """Return rows that are zero outside ``part``."""
        rows = np.zeros((*np.shape(values)[:-1], WIDTH), np.float32)
        rows[..., part] = values
        return rows

    def _constant(self, value: float) -> F32:
        """Return a row that gives a constant, split in two so that bfloat16 holds it well."""
        row = np.zeros(WIDTH, np.float32)
        coarse = float(torch.tensor(value / BIG).bfloat16())
        row[self.at.big], row[self.at.one] = coarse, value - coarse * BIG
        return row

    def _embedding(self) -> F32:
        at, size = self.at, LAYOUT.codebook_size
        table = np.zeros((CONFIG["vocab_size"], WIDTH), np.float32)
        table[:, at.big], table[:, at.one] = BIG, 1
        table[TEXT, at.is_first] = 1
        for first in (FIRST_WORD, FIRST_NUMERAL):
            for digit in range(len(WORDS)):
                table[first + digit, at.word.start + digit] = 1
                table[first + digit, at.is_word] = 1
        table[SPEECH, at.word.stop - 1] = table[SPEECH, at.slot.stop - 1] = 1
        for flag in (at.is_word, at.ends_here, at.ends):
            table[SPEECH, flag] = 1
        for token in range(FIRST_TOKEN, LAYOUT.end_token):
            table[token, at.slot.start + (token - FIRST_TOKEN) // size] = 1
        for frame, code in zip(self._frames, self._frame_codes, strict=True):
            table[frame[0], at.frame_here] = code
            table[frame[0], at.coarse] = 1
            table[frame[0], at.ends_here] = frame[0] in self._last
        return table

    def _attention_0(self) -> tuple[F32, F32, F32, F32]:
        """Heads: the latest coarse token, the share of words, the share of digits begun, none.

        With a query of ``(0, a)`` and a key of ``(1, 0)`` in a pair that RoPE turns by ``w`` per
        token, the score falls with the distance: ``-a sin(w distance)``.
        """
        at, half = self.at, HEAD // 2
        q, k, v, o = self._empty()
        unit = HEAD**0.5 / BIG
        for pair, strength in ((5, 1500.0), (6, 3000.0)):  # 0.003 and 0.001 per token
            q[half + pair, at.big] = strength * unit
            k[pair, at.coarse] = 1
        q[LAST_PAIR, at.big] = 80 * unit
        k[LAST_PAIR, at.coarse] = 1
        for i in range(HEAD - 1):
            v[i, at.frame_here.start + i] = o[at.frame.start + i, i] = 1
        v[HEAD - 1, at.ends_here] = 1
        o[at.ends, HEAD - 1] = 1
        for head, flag, share in (
            (1, at.is_word, at.words_share),
            (2, at.ends_here, at.spoken_share),
        ):
            row = head * HEAD
            q[row + LAST_PAIR, at.big] = 60 * unit
            k[row + LAST_PAIR, flag] = k[row + LAST_PAIR, at.is_first] = 1
            v[row, at.is_first] = 1
            o[share, row] = 1
        return q, k, v, o

    def _attention_1(self) -> tuple[F32, F32, F32, F32]:
        """One head: the word whose number is that of the digits begun."""
        at = self.at
        q, k, v, o = self._empty()
        unit = HEAD**0.5
        rows = [*range(9, HEAD // 2), *range(HEAD // 2 + 9, HEAD)]  # hardly turned
        for i, row in zip(range(LONGEST + 1), rows, strict=False):
            q[row, at.spoken.start + i] = 60 * unit
            k[row, at.words.start + i] = 1
        q[rows[-1], at.big] = 60 * unit / BIG
        k[rows[-1], at.is_word] = 1
        for i in range(len(WORDS) + 1):
            v[i, at.word.start + i] = o[at.next_word.start + i, i] = 1
        return q, k, v, o

    @staticmethod
    def _empty() -> tuple[F32, F32, F32, F32]:
        heads = CONFIG["num_attention_heads"] * HEAD
        q, k, v = (np.zeros((heads, WIDTH), np.float32) for _ in range(3))
        return q, k, v, np.zeros((WIDTH, heads), np.float32)

    def _count_units(self, share: slice, number: slice) -> None:
        """Make one-hot ``number`` 1.. of ``share = 1 / (1 + number)``, from steps between them."""
        steep, high = 8192.0, 24.0
        for i in range(LONGEST + 1):
            border = (1 / (1 + i + 1) + 1 / (1 + i + 2)) / 2  # above: at most i + 1 words
            down = np.zeros(WIDTH, np.float32)
            down[number.start + i] = 1 / high
            if i < LONGEST:
                down[number.start + i + 1] = -1 / high
            for side in (1, -1):
                gate = self._row(share, [steep])
                gate += self._constant(side * high / 2 - steep * border)
                self._units[0].append((gate, self._constant(1.0), side * down))
        # No number stands for 0 words: subtract it from the first.
        for side in (1, -1):
            gate = self._row(share, [steep])
            gate += self._constant(side * high / 2 - steep * 0.75)
            down = np.zeros(WIDTH, np.float32)
            down[number.start] = -side / high
            self._units[0].append((gate, self._constant(1.0), down))

    def _frame_units(self) -> None:
        """Recognise a frame and a slot; write the next token. The units fill both layers evenly."""
        at, sharp = self.at, 60.0
        room = CONFIG["intermediate_size"] - len(self._units[0])
        after = dict(pairwise(frame[0] for frame in self._frames))
        for frame, code in zip(self._frames, self._frame_codes, strict=True):
            follow = [*frame[1:], None if frame[0] in self._last else after[frame[0]]]
            for slot, token in enumerate(follow):
                if token is None:
                    continue
                gate = self._row(at.frame, sharp * code) + self._constant(-1.7 * sharp)
                gate[at.slot.start + slot] = sharp
                self._add_word_unit(
                    0 if len(self._units[0]) < room else 1, gate, 0.3 * sharp, token
                )

    def _word_units(self) -> None:
        """After a digit's last token, write the first token of the next word."""
        at, sharp = self.at, 60.0
        for word, token in enumerate(self._firsts):
            gate = self._constant(-2.5 * sharp)
            for dim in (at.next_word.start + word, at.ends.start, at.slot.stop - 1):
                gate[dim] = sharp
            self._add_word_unit(1, gate, 0.5 * sharp, token)

    def _add_word_unit(self, layer: int, gate: F32, opened: float, token: int) -> None:
        down = self._row(self.at.out, self._out_codes[token] / opened)
        self._units[layer].append((gate, self._constant(1.0), down))

    def _mlp(self, layer: int) -> dict[str, F32]:
        units, size = self._units[layer], CONFIG["intermediate_size"]
        if len(units) > size:
            raise ValueError(f"layer {layer} needs {len(units)} units")
        gates, ups, downs = (np.zeros((size, WIDTH), np.float32) for _ in range(3))
        for i, (gate, up, down) in enumerate(units):
            gates[i], ups[i], downs[i] = gate, up, down
        return {"gate": gates, "up": ups, "down": np.ascontiguousarray(downs.T)}


# ---------------------------------------------------------------------------------- saving


def save(out: Path, tensors: dict[str, F32]) -> None:
    """Write the weights, the tokenizer and the settings."""
    rounded = {name: torch.from_numpy(value).bfloat16() for name, value in tensors.items()}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    make_tokenizer().save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "config.json", CONFIG)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": TEXT,
            "eos_token_id": END,
            "pad_token_id": END_OF_TEXT,
            "do_sample": False,
        },
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[TEXT],
            "eos_token": SPECIALS[END],
            "pad_token": SPECIALS[END_OF_TEXT],
            "unk_token": SPECIALS[UNKNOWN],
            "add_bos_token": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    write_json(
        out / "speech.json",
        {
            "codec": "snac",
            "first_token": FIRST_TOKEN,
            "prompt": "{text}",
            "start_tokens": [TEXT],
            "end_tokens": [SPEECH],
            "stop_tokens": [END],
        },
    )


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(description="write the Llama of the demo speech model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save(args.out, Compiler(digit_tokens(args.out / "entries.npz")).tensors())


if __name__ == "__main__":
    main()
