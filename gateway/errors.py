"""Errors as HTTP: status, OpenAI's JSON shape, and when to retry."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from baton.proto.errors import (
    AccessDenied,
    BatonError,
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    DuplicateRequest,
    EndpointDead,
    EndpointDraining,
    EndpointUnknown,
    InputError,
    LimitExceeded,
    RequestCancelled,
    RouterClosing,
    WorkerLost,
)

CLIENT_CLOSED = 499
"""The status, known from nginx, of a request whose client has closed its connection."""


class ParameterError(InputError):
    """A field of the body is wrong. ``parameter``: its name, with dots for inner fields."""

    def __init__(self, message: str, parameter: str, code: str = InputError.code) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class ModelNotFound(InputError):
    """The cluster serves another model."""

    code = "model_not_found"
    parameter = "model"


class RouteNotFound(InputError):
    """The gateway has no such route, or the model does not serve it."""

    code = "not_found"


class MethodNotAllowed(InputError):
    """The route has other methods."""

    code = "method_not_allowed"


class KeyInvalid(BatonError):
    """The API key is missing or unknown."""

    code = "invalid_api_key"


class ForeignHost(BatonError):
    """Without an API key, only requests to and from this machine's own names are served."""

    code = "foreign_host"


class GatewayBusy(CapacityError):
    """A limit of this gateway is reached. It sheds no other request, as a router's would."""


class BodyTooLarge(LimitExceeded):
    """The body exceeds the limit."""

    code = "body_too_large"


class BodyTooSlow(BatonError):
    """The body did not arrive in time."""

    code = "body_too_slow"


_STATUS: Mapping[type[BatonError], int] = {
    ModelNotFound: 404,
    RouteNotFound: 404,
    MethodNotAllowed: 405,
    EndpointUnknown: 404,
    DuplicateRequest: 409,
    InputError: 400,
    KeyInvalid: 401,
    ForeignHost: 403,
    BodyTooLarge: 413,
    BodyTooSlow: 408,
    LimitExceeded: 400,
    RouterClosing: 503,
    EndpointDraining: 503,
    EndpointDead: 503,
    CapacityError: 429,
    RequestCancelled: CLIENT_CLOSED,
    DeadlineExceeded: 504,
    WorkerLost: 503,
    ConnectionLost: 503,
    AccessDenied: 503,
    BatonError: 500,
}
"""By class; the first class of an error's ancestors counts."""
_RETRY_AFTER_S = 1.0


def status_of(error: BatonError) -> int:
    """Return the HTTP status of an error."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def headers_of(error: BatonError) -> dict[str, str]:
    """Return the headers of an error's response: ``Retry-After`` for 429 and 503."""
    if status_of(error) not in (429, 503):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after or _RETRY_AFTER_S)))}


def error_json(error: BatonError) -> bytes:
    """Return the JSON of an error, in OpenAI's shape."""
    status = status_of(error)
    kind = _type_of(status)
    body = {
        "message": str(error),
        "type": kind,
        "param": getattr(error, "parameter", None) or None,
        "code": error.code,
    }
    return msgspec.json.encode({"error": body})


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
