"""Model folders with one setting dropped, changed or contradicted, and what Baton makes of them.

A mutation is JSON: ``family``, and one of ``set`` (file, path, value), ``drop`` (file, path) or
``tensor`` (name, action). Several ``set`` and ``drop`` may be given as lists.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.loader import load_embedder, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.safetensors import SafetensorsFile
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.ids import RequestID
from baton.proto.sampling import SamplingParams

from . import mllama_cases, vision_cases

DATA = Path(__file__).resolve().parents[1] / "data"
TEXT = ("llama", "llama_plain", "mistral", "qwen2", "qwen3", "gemma3")
SEEING = ("qwen2_5_vl", "qwen3_vl", "mllama")
EMBEDDING = ("bert", "qwen3_embedder")
FOLDERS = {
    **{name: DATA / "checkpoints" / name for name in TEXT},
    **{name: DATA / "vision" / name for name in SEEING},
    "bert": DATA / "embedders" / "bert",
    "qwen3_embedder": DATA / "embedders" / "qwen3",
}
PROMPT = np.random.default_rng(5).integers(4, 250, 60).astype(np.int32)
CHUNKS = (1, 29, 30)
NEW_TOKENS = 6
EMPTY = np.empty(0, np.int32)

Mutation = dict[str, Any]


def copy_of(family: str, target: Path) -> Path:
    """Copy a committed folder without its reference."""
    shutil.copytree(FOLDERS[family], target, ignore=shutil.ignore_patterns("reference.npz"))
    return target


def mutate(folder: Path, mutation: Mutation) -> None:
    """Change a folder in place."""
    for file, path, value in mutation.get("set", ()):
        _edit(folder / file, path, value)
    for file, path in mutation.get("drop", ()):
        _edit(folder / file, path)
    for name, action in mutation.get("tensor", ()):
        _edit_tensors(folder / "model.safetensors", name, action)


def names_of(mutation: Mutation) -> set[str]:
    """Names of which a refusal must contain one."""
    names = {path[-1] for _, path, _ in mutation.get("set", ())}
    names |= {path[-1] for _, path in mutation.get("drop", ())}
    for _, _, value in mutation.get("set", ()):
        names |= set(value) if isinstance(value, dict) else set()
        names |= (
            {v for v in value.values() if isinstance(v, str)} if isinstance(value, dict) else set()
        )
    for name, action in mutation.get("tensor", ()):
        name = name.rpartition("model.")[2]  # releases of a family name its parts differently
        names.add("tensor '" if action.startswith(("prefix", "rename")) else name)
    return names


_NOTHING = object()


def _edit(path: Path, keys: list[str], value: Any = _NOTHING) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    at = document
    for key in keys[:-1]:
        at = at.setdefault(key, {})
    if value is _NOTHING:
        at.pop(keys[-1], None)
    else:
        at[keys[-1]] = value
    path.write_text(json.dumps(document))


def _edit_tensors(path: Path, name: str, action: str) -> None:
    file = SafetensorsFile(path)
    tensors = {one: np.array(file.tensor(one)) for one in file.entries}
    rng = np.random.default_rng(1)
    kind, _, detail = action.partition(" ")
    match kind:
        case "drop":
            del tensors[name]
        case "copy":
            tensors[name] = tensors[detail].copy()
        case "random":
            shape = [int(size) for size in detail.split("x")]
            tensors[name] = rng.standard_normal(shape).astype(np.float32)
        case "rename":
            tensors[detail] = tensors.pop(name)
        case "prefix":
            tensors = {detail + one.removeprefix(name): a for one, a in tensors.items()}
        case "cut":
            tensors[name] = tensors[name][:-1]
        case "half":
            tensors[name] = tensors[name].astype(np.float16)
        case "double":
            tensors[name] = tensors[name].astype(np.float64)
        case _:
            raise ValueError(action)
    write_tensors(path, tensors)


_DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64"}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in tensors.items():
        offsets = [at, at + array.nbytes]
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.unlink(missing_ok=True)  # other files may still map it
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def answer_of(folder: Path, family: str) -> np.ndarray:
    """Logits ``[n, vocab]`` or embeddings that Baton computes for a folder.

    For text: after each chunk of the prompt and each greedy token. Otherwise: of all rows of a
    prompt with images, or of some texts. Raises a BatonError if the folder is refused.
    """
    if family in EMBEDDING:
        return _embeddings(folder, family)
    if family in SEEING:
        return _logits_with_images(folder, family)
    return logits_of(load_runner(RunnerConfig(model=str(folder), backend="numpy", num_blocks=16)))


def logits_of(runner) -> np.ndarray:
    """Logits of a loaded model after each chunk of the prompt and each greedy token."""
    rows, start = [], 0
    for size in CHUNKS:
        rows.append(_feed(runner, PROMPT[start : start + size], start))
        start += size
    for _ in range(NEW_TOKENS - 1):
        rows.append(_feed(runner, [int(rows[-1].argmax())], start))
        start += 1
    return np.stack(rows)


def _feed(runner, tokens, start: int) -> np.ndarray:
    end = start + len(tokens)
    spec = SampleSpec(SamplingParams(temperature=0), end, EMPTY, end)
    table = np.arange(-(-end // runner.card.layout.block_size), dtype=np.int32)
    chunk = Chunk(b"x", start, np.asarray(tokens, np.int32), table, spec)
    model, kept = runner.pipeline.model, []
    execute = model.execute

    def keep(inputs):
        outputs = execute(inputs)
        kept.append(outputs.next_token_logits[0].copy())
        return outputs

    model.execute = keep
    try:
        result = runner.pipeline.execute(StepPlan(0, (chunk,)))
    finally:
        model.execute = execute
    assert not result.failed
    return kept[0]


def _logits_with_images(folder: Path, family: str) -> np.ndarray:
    if family == "mllama":
        case = mllama_cases.cases()[0]
        return mllama_cases.prompt_logits(mllama_cases.load("numpy", folder), case)
    config = RunnerConfig(model=str(folder), backend="numpy", num_blocks=64, block_size=4)
    case = vision_cases.cases(family)[0]
    return vision_cases.prompt_logits(load_runner(config), case)


def texts_of(family: str) -> list[np.ndarray]:
    """The texts that are embedded."""
    arrays = np.load(FOLDERS[family] / "reference.npz")
    return [arrays[f"tokens_{index}"] for index in range(4)]


def _embeddings(folder: Path, family: str) -> np.ndarray:
    pipeline = load_embedder(RunnerConfig(model=str(folder), backend="numpy")).pipeline
    batch = {
        RequestID(str(i)): TextContext(max_length=256, tokens=TokenBuffer(text.astype(np.int64)))
        for i, text in enumerate(texts_of(family))
    }
    return np.stack([out.embeddings for out in pipeline.encode(batch).values()])


def end_tokens_of(folder: Path) -> tuple[int, ...]:
    """The ids that end a text."""
    return tuple(sorted(load_checkpoint(folder).generation.eos_token_ids))


def recorded(mutation: Mutation, answer: np.ndarray | None) -> dict[str, Any]:
    """Return what is kept of transformers' answer; None: the folder is refused."""
    if answer is None:
        return {"mutation": mutation, "refused": True}
    return {
        "mutation": mutation,
        "best": answer.argmax(1).tolist(),
        "some": [round(float(value), 6) for value in answer[-1, :8]],
    }
