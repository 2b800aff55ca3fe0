"""Check the arguments of the client's calls before any message is sent.

Invariant: accepted arguments have the declared type and range, so that routers can decode every
message of the client. The InputError for a wrong argument contains the argument's name, the
accepted values, and the wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, TypedDict, cast

from ..proto.errors import ConfigError, DeadlineExceeded, InputError
from ..proto.ids import RequestID
from ..proto.json_schema import json_schema_text
from ..proto.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_DEADLINE_S,
    MAX_LOG_PROBABILITIES,
    MAX_NAME_CHARS,
    MAX_POOL_CHARS,
    MAX_REQUEST_ID_CHARS,
)
from ..proto.sampling import SamplingParams
from ..proto.value_checks import Check, choice, flag, shown, text, unknown_name, whole
from ..proto.wire.endpoints import check_target_endpoint
from ..proto.wire.messages import Drain, Status

LONGEST_WAIT_S = MAX_DEADLINE_S
"""One day: maximum timeout and deadline in seconds. Larger values and ``inf`` are reduced to it."""
_MAX_HANDOFFS = 1 << 31


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``.

    None stands for the default of an option.

    ``target_endpoint``: address of the worker to use. ``pin="strict"``: never replay the request
    on another worker. ``fallback=True``: let the router choose a worker if the target cannot
    accept the request. ``deadline``: seconds, at most a day. ``pool``: name of the worker pool.
    ``request_id``: default random. ``log_probabilities``: for each token, return its log
    probability and those of this many most likely tokens. ``cache_salt``: share the prefix cache
    only with requests of the same salt. ``json_schema``: JSON text or a mapping; constrains the
    answer to this schema. ``show_text``: outputs contain text also for prompts of token ids.
    """

    target_endpoint: str | None
    deadline: float | None
    pool: str | None
    pin: str
    fallback: bool
    request_id: str | None
    log_probabilities: int
    cache_salt: str
    json_schema: str | Mapping[str, Any] | None
    show_text: bool


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


def _request_id(name: str, value: Any) -> str:
    value = str(value) if isinstance(value, RequestID) else value
    checked: str = text(1, MAX_REQUEST_ID_CHARS)(name, value)
    return checked


def _schema(name: str, value: Any) -> str:
    if not isinstance(value, str | Mapping | bool):
        raise InputError(f"{name} must be JSON text or a mapping, not {shown(value)}")
    return json_schema_text(cast("str | Mapping[str, Any]", value))


_CHECKS: dict[str, Check] = {
    "target_endpoint": _target,
    "deadline": _deadline,
    "pool": text(0, MAX_POOL_CHARS),
    "pin": choice("prefer", "strict"),
    "fallback": flag,
    "request_id": _request_id,
    "log_probabilities": whole(
        0, MAX_LOG_PROBABILITIES, f"a whole number, 0 to {MAX_LOG_PROBABILITIES}"
    ),
    "cache_salt": text(0, MAX_CACHE_SALT_CHARS),
    "json_schema": _schema,
    "show_text": flag,
}
_SAMPLING = frozenset(item.name for item in fields(SamplingParams))


def check_options(
    options: Mapping[str, Any], known: Iterable[str] = RequestOptions.__annotations__
) -> RequestOptions:
    """Check options and convert them to the declared types. Options that are None are left out.

    Raises InputError for an unknown or wrong option, DeadlineExceeded for a deadline in the past.
    """
    names = set(known)
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in names:
            raise _unknown(name, names)
        if value is not None:
            checked[name] = _CHECKS[name](name, value)
    return cast("RequestOptions", checked)


def _unknown(name: str, known: set[str]) -> InputError:
    if name in _SAMPLING:
        return InputError(
            f"{name} is not an option of the call but a field of SamplingParams: "
            f"give SamplingParams({name}=...) after the prompt"
        )
    return unknown_name("the call", name, known)


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


def question_timeout(timeout: object, default: float) -> float:
    """Return the seconds to wait for an answer. Raises InputError."""
    return default if timeout is None else _seconds("timeout", timeout)


_handoffs = whole(0, _MAX_HANDOFFS - 1, f"a whole number, 0 to {_MAX_HANDOFFS - 1}")


def status_question(handoffs: object) -> Status:
    """Make a query for the cluster's status and its last handoffs. Raises InputError."""
    return Status(handoffs=_handoffs("handoffs", handoffs))


def drain_question(worker: object, force: object = False) -> Drain:
    """Make an order to drain a worker, given by id or endpoint. Raises InputError."""
    return Drain(worker=text(0, MAX_NAME_CHARS)("worker", worker), force=flag("force", force))
