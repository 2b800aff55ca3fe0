"""Sampling parameters of a request: their types and ranges, their defaults, and merging.

Invariant: a constructed ``SamplingParams`` holds values of the declared types that the sampler
can use. Values assigned later are checked when a client sends the request.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import structs

from .errors import InputError
from .limits import (
    MAX_COUNT,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
)
from .value_checks import Check, flag, many, real, shown, text, unknown_name, whole
from .wire.bounds import INT32
from .wire.wire_context import NEUTRAL, OFF, WireSampling

LogitsProcessor = Callable[[npt.NDArray[np.float32]], None]
"""Changes the logits of one row in place; cannot be sent to another process."""

MAX_SEED = (1 << 64) - 1
MAX_BIAS = 100
"""Largest absolute value of a ``logit_bias``."""
_SMALLEST_FLOAT32 = 1.1754943508222875e-38
_INF = float("inf")


# A seed need not be secret, and the system's randomness takes ten times as long. This generator is
# not the module's, which a program may seed. A forked process must not draw the same seeds.
_seeds = random.Random()  # noqa: S311
os.register_at_fork(after_in_child=_seeds.seed)


def _random_seed() -> int:
    return _seeds.getrandbits(32)


_OF_THE_CALL = {
    "n": "give n=... to the call",
    "logprobs": "give log_probabilities=... to the call",
    "prompt_logprobs": "give prompt_log_probabilities=... to the call",
    "guided_decoding": "give json_schema=... or grammar=... to the call",
    "structured_outputs": "give json_schema=... or grammar=... to the call",
}
"""vLLM's parameters that are options of a call here."""


class _Named:
    """Base of the parameter classes: refuses unknown arguments, and records the given arguments.

    ``_given``: names of the arguments that were given and are not None. A call with every field,
    as of ``dataclasses.replace``, records nothing; then the values that differ from the class's
    defaults count as given.
    """

    __slots__ = ()
    # No fields: neither sent nor compared.
    _given: tuple[str, ...] | None = None
    _complete_for: object = None

    def __new__(cls, *args: object, **given: object) -> Self:
        if not args and not given:
            return super().__new__(cls)
        known: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        if args:
            most = sum(not one.kw_only for one in known.values())
            if len(args) > most:
                raise InputError(f"{cls.__name__} takes at most {most} values")
            twice = given.keys() & dict(zip(known, args, strict=False)).keys()
            if twice:
                raise InputError(f"{min(twice)} is given to {cls.__name__} twice")
        for name in given:
            if name in known:
                continue
            if name in _OF_THE_CALL:
                raise InputError(f"{cls.__name__} has no {name!r}: {_OF_THE_CALL[name]}")
            raise unknown_name(cls.__name__, name, known)
        return super().__new__(cls)


def _check_top_k(name: str, value: Any) -> int:
    try:
        top_k: int = _whole_top_k(name, value)
    except InputError as error:
        if isinstance(value, float) and not value.is_integer():
            hint = f"; top_k is the first field: write temperature={value:g} to set that"
            raise InputError(f"{error}{hint}") from None
        raise
    return top_k or -1


def _check_stop(name: str, value: Any) -> list[str]:
    stops: list[str] = _stop_list(name, [value] if isinstance(value, str) else value)
    return stops


def _check_processors(name: str, value: Any) -> Sequence[LogitsProcessor]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(f"{name} must be a list of functions, not {shown(value)}")
    for at, one in enumerate(value):
        if not callable(one):
            raise InputError(f"{name}[{at}] must be a function, not {shown(one)}")
    return value


