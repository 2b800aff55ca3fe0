"""The error tree; every failure a user can see is one of these.

::

    BatonError
    ├── InputError (ValueError)      the request is wrong; its message may be shown to the user
    │   ├── SchemaTooComplex         a json_schema takes more to compile or to follow than is let
    │   ├── TaskMismatch             text was asked of an embedding model, or the other way round
    │   ├── EndpointUnknown          target_endpoint names no registered worker
    │   └── DuplicateRequest         the same id was submitted with another content
    ├── CapacityError                no room now; carries retry_after in seconds
    │   ├── RouterClosing            the router is about to end; another one takes the request
    │   ├── EndpointDraining         target_endpoint names a worker that takes no new work
    │   ├── EndpointDead             target_endpoint names a worker that stopped answering
    │   └── NameTaken                a healthy worker has the name another one asks for
    ├── RequestCancelled             the client asked for the end
    ├── DeadlineExceeded             the request's time ran out
    ├── RequestFailed                the cluster could not finish an admitted request
    │   ├── WorkerLost               attempts on several workers all died
    │   ├── RequestPoisoned          the request killed a worker twice and is not tried again
    │   └── HandoffFailed            KV blocks could not be passed on
    ├── ProtocolError                a peer's bytes broke the protocol
    │   ├── DecodeFailed             not a valid message
    │   ├── EnvelopeDamaged          the bytes are not those that were sealed
    │   ├── LimitExceeded            larger, deeper or longer than a limit
    │   └── VersionMismatch          another protocol version
    ├── ModelMismatch                two processes serve different models or numerics
    ├── CheckpointError              a model folder cannot be served
    ├── ConfigError                  a setting is wrong
    ├── ConnectionLost               the router cannot be reached
    ├── AccessDenied                 a key is not let in, or may not do this
    └── InternalError                our own bug, reported instead of hidden

Each class has a stable ``code``, the only part that travels; :func:`error_from_code`
turns it back into the class at the client.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of all errors Baton raises on purpose."""

    code = "error"

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message or self.code)
        self.retry_after = retry_after


class InputError(BatonError, ValueError):
    """The request is wrong; the message may be shown to the user."""

    code = "input"


class SchemaTooComplex(InputError):
    """A ``json_schema`` takes more time or memory than is let, at the start or in mid-answer."""

    code = "schema_too_complex"


class TaskMismatch(InputError):
    """The served model embeds and does not generate, or the other way round."""

    code = "task_mismatch"


class EndpointUnknown(InputError):
    """``target_endpoint`` names no registered worker."""

    code = "endpoint_unknown"


class DuplicateRequest(InputError):
    """The request id is in use with another content."""

    code = "duplicate_request"


class CapacityError(BatonError):
    """No room now; ``retry_after`` (seconds) says when to try again."""

    code = "overloaded"


class RouterClosing(CapacityError):
    """The router finishes what it has and takes nothing new; another one may."""

    code = "router_closing"


class EndpointDraining(CapacityError):
    """``target_endpoint`` names a worker that takes no new work."""

    code = "endpoint_draining"


class EndpointDead(CapacityError):
    """``target_endpoint`` names a worker that stopped answering."""

    code = "endpoint_dead"


class NameTaken(CapacityError):
    """A healthy worker has the name or endpoint another one asks for."""

    code = "name_taken"


class RequestCancelled(BatonError):
    """The client asked for the end of the request."""

    code = "cancelled"


class DeadlineExceeded(BatonError):
    """The request's time ran out."""

    code = "deadline_exceeded"


class RequestFailed(BatonError):
    """The cluster could not finish an admitted request."""

    code = "failed"


class WorkerLost(RequestFailed):
    """Every attempt ended with the death of a worker."""

    code = "worker_lost"


class RequestPoisoned(RequestFailed):
    """The request killed a worker twice; it is not tried again."""

    code = "poisoned"


class HandoffFailed(RequestFailed):
    """The KV blocks could not be passed on."""

    code = "handoff_failed"


class ProtocolError(BatonError):
    """A peer's bytes broke the protocol."""

    code = "protocol"


class DecodeFailed(ProtocolError):
    """The bytes are not a valid message."""

    code = "decode_failed"


class EnvelopeDamaged(ProtocolError):
    """The bytes are not those the sender put its digest on; as good as lost."""

    code = "damaged"


class LimitExceeded(ProtocolError):
    """A size, count or depth is over its limit."""

    code = "limit_exceeded"


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol version."""

    code = "version_mismatch"


class ModelMismatch(BatonError):
    """Two processes serve different models, layouts or numerics."""

    code = "model_mismatch"


class CheckpointError(BatonError):
    """A model folder cannot be served."""

    code = "checkpoint"


class ConfigError(BatonError):
    """A setting is wrong."""

    code = "config"


class ConnectionLost(BatonError):
    """The router cannot be reached."""

    code = "connection_lost"


class AccessDenied(BatonError):
    """The caller's key is not let in here, or its role or name does not allow this."""

    code = "access_denied"


class InternalError(BatonError):
    """Our own bug, reported instead of hidden."""

    code = "internal"


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {cls.code: cls for cls in _tree(BatonError)}


def error_from_code(code: str, message: str, retry_after: float | None = None) -> BatonError:
    """Rebuild the typed error a peer reported; an unknown code becomes :class:`RequestFailed`."""
    return _BY_CODE.get(code, RequestFailed)(message, retry_after=retry_after)
