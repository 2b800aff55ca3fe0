"""Text with one image of 448 x 448 pixels beside transformers, one thread each.

A random Qwen2.5-VL: a tower of 8 layers and 640 channels, a decoder of 8 layers and 512 channels.
``tower``: pixels to features. ``prompt``: the tower and a prompt of the image and 10 tokens of
text, to the first token. CPU seconds, best of several rounds taken in turn. Then a prompt whose
image is in the cache of encoded images, and the tower's time beside the look-up's.

``python -m baton.benchmarks.vision [--peer-python PATH]``; PATH has torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.models.vision_decoder import VisionDecoder
from baton.engine.pipeline.model import lay_out
from baton.engine.scheduling.plan import Chunk, StepPlan
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.sampling import SamplingParams
from baton.runtime.process.os_settings import limit_blas_threads

from .scratch import scratch_folder

IMAGE = 4000
SIDE, PATCH = 448, 14
TEXT_BEFORE, TEXT_AFTER = 5, 5
ROUNDS = 5

TEXT: dict[str, object] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "hidden_act": "silu",
    "eos_token_id": 2,
}
VISION: dict[str, object] = {
    "depth": 8,
    "hidden_size": 640,
    "intermediate_size": 1712,
    "num_heads": 8,
    "patch_size": PATCH,
    "window_size": 112,
    "fullatt_block_indexes": [3, 7],
    "out_hidden_size": 512,
}
CONFIG: dict[str, object] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vision_config": VISION,
    **TEXT,
}


def tensors() -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (4096, 512),
        "model.norm.weight": (512,),
        "lm_head.weight": (4096, 512),
        "visual.patch_embed.proj.weight": (640, 3, 2, PATCH, PATCH),
        "visual.merger.ln_q.weight": (640,),
    }

    def add(module: str, out: int, inner: int, *, bias: bool) -> None:
        shapes[f"{module}.weight"] = (out, inner)
        if bias:
            shapes[f"{module}.bias"] = (out,)

    add("visual.merger.mlp.0", 2560, 2560, bias=True)
    add("visual.merger.mlp.2", 512, 2560, bias=True)
    for layer in range(8):
        text, tower = f"model.layers.{layer}", f"visual.blocks.{layer}"
        shapes[f"{text}.input_layernorm.weight"] = (512,)
        shapes[f"{text}.post_attention_layernorm.weight"] = (512,)
        shapes[f"{tower}.norm1.weight"] = shapes[f"{tower}.norm2.weight"] = (640,)
        for part, out in (("q", 512), ("k", 128), ("v", 128)):
            add(f"{text}.self_attn.{part}_proj", out, 512, bias=True)
        add(f"{text}.self_attn.o_proj", 512, 512, bias=False)
        add(f"{tower}.attn.qkv", 1920, 640, bias=True)
        add(f"{tower}.attn.proj", 640, 640, bias=True)
        for base, wide, hidden in ((text, 1408, 512), (tower, 1712, 640)):
            bias = base == tower
            add(f"{base}.mlp.gate_proj", wide, hidden, bias=bias)
            add(f"{base}.mlp.up_proj", wide, hidden, bias=bias)
            add(f"{base}.mlp.down_proj", hidden, wide, bias=bias)
    return shapes


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a model with random weights."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    shapes, at = tensors(), 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = np.ones(shape, np.float32)
            if len(shape) > 1:
                scale = np.float32(math.prod(shape[1:]) ** -0.5)
                values = rng.standard_normal(shape, np.float32) * scale
            file.write(values.tobytes())
    return folder


class Engine:
    """The model on this package's kernels, with the prompt as one chunk."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.runner: Runner = load_runner(
            RunnerConfig(model=str(folder), backend=backend, num_blocks=64)
        )
        model = self.runner.pipeline.model
        if not isinstance(model, VisionDecoder):
            raise TypeError("the checkpoint has no tower")
        self.model = model
        rows = SIDE // PATCH
        tokens = rows * rows // 4
        rng = np.random.default_rng(1)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        before, after = rng.integers(4, 3000, TEXT_BEFORE), rng.integers(4, 3000, TEXT_AFTER)
        context = TextAndVisionContext(
            max_length=TEXT_BEFORE + tokens + TEXT_AFTER + 1,
            tokens=TokenBuffer(np.concatenate([before, np.full(tokens, IMAGE), after])),
            sampling_params=SamplingParams(temperature=0),
            vision_token_ids=[IMAGE],
            images=[
                ImageMetadata(
                    start_idx=TEXT_BEFORE, end_idx=TEXT_BEFORE + tokens, pixel_values=pixels
                )
            ],
            extra_model_args={"image_grid_thw": np.array([[1, rows, rows]], np.int32)},
        )
        sequence = Sequence(b"r", context, block_size=16)
        sequence.allocation = self.runner.pipeline.kv.new_cache().reserve([], len(context.tokens))
        self.chunk: Chunk = sequence.chunk(len(context.tokens))

    def features(self) -> float:
        """CPU seconds to get the image's features, from the cache if they are there."""
        inputs = lay_out([self.chunk], self.runner.pool)
        return cpu_seconds(lambda: self.model._features(inputs))

    def tower(self) -> float:
        """CPU seconds from pixels to features."""
        self.model.encoded.clear()
        return self.features()

    def cached_prompt(self) -> float:
        """CPU seconds to the first token, with the features in the cache."""
        return cpu_seconds(lambda: self.runner.pipeline.execute(StepPlan(0, (self.chunk,))))

    def prompt(self) -> float:
        """CPU seconds to the first token, with the tower."""
        self.model.encoded.clear()
        return self.cached_prompt()


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


