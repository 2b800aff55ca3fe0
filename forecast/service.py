"""How long modelled workers take for their steps: the service-time model.

The default is a Llama-3.1-70B with FP8 weights on two H100 (80 GB): 140 GFLOP per token, 2.62
MFLOP per pair of a token and one it attends to (80 layers, width 8192), 327,680 bytes of KV a
token (80 layers, 8 heads of 128, two bytes). Of the two GPUs' 1,979 TFLOP/s (bf16, dense) 45 %
are reached in prefill, of their 6.7 TB/s 75 % in decode, shares serving engines publish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from baton.engine.scheduling.step_time import GRAIN, LEAST
from baton.proto.errors import ConfigError, InputError
from baton.runtime.small_files import check_file

from .spread import Spreads

_FLOPS = 0.45 * 1979e12
LAST_CHUNK = 512
"""Tokens whose blocks leave after the prompt is computed, those of the last step."""
_BYTES_PER_S = 0.75 * 6.7e12


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Seconds and tokens of one worker."""

    prefill_s: float = 0.02
    """Launching a prompt's steps and handing over its last layer."""
    chunk_s: float = 0.0
    """The same for each step of a prompt: its chunks are computed one after the other."""
    prefill_token_s: float = 140e9 / _FLOPS
    """1.6e-4: 6,400 tokens/s as long as attention is short."""
    prefill_pair_s: float = 2.62e6 / _FLOPS
    """Per token and token before it; 100,000 tokens take 16 + 15 s."""
    decode_s: float = 0.019
    """A step: 70 GB of weights at 5 TB/s, and 5 ms of launches and all-reduce."""
    decode_sequence_s: float = 140e9 / _FLOPS
    """Arithmetic of one more sequence in a step."""
    decode_token_s: float = 327_680 / _BYTES_PER_S
    """Reading the KV of one token of context in a step."""
    kv_tokens: int = 215_000
    """Tokens of KV in 160 GB less 70 of weights and 20 of activations and slack."""
    max_batch: int = 256
    """Sequences a decode worker runs at once."""
    max_length: int = 0
    """Most tokens of a prompt and its answer; 0: no limit."""
    kv_token_bytes: int = 327_680
    """KV of one token."""
    handoff_rate: float = 50e9
    """Bytes per second of handoffs: a link of 400 Gbit/s."""
    hidden_s: float = 0.014
    """Seconds of a decode step in which prompt tokens cost nothing: reading the weights."""
    hop_s: float = 0.0
    """Seconds of a first token outside of workers: client, router, messages."""
    handoff_s: float = 0.0
    """Seconds of a handoff besides those of its bytes."""
    cores: int = 0
    """Workers of one host that can compute at once; 0: every worker has a host of its own."""
    prefill_beside: float = 0.0
    """Part by which a prompt takes longer for each other worker of the host that computes."""
    decode_beside: float = 0.0
    """The same of a decode step."""
    spreads: Spreads = field(default_factory=Spreads)
    """How times differ from those above, which are their means."""

    def prefill(self, new: int, cached: int, chunk: int = 0) -> float:
        """Seconds to compute ``new`` tokens after ``cached``, in steps of ``chunk`` (0: one)."""
        pairs = new * (cached + new / 2)
        fixed = self.prefill_s + self.chunk_s * (math.ceil(new / chunk) if chunk else 1)
        return fixed + new * self.prefill_token_s + pairs * self.prefill_pair_s

    def chunk(self, step_s: float, most: int) -> int:
        """Return the prompt tokens of a prefill worker's step that may take ``step_s`` seconds.

        ``most``: the step's maximum. 0 stands for no limit, in all three.
        """
        if not step_s:
            return most
        fitting = int((step_s - self.chunk_s) / self.prefill_token_s) // GRAIN * GRAIN
        fitting = max(LEAST, fitting)
        return min(fitting, most) if most else fitting

    def step(self, sequences: int, context: float) -> float:
        """Seconds of one decode step of ``sequences`` with ``context`` tokens altogether."""
        return self.decode_s + sequences * self.decode_sequence_s + context * self.decode_token_s

    def mixed(self, sequences: int, context: float, new: int, pairs: float) -> float:
        """Seconds of a step with ``new`` prompt tokens besides, which attend to ``pairs``."""
        work = new * self.prefill_token_s + pairs * self.prefill_pair_s
        if not sequences:
            return self.chunk_s + work
        return self.step(sequences, context) + max(0.0, work - self.hidden_s)

    def handoff(self, tokens: int, computing_s: float) -> float:
        """Seconds from the first token to the end of a handoff of ``tokens`` tokens.

        ``computing_s``: seconds of the prompt, in which all blocks but those of its end travel.
        """
        token_s = self.kv_token_bytes / self.handoff_rate
        moving = max(min(tokens, LAST_CHUNK) * token_s, tokens * token_s - computing_s)
        return self.handoff_s + moving

    def slowed(self, beside: float, others: int) -> float:
        """Return how many times as long a step takes while ``others`` of its host compute.

        ``beside``: :attr:`prefill_beside` or :attr:`decode_beside`. Workers beyond the cores take
        turns.
        """
        if not self.cores:
            return 1.0
        return (1 + beside * min(others, self.cores - 1)) * max(1.0, (others + 1) / self.cores)

    def scaled(self, factor: float) -> ServiceModel:
        """Everything takes ``factor`` times as long; memory stays."""
        times = {
            name: getattr(self, name) * factor
            for name in self.__dataclass_fields__
            if name.endswith("_s")
        }
        spreads = self.spreads.scaled(factor)
        return replace(self, handoff_rate=self.handoff_rate / factor, spreads=spreads, **times)


MAX_FILE = 1 << 16


def read_service(path: Path) -> ServiceModel:
    """Read a model from a JSON object with some of its fields; the others keep their defaults.

    ``{"step_times": {...}}``, as in the output of ``baton plan --json``, is accepted too. Raises
    ConfigError for an unreadable file, InputError for anything that is not such an object.
    """
    try:
        check_file(path)
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror or problem}") from None
    if len(data) > MAX_FILE:
        raise InputError(f"{path} has more than {MAX_FILE} bytes")
    try:
        found = msgspec.json.decode(data)
        found = found.get("step_times", found) if isinstance(found, dict) else found
        service = msgspec.convert(found, ServiceModel)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as problem:
        raise InputError(f"{path} has no times of steps: {problem}") from None
    unknown = found.keys() - ServiceModel.__dataclass_fields__.keys()
    if unknown:
        raise InputError(f"{path}: unknown field {min(unknown)!r}")
    if name := service.spreads.wrong():
        raise InputError(f"{path}: spreads.{name} has a value that no time can have")
    for name in ServiceModel.__dataclass_fields__.keys() - {"spreads"}:
        value = getattr(service, name)
        low = least(name)
        if not low <= value <= _MOST:
            raise InputError(f"{path}: {name} is {value}, not a number from {low:g} to {_MOST:g}")
    return service


def least(name: str) -> float:
    """Return the least value of a field of :class:`ServiceModel`."""
    return 0.0 if name in _MAY_BE_ZERO else 1e-12


_MOST = 1e15
_MAY_BE_ZERO = {
    "prefill_s", "chunk_s", "prefill_pair_s", "decode_sequence_s", "decode_token_s", "hidden_s",
    "kv_token_bytes", "max_length", "hop_s", "handoff_s", "cores", "prefill_beside",
    "decode_beside",
}  # fmt: skip
