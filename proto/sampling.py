"""How a request's tokens are drawn: the parameters, their checks and their defaults.

Invariant: a ``SamplingParams`` that was constructed holds values the sampler can use; what
is changed afterwards is checked again when the request reaches the router.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from .errors import InputError
from .limits import MAX_STOP_CHARS, MAX_STOP_SEQUENCES, MAX_STOP_TOKEN_IDS, MAX_TOP_K
from .wire import WireSampling

LogitsProcessor = Callable[[npt.NDArray[np.float32]], None]
"""Changes the logits of one row in place; cannot travel between processes."""

MAX_SEED = (1 << 64) - 1


def _random_seed() -> int:
    return secrets.randbits(32)


@dataclass
class SamplingParams:
    """Sampling parameters of one request.

    ``top_k``: most likely tokens kept, -1 all (0 reads as -1). ``top_p``: nucleus mass.
    ``min_p``: least probability relative to the best token; combines with any ``top_k``.
    ``temperature``: 0 is greedy and sets ``top_k`` to 1. Penalties: neutral at 0, 0 and 1.
    ``max_new_tokens``: None up to the context's end. ``min_new_tokens``: no EOS before.
    ``ignore_eos``: the model's EOS ids do not stop; ``stop`` and ``stop_token_ids`` still do.
    ``seed``: key of the random stream; random by default. Raises InputError for impossible
    values.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    seed: int = field(default_factory=_random_seed)
    logits_processors: Sequence[LogitsProcessor] | None = None

    def __post_init__(self) -> None:
        if self.top_k is None:
            self.top_k = -1
        if self.top_p is None:
            self.top_p = 1.0
        self._check_filters()
        self._check_scales()
        self._check_lengths()
        self._check_stops()
        if self.temperature == 0:
            self.top_k = 1

    @property
    def needs_penalties(self) -> bool:
        """Whether any penalty changes the logits."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )

    def to_wire(self) -> WireSampling:
        """Wire form; InputError if there are logits processors, which cannot travel."""
        if self.logits_processors:
            raise InputError("logits_processors are code and cannot be sent to a cluster")
        return WireSampling(*_wire_values(self))

    @classmethod
    def from_wire(cls, wire: WireSampling) -> SamplingParams:
        """Checked parameters of a wire form."""
        return cls(*_wire_values(wire))

    @classmethod
    def from_input_and_generation_config(
        cls,
        input_params: SamplingParamsInput,
        sampling_params_defaults: SamplingParamsGenerationConfigDefaults,
    ) -> SamplingParams:
        """Merge: the user's value, else the model's generation config, else the default."""
        values: dict[str, object] = {**sampling_params_defaults.values_to_update}
        if values.pop("do_sample", None) is False:
            values.update(temperature=0, top_k=1)
        for item in fields(input_params):
            given = getattr(input_params, item.name)
            if given is not None:
                values[item.name] = list(given) if isinstance(given, list) else given
        return cls(**values)  # type: ignore[arg-type]

    def _check_filters(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p must be in [0, 1], not {self.min_p}")
        if not 0 < self.repetition_penalty < inf:
            raise InputError(
                f"repetition_penalty must be greater than 0, not {self.repetition_penalty}"
            )
        if self.top_k == 0:
            self.top_k = -1
        if not -1 <= self.top_k <= MAX_TOP_K:
            raise InputError(f"top_k must be -1 (all) or 1 to {MAX_TOP_K}, not {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise InputError(f"top_p must be in [0, 1], not {self.top_p}")

    def _check_scales(self) -> None:
        if not 0 <= self.temperature < inf:
            raise InputError(f"temperature must be 0 or more, not {self.temperature}")
        if not isfinite(self.frequency_penalty):
            raise InputError(f"frequency_penalty must be finite, not {self.frequency_penalty}")
        if not isfinite(self.presence_penalty):
            raise InputError(f"presence_penalty must be finite, not {self.presence_penalty}")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed must be 0 to 2**64 - 1, not {self.seed}")

    def _check_lengths(self) -> None:
        limit = self.max_new_tokens
        if limit is not None and limit < 1:
            raise InputError(f"max_new_tokens must be positive, not {limit}")
        if self.min_new_tokens < 0:
            raise InputError(f"min_new_tokens must be 0 or more, not {self.min_new_tokens}")
        if limit is not None and self.min_new_tokens > limit:
            raise InputError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {limit}"
            )

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop is not None:
            if len(self.stop) > MAX_STOP_SEQUENCES:
                raise InputError(
                    f"{len(self.stop)} stop strings, at most {MAX_STOP_SEQUENCES} are allowed"
                )
            for text in self.stop:
                if not 0 < len(text) <= MAX_STOP_CHARS:
                    raise InputError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InputError(
                f"{len(self.stop_token_ids)} stop token ids, at most {MAX_STOP_TOKEN_IDS} allowed"
            )


_wire_values = attrgetter(*WireSampling.__struct_fields__)
"""The values that travel; both classes have them first and in this order."""


@dataclass(slots=True)
class SamplingParamsInput:
    """What the user asked for; None leaves a value to the model or the default."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool | None = None
    seed: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None


@dataclass(frozen=True, slots=True)
class SamplingParamsGenerationConfigDefaults:
    """What a model's generation config says; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None

    @property
    def values_to_update(self) -> dict[str, float | int | bool]:
        """The values that are set, in a new dict."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
