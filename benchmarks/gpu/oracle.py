"""Logits beside transformers, both given the same tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoints import Shape
from .lines import Line, checked, measured, skipped
from .models import DEEP, SHALLOW, forced_logits, on_device, write
from .stage import Stage

F64 = npt.NDArray[np.float64]
BAR = 1e-2
FARTHER = 1.25


def oracle(stage: Stage) -> Iterator[Line]:
    """Two layers against transformers in bf16; sixteen against its float32, as its bf16 is.

    With random weights the rounding of the residual stream alone takes two bf16 models of more
    than two layers farther apart than 1e-2. So the test compares their distances to float32.
    """
    lacking = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if lacking:
        yield skipped("logits beside transformers", f"{' and '.join(lacking)} not installed")
        return
    prefilled = stage.size(256, 16)
    ours, theirs, _ = _logits(stage, SHALLOW, prefilled)
    for name, rows in (("prefill", slice(0, prefilled)), ("decode", slice(prefilled, None))):
        error = _error(ours[rows], theirs[rows])
        what = f"2 layers, {name}, beside transformers in bf16"
        yield measured(what, f"{error:.2e}", f"{BAR:.0e}", error <= BAR, relative=error)
    ours, theirs, exact = _logits(stage, DEEP, prefilled)
    mine, own = _error(ours, exact), _error(theirs, exact)
    result = (
        f"{mine:.2e}, transformers in bf16 {own:.2e}, from each other {_error(ours, theirs):.2e}"
    )
    what = "16 layers, beside transformers in float32"
    yield checked(what, mine <= FARTHER * own, result, f"{FARTHER} of its bf16", ours=mine, its=own)


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
