"""Arguments of the client's calls, checked before anything is sent.

Invariant: what passes has the declared type and range, so that no message of the client is
one a router cannot read. A refusal is an InputError that names the argument, what is accepted,
and the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, TypedDict, cast

from ..proto.endpoints import check_target_endpoint
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
from ..proto.messages import Drain, Status
from ..proto.sampling import SamplingParams
from ..proto.value_checks import Check, choice, flag, shown, text, unknown_name, whole

LONGEST_WAIT_S = MAX_DEADLINE_S
"""A day: what ``inf`` and everything above it means for a timeout or a deadline."""
_MAX_HANDOFFS = 1 << 31


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``.

    ``target_endpoint``: address of the worker to use; ``pin="strict"`` forbids a replay
    elsewhere, ``fallback=True`` lets the router choose when that worker cannot take it.
    ``deadline``: seconds, at most a day. ``pool``: which workers. ``request_id``: default a
    random one. ``log_probabilities``: of each token and that many most likely ones.
    ``cache_salt``: prefix cache shared only with requests of the same salt. ``json_schema``:
    JSON text or a mapping; the answer's text is an instance of it. None leaves an option out.
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


def _target(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be an address (text), not {shown(value)}")
    try:
        return check_target_endpoint(value)
    except InputError as error:
        said = str(error)
        raise InputError(said if said.startswith(name) else f"{name}: {said}") from None


def _seconds(name: str, value: Any) -> float:
    """Seconds of 0 or more; everything above a day is a day."""
    seconds = _number(value)
    if not seconds >= 0:  # NaN as well
        raise InputError(f"{name} must be a number of seconds, 0 or more, not {shown(value)}")
    return min(seconds, LONGEST_WAIT_S)


def _number(value: Any) -> float:
    """The number as a float; NaN for what is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf if str(value)[0] != "-" else -math.inf


def _deadline(name: str, value: Any) -> float:
    """A deadline that is over already is no wrong value: it ends the request as such."""
    if _number(value) <= 0:
        raise DeadlineExceeded(f"the deadline of {_number(value):g} s is over already")
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
}
_SAMPLING = frozenset(item.name for item in fields(SamplingParams))


def check_options(
    options: Mapping[str, Any], known: Iterable[str] = RequestOptions.__annotations__
) -> RequestOptions:
    """Options with checked values of the declared types; what was None is left out.

    Raises InputError for one that is unknown or wrong, DeadlineExceeded for a deadline that is
    over.
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
            f"{name} is no option of the call but a field of SamplingParams: "
            f"give SamplingParams({name}=...) behind the prompt"
        )
    return unknown_name("the call", name, known)


def check_variables(variables: object) -> Mapping[str, Any]:
    """Variables for a chat template. Raises InputError unless they are a mapping by name."""
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
    """The timeouts in their order. ConfigError names one that is no number of seconds."""
    try:
        return [_seconds(name, value) for name, value in seconds.items()]
    except InputError as error:
        raise ConfigError(str(error)) from None


def question_timeout(timeout: object, default: float) -> float:
    """Seconds to wait for an answer. Raises InputError for what is no number of seconds."""
    return default if timeout is None else _seconds("timeout", timeout)


_handoffs = whole(0, _MAX_HANDOFFS - 1, f"a whole number, 0 to {_MAX_HANDOFFS - 1}")


def status_question(handoffs: object) -> Status:
    """How the cluster is, with that many handoffs. Raises InputError for what is no count."""
    return Status(handoffs=_handoffs("handoffs", handoffs))


def drain_question(worker: object, force: object = False) -> Drain:
    """The order to a worker by its id or endpoint. Raises InputError for what is no name."""
    return Drain(worker=text(0, MAX_NAME_CHARS)("worker", worker), force=flag("force", force))