def _check_bias(name: str, value: Any) -> dict[int, float]:
    """Return the biases by ascending id, as numbers of Python."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must map token ids to numbers, not {shown(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise InputError(f"{name} has {len(value)} entries, at most {MAX_LOGIT_BIASES} are allowed")
    found = {
        _token_id(f"{name} key", token): _bias(f"{name}[{token!r}]", bias)
        for token, bias in value.items()
    }
    return dict(sorted(found.items()))


_token_id = whole(0, INT32 - 1, f"a token id, 0 to {INT32 - 1}")
_bias = real(-MAX_BIAS, MAX_BIAS, f"a number, -{MAX_BIAS} to {MAX_BIAS}")
_whole_top_k = whole(-1, MAX_TOP_K, f"a whole number, -1 (all) or 1 to {MAX_TOP_K}")
_stop_list = many(text(1, MAX_STOP_CHARS), MAX_STOP_SEQUENCES, "stop strings")
_share = real(0.0, 1.0, "a number in [0, 1]")
_finite = real(-_INF, _INF, "a finite number")
_CHECKS: dict[str, Check] = {
    "top_k": _check_top_k,
    "top_p": _share,
    "min_p": _share,
    "temperature": real(0.0, _INF, "a finite number, 0 (greedy) or more"),
    "frequency_penalty": _finite,
    "presence_penalty": _finite,
    "repetition_penalty": real(_SMALLEST_FLOAT32, _INF, "a finite number greater than 0"),
    "max_new_tokens": whole(1, MAX_COUNT, f"a whole number, 1 to {MAX_COUNT}"),
    "min_new_tokens": whole(0, MAX_COUNT, f"a whole number, 0 to {MAX_COUNT}"),
    "ignore_eos": flag,
    "stop": _check_stop,
    "stop_token_ids": many(_token_id, MAX_STOP_TOKEN_IDS, "token ids"),
    "detokenize": flag,
    "seed": whole(0, MAX_SEED, "a whole number, 0 to 2**64 - 1"),
    "logits_processors": _check_processors,
    "logit_bias": _check_bias,
}
"""Checks by field, in the order of the fields; a test compares them with the classes below."""


ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""Names of vLLM's parameters that are arguments beside the fields."""


def _native_names(given: dict[str, object]) -> dict[str, object]:
    """Return the arguments by the names of the fields. Raises InputError for both names of one."""
    for alias in ALIASES.keys() & given.keys():
        name = ALIASES[alias]
        if given[alias] is not None and given.get(name) is not None:
            raise InputError(f"{alias} and {name} are two names of one parameter: give one of them")
        given = {**given, name: given[alias] if given.get(name) is None else given[name]}
        del given[alias]
    return given


