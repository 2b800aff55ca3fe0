"""Check the arguments of the client's calls before any message is sent.

Invariant: accepted arguments have the declared type and range, so that routers can decode every
message of the client. The InputError for a wrong argument contains the argument's name, the
accepted values, and the wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from numbers import Real
from typing import Any, TypedDict, cast

from baton.proto.errors import ConfigError, DeadlineExceeded, InputError
from baton.proto.ids import RequestID
from baton.proto.json_schema import (
    checked_whitespace,
    grammar_as_schema,
    json_schema_text,
    whitespace_options,
    with_whitespace,
)
from baton.proto.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_DEADLINE_S,
    MAX_LOG_PROBABILITIES,
    MAX_NAME_CHARS,
    MAX_POOL_CHARS,
    MAX_REQUEST_ID_CHARS,
)
from baton.proto.sampling import ALIASES, SamplingParams
from baton.proto.trace_context import parse_traceparent
from baton.proto.value_checks import Check, choice, flag, shown, text, unknown_name, whole
from baton.proto.wire.endpoints import check_target_endpoint
from baton.proto.wire.messages import Drain, Status

MAX_GATEWAY_CHARS = 64
LONGEST_WAIT_S = MAX_DEADLINE_S
"""One day: maximum timeout and deadline in seconds. Larger values and ``inf`` are reduced to it."""
_MAX_HANDOFFS = 1 << 31
_MAX_RETRIES = 1 << 31
BATCH_RETRIES = 100
"""Default of ``max_retries`` for a list of prompts: more than ten minutes of full queues."""


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``.

    None stands for the default of an option.

    ``target_endpoint``: address of the worker to use. ``pin="strict"``: never replay the request
    on another worker. ``fallback=True``: let the router choose a worker if the target cannot
    accept the request. ``deadline``: seconds, at most a day. ``slo_ttft``, ``slo_itl``: limits of
    TTFT and of the mean ITL in seconds, in place of the cluster's; they decide the request's way
    and its place in queues, and end nothing. ``pool``: name of the worker pool.
    ``request_id``: default random. ``log_probabilities``: for each token, return its log
    probability and those of this many most likely tokens. ``prompt_log_probabilities``: the same
    for the tokens of the prompt, which is then computed without the prefix cache; 0: their own
    alone; None: off. ``cache_salt``: share the prefix cache
    only with requests of the same salt. ``json_schema``: JSON text or a mapping; constrains the
    answer to this schema. ``grammar``: in Lark syntax; constrains the answer to this language, in
    place of a ``json_schema``. ``disable_any_whitespace=False``: an answer in JSON may have
    whitespace (default: it has none). ``whitespace_pattern``: a regular expression of the
    whitespace that it may have. ``show_text``: outputs contain text also for prompts of token ids.
    ``max_retries``: how often a request that is refused for lack of room (CapacityError) is
    submitted again, after the delay that the cluster asks for or when another request of this
    client ends (default: 0, for a list of prompts 100). ``images``: images of the prompt in order,
    each as bytes of a file, a path, a Pillow image or an array; the prompt has one placeholder for
    each, and a chat one part of type image (or none). For a list of prompts: a list of such lists.
    ``traceparent``: the trace that the request belongs to, as in W3C Trace Context. ``gateway``:
    name of the gateway that makes the request for another client. ``whole=True``: the router
    sends all tokens with the end, which takes less time; not with a ``stop``.
    """

    target_endpoint: str | None
    deadline: float | None
    slo_ttft: float | None
    slo_itl: float | None
    pool: str | None
    pin: str
    fallback: bool
    request_id: str | None
    log_probabilities: int
    prompt_log_probabilities: int | None
    cache_salt: str
    json_schema: str | Mapping[str, Any] | None
    grammar: str | None
    disable_any_whitespace: bool
    whitespace_pattern: str
    show_text: bool
    max_retries: int
    images: Sequence[Any]
    traceparent: str
    whole: bool
    gateway: str


class GenerationOptions(RequestOptions, total=False):
    """Keyword arguments of calls that continue a prompt: those of a request, and these.

    ``tools``: of a chat, mappings for the chat template; the same as ``variables={"tools": ...}``.
    The others are sampling parameters, for a call without ``sampling_params``.
    """

    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    min_tokens: int
    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logit_bias: Mapping[int, float]


