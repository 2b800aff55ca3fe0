"""How long the modelled workers take: every constant of the replay's hardware.

The worker is a Llama-3.1-70B with FP8 weights on two H100 (80 GB): 140 GFLOP per token, 2.62
MFLOP per pair of a token and one it attends to (80 layers, width 8192), 327,680 bytes of KV a
token (80 layers, 8 heads of 128, two bytes). Of the two GPUs' 1,979 TFLOP/s (bf16, dense) 45 %
are reached in prefill, of their 6.7 TB/s 75 % in decode, shares serving engines publish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_FLOPS = 0.45 * 1979e12
_BYTES_PER_S = 0.75 * 6.7e12


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Seconds and tokens of one worker."""

    prefill_s: float = 0.02
    """Launching a prompt's steps and handing over its last layer."""
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
    kv_move_s: float = 2e-6
    """Per token of the prompt: the part of the transfer that computing does not hide."""

    def prefill(self, new: int, cached: int) -> float:
        """Seconds to compute ``new`` tokens after ``cached`` tokens."""
        pairs = new * (cached + new / 2)
        return self.prefill_s + new * self.prefill_token_s + pairs * self.prefill_pair_s

    def step(self, sequences: int, context: float) -> float:
        """Seconds of one decode step of ``sequences`` with ``context`` tokens altogether."""
        return self.decode_s + sequences * self.decode_sequence_s + context * self.decode_token_s

    def scaled(self, factor: float) -> ServiceModel:
        """Everything takes ``factor`` times as long; memory stays."""
        times = {
            name: getattr(self, name) * factor
            for name in self.__dataclass_fields__
            if name.endswith("_s")
        }
        return replace(self, **times)