class Peer:
    """transformers in another process."""

    def __init__(self, python: str, folder: Path) -> None:
        script = Path(__file__).with_name("vision_peer.py")
        numbers = [str(n) for n in (SIDE, PATCH, IMAGE, TEXT_BEFORE, TEXT_AFTER)]
        # -P: the folder of the script has a module that torch would take for a package.
        command = [python, "-P", "-W", "ignore", str(script), str(folder), *numbers]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, what: str) -> float:
        """CPU seconds of ``tower`` or ``prompt``."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with code {self._process.wait()}")
        return float(line)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def measure(engines: dict[str, Engine], peer: Peer | None) -> None:
    """Print one row per measurement."""
    names = [*engines, *(["transformers"] if peer else [])]
    print(f"{'CPU ms':>14}" + "".join(f"{name:>14}" for name in names))
    for what in ("tower", "prompt", "cached prompt"):
        work: dict[str, Callable[[], float]] = {}
        for name, engine in engines.items():
            calls = {"tower": engine.tower, "prompt": engine.prompt}
            work[name] = calls.get(what, engine.cached_prompt)
        if peer and what != "cached prompt":
            work["transformers"] = lambda what=what: peer.seconds(what)  # type: ignore[misc]
        best = dict.fromkeys(work, float("inf"))
        for _ in range(ROUNDS):
            for name, call in work.items():
                best[name] = min(best[name], call())
        row = "".join(f"{seconds * 1e3:>14.1f}" for seconds in best.values())
        ratio = best.get("transformers", 0.0) / best["auto"]
        print(f"{what:>14}{row}" + (f"   transformers / ours {ratio:.2f}" if ratio else ""))
    engine = engines["auto"]
    miss = min(engine.tower() for _ in range(ROUNDS))
    hit = min(engine.features() for _ in range(ROUNDS))
    print(f"features: tower {miss * 1e3:.1f} ms, cache {hit * 1e6:.0f} us, {miss / hit:.0f} x")


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    options = parser.parse_args()
    limit_blas_threads()
    with scratch_folder() as scratch:
        folder = write_model(scratch / "vision")
        engines = {"auto": Engine(folder, "auto")}
        peer = Peer(options.peer_python, folder) if options.peer_python else None
        try:
            measure(engines, peer)
        finally:
            if peer:
                peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