def _target(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be an address (text), not {shown(value)}")
    try:
        return check_target_endpoint(value)
    except InputError as error:
        said = str(error)
        raise InputError(said if said.startswith(name) else f"{name}: {said}") from None


def _seconds(name: str, value: Any) -> float:
    """Check a duration in seconds, 0 or more. Reduce values above one day to one day."""
    seconds = _number(value)
    if not seconds >= 0:  # NaN as well
        raise InputError(f"{name} must be a number of seconds, 0 or more, not {shown(value)}")
    return min(seconds, LONGEST_WAIT_S)


def _number(value: Any) -> float:
    """Convert a number to float. Returns NaN for other types."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf if str(value)[0] != "-" else -math.inf


def _deadline(name: str, value: Any) -> float:
    """Check a deadline. Raises DeadlineExceeded, not InputError, for a deadline in the past."""
    if _number(value) <= 0:
        raise DeadlineExceeded(f"the deadline of {_number(value):g} s has already passed")
    return _seconds(name, value)


def _limit(name: str, value: Any) -> float:
    """Check a latency limit in seconds."""
    seconds = _number(value)
    if not 0 < seconds <= LONGEST_WAIT_S:  # NaN as well
        limits = f"above 0 and at most {LONGEST_WAIT_S:g}"
        raise InputError(f"{name} must be a number of seconds, {limits}, not {shown(value)}")
    return seconds


_id_text = text(1, MAX_REQUEST_ID_CHARS)


def _request_id(name: str, value: Any) -> str:
    value = str(value) if isinstance(value, RequestID) else value
    checked: str = _id_text(name, value)
    return checked


def _schema(name: str, value: Any) -> str:
    if not isinstance(value, str | Mapping | bool):
        raise InputError(f"{name} must be JSON text or a mapping, not {shown(value)}")
    return json_schema_text(cast("str | Mapping[str, Any]", value))


def _traceparent(name: str, value: Any) -> str:
    if not isinstance(value, str) or (found := parse_traceparent(value)) is None:
        raise InputError(
            f"{name} must be 00-TRACE-SPAN-FLAGS with 32, 16 and 2 lower-case hexadecimal digits, "
            f"not {shown(value)}"
        )
    return found.traceparent


def _grammar(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be text in Lark syntax, not {shown(value)}")
    return grammar_as_schema(value)


def _tools(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} must be a list of mappings, not {shown(value)}")
    return list(value)


def _images(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} must be a list of images, not {shown(value)}")
    return list(value)


_CHECKS: dict[str, Check] = {
    "target_endpoint": _target,
    "deadline": _deadline,
    "slo_ttft": _limit,
    "slo_itl": _limit,
    "pool": text(0, MAX_POOL_CHARS),
    "pin": choice("prefer", "strict"),
    "fallback": flag,
    "whole": flag,
    "request_id": _request_id,
    "log_probabilities": whole(
        0, MAX_LOG_PROBABILITIES, f"a whole number, 0 to {MAX_LOG_PROBABILITIES}"
    ),
    "prompt_log_probabilities": whole(
        0, MAX_LOG_PROBABILITIES, f"a whole number, 0 to {MAX_LOG_PROBABILITIES}"
    ),
    "cache_salt": text(0, MAX_CACHE_SALT_CHARS),
    "json_schema": _schema,
    "grammar": _grammar,
    "disable_any_whitespace": flag,
    "whitespace_pattern": lambda _, value: checked_whitespace(value),
    "show_text": flag,
    "traceparent": _traceparent,
    "gateway": text(0, MAX_GATEWAY_CHARS),
    "images": _images,
    "tools": _tools,
    "max_retries": whole(0, _MAX_RETRIES, f"a whole number, 0 to {_MAX_RETRIES}"),
}
_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")
SAMPLING = frozenset(item.name for item in fields(SamplingParams)) | ALIASES.keys()
"""Names of sampling parameters, which are options of the calls that take sampling parameters."""
_OWN = frozenset(RequestOptions.__annotations__)
CHAT_OPTIONS = _OWN | {"tools"}


def check_options(options: Mapping[str, Any], known: AbstractSet[str] = _OWN) -> RequestOptions:
    """Check options and convert them to the declared types. A None is left out.

    Sampling parameters are no options here: :func:`split_sampling` takes them out before.

    Raises InputError for an unknown or wrong option, DeadlineExceeded for a deadline in the past.
    """
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise _unknown(name, set(known))
        if value is not None:
            checked[name] = _CHECKS[name](name, value)
    if "grammar" in checked:
        if "json_schema" in checked:
            raise InputError("grammar cannot be combined with json_schema")
        checked["json_schema"] = checked.pop("grammar")  # it travels as one
    given = {name: checked.pop(name) for name in _WHITESPACE if name in checked}
    if given:
        if "json_schema" not in checked or options.get("grammar") is not None:
            raise InputError(f"{min(given)} needs a json_schema")
        if whitespace := whitespace_options(**given):
            checked["json_schema"] = with_whitespace(checked["json_schema"], whitespace)
    return cast("RequestOptions", checked)


def split_sampling(sampling: Any, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return sampling parameters and options of a call that has both among its options.

    Raises InputError if a parameter is given beside an object with parameters.
    """
    own = {name: options[name] for name in options if name in SAMPLING}
    if not own:
        return sampling, options
    if sampling is not None:
        name = next(iter(own))
        raise InputError(f"{name} is given beside sampling_params: give it in sampling_params")
    rest = {name: value for name, value in options.items() if name not in own}
    return SamplingParams(**own), rest


def batch_options(options: RequestOptions) -> RequestOptions:
    """Return the options of a call with several requests, which has another default of retries."""
    options = options.copy()
    options.setdefault("max_retries", BATCH_RETRIES)
    return options


def options_of_each(count: int, options: RequestOptions) -> list[RequestOptions]:
    """Return the options of each of ``count`` prompts; InputError if images fit them not."""
    images = options.get("images")
    if images is None:
        return [options] * count
    if len(images) != count or not all(isinstance(one, list | tuple) for one in images):
        raise InputError(f"images must be a list of {count} lists, one for each prompt")
    return [cast("RequestOptions", {**options, "images": list(one)}) for one in images]


def _unknown(name: str, known: set[str]) -> InputError:
    if name in SAMPLING:
        return InputError(f"{name} has no effect in this call, which draws no tokens")
    if name in _ALSO:
        return InputError(f"the call has no {name!r}: write {_ALSO[name]}")
    return unknown_name("the call", name, known)


_ALSO = {
    "logprobs": "log_probabilities=...",
    "prompt_logprobs": "prompt_log_probabilities=...",
    "max_completion_tokens": "max_tokens=...",
    "timeout": "deadline=...",
    "response_format": "json_schema=...",
    "guided_json": "json_schema=...",
    "structured_outputs": "json_schema=... or grammar=...",
}
"""Names of other clients, and what to write here."""


def check_variables(variables: object) -> Mapping[str, Any]:
    """Check the variables of a chat template. Raises InputError unless they map names to values."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InputError(f"variables must be a mapping by name, not {shown(variables)}")
    if taken := {"messages", "self"} & variables.keys():
        raise InputError(f"variables cannot set {min(taken)!r}")
    tools = variables.get("tools")
    if tools is not None and not isinstance(tools, list | tuple):
        raise InputError(f"tools must be a list of mappings, not {shown(tools)}")
    return variables


def check_timeouts(**seconds: object) -> list[float]:
    """Check timeouts and return them in order. Raises ConfigError with the wrong timeout's name."""
    try:
        return [_seconds(name, value) for name, value in seconds.items()]
    except InputError as error:
        raise ConfigError(str(error)) from None


def query_timeout(timeout: object, default: float) -> float:
    """Return the seconds to wait for an answer. Raises InputError."""
    return default if timeout is None else _seconds("timeout", timeout)


class StatusOptions(TypedDict, total=False):
    """Keyword arguments of ``status``.

    ``handoffs``: describe that many of the last handoffs (default: 16). ``requests``: also
    describe that many of the last requests, and unfinished ones. ``request``: describe all requests
    with this id instead. ``failed``: describe that many of the last failed requests, and of the
    last refused ones. ``history``: also that many samples of the last 15 minutes, one per 5
    seconds, a list per number. ``metrics``: also the router's metrics, as families of
    ``baton.runtime.metrics``.
    """

    handoffs: int
    requests: int
    request: str
    failed: int
    history: int
    metrics: bool


_handoffs = whole(0, _MAX_HANDOFFS - 1, f"a whole number, 0 to {_MAX_HANDOFFS - 1}")


def status_query(
    handoffs: object = 16,
    requests: object = 0,
    request: str = "",
    failed: object = 0,
    history: object = 0,
    metrics: object = False,
) -> Status:
    """Make a query for the cluster's status, last handoffs and requests. Raises InputError."""
    if not isinstance(request, str) or len(request) > MAX_NAME_CHARS:
        raise InputError(f"request must be the id of a request, not {str(request)[:80]!r}")
    return Status(
        handoffs=_handoffs("handoffs", handoffs),
        requests=_handoffs("requests", requests),
        request=request,
        failed=_handoffs("failed", failed),
        history=_handoffs("history", history),
        metrics=flag("metrics", metrics),
    )


def drain_query(worker: object, force: object = False) -> Drain:
    """Make an order to drain a worker, given by id or endpoint. Raises InputError."""
    return Drain(worker=text(0, MAX_NAME_CHARS)("worker", worker), force=flag("force", force))
