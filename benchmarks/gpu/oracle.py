"""Logits beside transformers, both given the same tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoints import Shape
from .lines import Line, checked, skipped
from .models import DEEP, SHALLOW, forced_logits, on_device, write
from .stage import Stage

F64 = npt.NDArray[np.float64]
FARTHER = 1.25


def oracle(stage: Stage) -> Iterator[Line]:
    """Two and sixteen layers against transformers in float32, as its bf16 is.

    With random weights the rounding of the residual stream alone takes two bf16 models 1.3e-2 apart
    after two layers. So the test compares their distances to float32.
    """
    lacking = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if lacking:
        yield skipped("logits beside transformers", f"{' and '.join(lacking)} not installed")
        return
    prefilled = stage.size(256, 16)
    for shape, layers in ((SHALLOW, 2), (DEEP, 16)):
        found = _logits(stage, shape, prefilled)
        for name, rows in (("prefill", slice(0, prefilled)), ("decode", slice(prefilled, None))):
            ours, theirs, exact = (logits[rows] for logits in found)
            yield _beside(f"{layers} layers, {name}, beside transformers", ours, theirs, exact)


def _beside(what: str, ours: F64, theirs: F64, exact: F64) -> Line:
    mine, own = _error(ours, exact), _error(theirs, exact)
    apart = _error(ours, theirs)
    result = f"{mine:.2e} from its float32, its bf16 {own:.2e}, {apart:.2e} from each other"
    bar = f"{FARTHER} of its bf16"
    return checked(what, mine <= FARTHER * own, result, bar, ours=mine, its=own, apart=apart)


def _logits(stage: Stage, shape: Shape, prefilled: int) -> tuple[F64, F64, F64]:
    """Ours, transformers' in bf16 and in float32 for the same tokens ``[T, vocab]``."""
    folder = write(stage, shape)
    runner = on_device(stage, folder, blocks=stage.size(64, 16))
    count = prefilled + stage.size(64, 8)
    tokens = np.random.default_rng(2).integers(0, runner.card.vocab_size, count).tolist()
    ours = forced_logits(runner, tokens, prefilled).astype(np.float64)
    where = "cpu" if stage.cupy is None else "cuda"
    theirs, exact = (_theirs(folder, tokens, dtype, where) for dtype in ("bfloat16", "float32"))
    return ours, theirs, exact


def _theirs(folder: Path, tokens: Sequence[int], dtype: str, where: str) -> F64:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    kind: Any = getattr(torch, dtype)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(where)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)], device=where)).logits[0]
    found: F64 = logits.float().cpu().numpy().astype(np.float64)
    return found


def _error(found: F64, expected: F64) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
