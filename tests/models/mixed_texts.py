"""2,000 mixed texts, and what llama.cpp makes of them: ``mixed_texts.py FILE.gguf``.

The command needs ``llama-cpp-python``. It adds the file's entry to tests/data/llama_tokens.json:
for each text the first four bytes of the SHA-256 of its token ids.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

RECORD = Path(__file__).resolve().parents[1] / "data" / "llama_tokens.json"
COUNT = 2000
PARTS = json.loads(RECORD.with_name("mixed_texts.json").read_text(encoding="utf-8"))


def mixed_texts() -> list[str]:
    """Return the texts: prose, code, many scripts, random characters, numbers; the same each time.

    They are in normal form C, because llama.cpp does not normalize and published tokenizers do.
    """
    draw = random.Random(5)
    texts: list[str] = []
    while len(texts) < COUNT:
        kind = draw.random()
        if kind < 0.2:
            text = _prose(draw)
        elif kind < 0.35:
            text = _code(draw)
        elif kind < 0.75:
            parts = (
                draw.choice(PARTS["samples"])[: draw.randint(1, 40)]
                for _ in range(draw.randint(1, 5))
            )
            text = draw.choice(("", " ", "\n", "  ")).join(parts)
        elif kind < 0.9:
            text = "".join(_character(draw) for _ in range(draw.randint(1, 60)))
        else:
            text = " ".join(str(draw.randrange(10 ** draw.randint(1, 9))) for _ in range(8))
        texts.append(unicodedata.normalize("NFC", text))
    return texts


def _prose(draw: random.Random) -> str:
    words = [draw.choice(PARTS["words"]) for _ in range(draw.randint(1, 50))]
    marks = (draw.choice((" ", " ", " ", " ", ", ", ". ", "; ", " (", ") ", "\n\n")) for _ in words)
    return "".join(word + mark for word, mark in zip(words, marks, strict=True))


def _code(draw: random.Random) -> str:
    names = (*PARTS["names"], "a", "data")
    lines = []
    for _ in range(draw.randint(1, 8)):
        filled = [*(draw.choice(names) for _ in range(4)), str(draw.randrange(10**6))]
        lines.append(draw.choice(PARTS["lines"]).format(*filled))
    return "".join(lines)


def _character(draw: random.Random) -> str:
    blocks = ((32, 127), (0xA0, 0x250), (0x400, 0x500), (0x4E00, 0x5000), (0x1F300, 0x1F650))
    return draw.choice((chr(draw.randrange(*draw.choice(blocks))), " ", "\n"))


def digests(tokens: Iterable[Sequence[int]]) -> list[str]:
    """Return eight hexadecimal digits for each list of token ids."""
    return [hashlib.sha256(json.dumps(list(one)).encode()).hexdigest()[:8] for one in tokens]


def main(file: Path) -> None:
    """Record what llama.cpp makes of the texts with the tokenizer of ``file``."""
    from llama_cpp import Llama

    model = Llama(str(file), vocab_only=True, verbose=False)
    made = [model.tokenize(t.encode(), add_bos=True, special=True) for t in mixed_texts()]
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known[file.name] = "".join(digests(made))
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