@dataclass
class SamplingParams(_Named):
    """Sampling parameters of one request.

    ``top_k``: keep this many of the most likely tokens; -1 or 0: all. ``top_p``: nucleus mass.
    ``min_p``: minimum probability relative to the most likely token; combines with any ``top_k``.
    ``temperature``: 0 is greedy and sets ``top_k`` to 1. Penalties: neutral at 0, 0 and 1.
    ``max_new_tokens``: None: up to the context's end. ``min_new_tokens``: no EOS before.
    ``ignore_eos``: the model's EOS ids do not stop; ``stop`` and ``stop_token_ids`` still do.
    ``seed``: key of the random stream; random by default. ``logit_bias``: by token id, the number
    added to its logit, -100 to 100. ``max_tokens`` and ``min_tokens`` are vLLM's names of
    ``max_new_tokens`` and ``min_new_tokens``; they are arguments, not fields.

    A field that is not given, or given as None, is unset. A client fills unset fields from the
    model's ``generation_config.json`` (:meth:`merged`), else from the class's defaults. Raises
    InputError, which names the field, for a wrong type or an impossible value.
    """

    top_k: int = -1
    top_p: float = NEUTRAL
    min_p: float = OFF
    temperature: float = NEUTRAL
    frequency_penalty: float = OFF
    presence_penalty: float = OFF
    repetition_penalty: float = NEUTRAL
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    seed: int = field(default_factory=_random_seed)
    logits_processors: Sequence[LogitsProcessor] | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: InitVar[int | None] = field(default=None, kw_only=True)
    min_tokens: InitVar[int | None] = field(default=None, kw_only=True)

    def __new__(cls, *args: object, **given: object) -> Self:
        """Note which fields are given; see :class:`_Named`."""
        self = super().__new__(cls, *args, **given)
        given = _native_names(given)
        if len(args) + len(given) < len(_CHECKS):
            if args:
                given = {**dict(zip(_CHECKS, args, strict=False)), **given}
            self._given = tuple(name for name in given if name in _CHECKS)
        return self

    def __post_init__(self, max_tokens: int | None, min_tokens: int | None) -> None:
        if max_tokens is not None:
            self.max_new_tokens = max_tokens
        if min_tokens is not None:
            self.min_new_tokens = min_tokens
        stated = self._given
        if stated is None:
            self.check()
            return
        if not stated:
            return
        self._given = tuple(name for name in stated if getattr(self, name) is not None)
        self._check(stated)  # the class's defaults need no check

    def check(self) -> None:
        """Check every field, as after an assignment; raises InputError for the first wrong field.

        None becomes the class's default, and NumPy numbers become Python numbers.
        """
        self._check(_CHECKS)

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            value = getattr(self, name)
            setattr(self, name, _default(name) if value is None else _CHECKS[name](name, value))
        limit = self.max_new_tokens
        if limit is not None and self.min_new_tokens > limit:
            raise InputError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {limit}"
            )
        if self.temperature == 0:
            self.top_k = 1

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, by name: given fields, and fields that differ from the default.

        The seed is always included, so that the seed drawn at construction is used.
        """
        stated = self._given or ()
        found = {name: getattr(self, name) for name in _CHECKS}
        return {
            name: value
            for name, value in found.items()
            if name in stated or name == "seed" or value != _default(name)
        }

    def merged(self, defaults: SamplingParamsGenerationConfigDefaults) -> SamplingParams:
        """Return a copy with unset fields filled from a model's generation config."""
        if self._complete_for is defaults:
            return self
        key = self._merge_key(defaults)
        known = None if key is None else _merges.get(key)
        if known is not None:
            return self._with_seed(known, _CHECKS["seed"]("seed", self.seed))
        merged = SamplingParams(**_merged(self.given, defaults))
        if key is not None:
            _merges[key] = vars(merged).copy()
            if len(_merges) > _GOOD:
                del _merges[next(iter(_merges))]
        return merged

    def completed(self, defaults: SamplingParamsGenerationConfigDefaults) -> SamplingParams:
        """Return a copy as :meth:`merged`, which further merges with ``defaults`` leave as it is.

        For parameters of many requests; do not assign the copy's fields.
        """
        merged = self.merged(defaults)
        merged._given, merged._complete_for = self._given, defaults
        return merged

    def _merge_key(self, defaults: SamplingParamsGenerationConfigDefaults) -> object:
        """Return what a merge depends on besides the seed; None with a list or a map."""
        if self.stop is not None or self.stop_token_ids is not None:
            return None
        if self.logit_bias is not None or self.logits_processors is not None:
            return None
        values = _scalars(self)
        # 1, 1.0 and True are equal, but a field takes only some of them.
        return self._given, values, (*map(type, values),), defaults.values

    @classmethod
    def _with_seed(cls, fields: dict[str, Any], seed: int) -> SamplingParams:
        """Return parameters with fields that were checked before."""
        params = object.__new__(cls)
        params.__dict__ = own = fields.copy()
        own["seed"] = seed
        return params

    def seeded(self, seed: int | None) -> SamplingParams:
        """Return a copy with this seed, or with a random seed, which does not count as given."""
        if seed is None:
            return self._with_seed(vars(self), _random_seed())
        params = self._with_seed(vars(self), _CHECKS["seed"]("seed", seed))
        params._given = (*(self._given or ()), "seed")
        return params

    def reseeded(self) -> SamplingParams:
        """Return a copy with another random seed, or ``self`` if the seed was given."""
        if "seed" in (self._given or ()):
            return self
        other = copy(self)
        other.seed = _random_seed()
        return other

    @property
    def needs_penalties(self) -> bool:
        """Whether any penalty changes the logits."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )

    def to_wire(self) -> WireSampling:
        """Return the wire form; raises InputError for logits processors, which cannot be sent."""
        if self.logits_processors:
            raise InputError("logits_processors are code and cannot be sent to a cluster")
        # By name: attrgetter and a loop take three times as long. A number that equals its default
        # becomes the default object, which is left out: equal parameters have equal bytes.
        return WireSampling(
            self.top_k,
            NEUTRAL if self.top_p == NEUTRAL else self.top_p,
            OFF if self.min_p == OFF else self.min_p,
            NEUTRAL if self.temperature == NEUTRAL else self.temperature,
            OFF if self.frequency_penalty == OFF else self.frequency_penalty,
            OFF if self.presence_penalty == OFF else self.presence_penalty,
            NEUTRAL if self.repetition_penalty == NEUTRAL else self.repetition_penalty,
            self.max_new_tokens,
            self.min_new_tokens,
            self.ignore_eos,
            self.stop,
            self.stop_token_ids,
            self.detokenize,
            self.seed,
            self.logit_bias,
        )

    @classmethod
    def from_wire(cls, wire: WireSampling) -> SamplingParams:
        """Check a decoded wire form and convert it; values that passed before are not checked."""
        values = structs.astuple(wire)
        known = _find_known(values)
        if known is None:
            params = cls(*values[:_BIAS])
            if values[_BIAS] is not None:
                params.logit_bias = _check_bias("logit_bias", values[_BIAS])
            _remember(values, params)
        else:
            params = cls._with_seed(known, values[_SEED])
        return params

    @classmethod
    def check_wire(cls, wire: WireSampling) -> None:
        """Check like :meth:`from_wire`, without building an object."""
        if _find_known(structs.astuple(wire)) is None:
            cls.from_wire(wire)

    @classmethod
    def from_input_and_generation_config(
        cls,
        input_params: SamplingParamsInput,
        sampling_params_defaults: SamplingParamsGenerationConfigDefaults,
    ) -> SamplingParams:
        """Merge: the user's value, else the model's generation config, else the default.

        ``do_sample=False`` in the config means temperature 0, which sets ``top_k`` to 1; a
        temperature from the user overrides both. If a length of the config contradicts a length
        from the user, the user's length counts.
        """
        found = {name: getattr(input_params, name) for name in _CHECKS}
        given = {name: value for name, value in found.items() if value is not None}
        return cls(**_merged(given, sampling_params_defaults))


def _merged(
    given: dict[str, Any], defaults: SamplingParamsGenerationConfigDefaults
) -> dict[str, Any]:
    values: dict[str, Any] = {**defaults.values_to_update}
    if values.pop("do_sample", None) is False:
        values["temperature"] = 0.0
    least, most = given.get("min_new_tokens"), given.get("max_new_tokens")
    if most is not None and values.get("min_new_tokens", 0) > most:
        values["min_new_tokens"] = most
    if least is not None and values.get("max_new_tokens", least) < least:
        del values["max_new_tokens"]
    return {**values, **given}


_DEFAULTS = {item.name: item.default for item in fields(SamplingParams)}
_WIRE_DEFAULTS = {item.name: item.default for item in structs.fields(WireSampling)}
_STOP = WireSampling.__struct_fields__.index("stop")
_STOP_IDS = WireSampling.__struct_fields__.index("stop_token_ids")
_SEED = WireSampling.__struct_fields__.index("seed")
_BIAS = WireSampling.__struct_fields__.index("logit_bias")


_LISTS = {"stop", "stop_token_ids", "logit_bias", "logits_processors"}
_scalars = attrgetter(*(name for name in _DEFAULTS if name not in {"seed", *_LISTS}))
_merges: dict[object, dict[str, Any]] = {}
"""The fields of merged parameters, by their sources."""
_good: dict[tuple[Any, ...], dict[str, Any]] = {}
_GOOD = 1024


def _find_known(values: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the fields of parameters with these wire values, except the seed.

    Returns None if these values have not passed the checks before.
    """
    if values[_BIAS] is not None or not 0 <= values[_SEED] <= MAX_SEED:
        return None
    try:
        return _good.get(values[:_SEED])
    except TypeError:  # it has stops: lists, which are never noted
        return None


def _remember(values: tuple[Any, ...], params: SamplingParams) -> None:
    """Record values that passed all checks, unless a check changed a value."""
    if not (values[_STOP] is values[_STOP_IDS] is values[_BIAS] is None):
        return
    fields = {**vars(params), "_given": ()}
    checked = [fields[name] for name in WireSampling.__struct_fields__]
    if checked == [*values] and [*map(type, checked)] == [*map(type, values)]:
        # An encoder leaves out a default only if it is the same object, not a decoded copy.
        same = {n: d for n, d in _WIRE_DEFAULTS.items() if fields[n] == d}
        fields.update(same)
        _good[values[:_SEED]] = fields
        if len(_good) > _GOOD:
            del _good[next(iter(_good))]


def _default(name: str) -> Any:
    """Return the class's default of a field; a new seed at each call."""
    return _random_seed() if name == "seed" else _DEFAULTS[name]


@dataclass(slots=True)
class SamplingParamsInput(_Named):
    """The user's parameters; None: use the model's generation config, else the default.

    Raises InputError as :class:`SamplingParams` does.
    """

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
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, check(name, value))


def _show_fields(kind: Any) -> None:
    """Make editors and help() show the fields instead of the arguments of ``__new__``."""
    signature = inspect.signature(kind.__init__)
    kind.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])


_show_fields(SamplingParams)
_show_fields(SamplingParamsInput)


@dataclass(frozen=True, slots=True)
class SamplingParamsGenerationConfigDefaults:
    """Sampling values of a model's generation config; None if unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None

    @property
    def values(self) -> tuple[float | int | bool | None, ...]:
        """The values of all fields."""
        return (
            self.temperature,
            self.top_p,
            self.top_k,
            self.repetition_penalty,
            self.max_new_tokens,
            self.min_new_tokens,
            self.do_sample,
        )

    @property
    def values_to_update(self) -> dict[str, float | int | bool]:
        """The values that are set, in a new dict."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def with_limited_top_k(
    defaults: SamplingParamsGenerationConfigDefaults,
) -> SamplingParamsGenerationConfigDefaults:
    """Lower a model's ``top_k`` to the limit of requests (docs/sampling.md)."""
    top_k = defaults.top_k
    return defaults if top_k is None else replace(defaults, top_k=min(top_k, MAX_TOP_K))
