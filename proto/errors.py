"""The errors that users can get, as a tree.

::

    BatonError
    ├── InputError (ValueError)      the request is wrong; its message may be shown to the user
    │   ├── SchemaTooComplex         a json_schema exceeds the limits of time or memory
    │   ├── PromptTooLong            the prompt has more tokens than a context holds
    │   ├── TaskMismatch             text requested from an embedding model, or vice versa
    │   ├── FeatureMissing           a parameter needs newer workers
    │   ├── EndpointUnknown          target_endpoint names no registered worker
    │   └── DuplicateRequest         the same id was submitted with different content
    ├── CapacityError                no room now; has retry_after in seconds
    │   ├── RouterClosing            the router is about to end; use another router
    │   ├── EndpointDraining         target_endpoint names a worker that takes no new work
    │   ├── EndpointDead             target_endpoint names a worker that stopped answering
    │   ├── NameTaken                another healthy worker has this name
    │   └── ModelContested           as many keys state another model
    ├── RequestCancelled             the client cancelled the request
    ├── DeadlineExceeded             the request's deadline has passed
    ├── RequestFailed                the cluster could not finish an admitted request
    │   ├── WorkerLost               all attempts lost their workers
    │   ├── RequestPoisoned          two workers died with the request; it is not replayed
    │   └── HandoffFailed            KV blocks could not be handed off
    ├── ProtocolError                a peer violated the protocol
    │   ├── DecodeFailed             not a valid message
    │   ├── EnvelopeDamaged          the bytes do not match their digest
    │   ├── LimitExceeded            larger, deeper or longer than a limit
    │   └── VersionMismatch          incompatible protocol versions
    ├── ModelMismatch                two processes serve different models or numerics
    ├── CheckpointError              a model folder cannot be served
    ├── ConfigError                  a setting is wrong
    ├── ConnectionLost               the router cannot be reached
    ├── AccessDenied                 a key is unknown, or its role does not allow this
    └── InternalError                a bug of Baton

Each class has a stable ``code``. Messages carry the code, and :func:`error_from_code` converts it
to the class at the client.
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
    """A ``json_schema`` exceeds the limits of time or memory, at the start or during the answer."""

    code = "schema_too_complex"


class PromptTooLong(InputError):
    """A prompt or text has more tokens than a context holds. The code is that of OpenAI's API."""

    code = "context_length_exceeded"


class TaskMismatch(InputError):
    """Text was requested from an embedding model, or embeddings from a generation model."""

    code = "task_mismatch"


class FeatureMissing(InputError):
    """A parameter needs newer workers than the cluster has."""

    code = "feature_missing"


class EndpointUnknown(InputError):
    """``target_endpoint`` names no registered worker."""

    code = "endpoint_unknown"


class DuplicateRequest(InputError):
    """The request id is in use with different content."""

    code = "duplicate_request"


class CapacityError(BatonError):
    """No room now; ``retry_after``: seconds until a retry makes sense."""

    code = "overloaded"


class RouterClosing(CapacityError):
    """The router finishes its requests and takes no new ones; use another router."""

    code = "router_closing"


class EndpointDraining(CapacityError):
    """``target_endpoint`` names a worker that takes no new work."""

    code = "endpoint_draining"


class EndpointDead(CapacityError):
    """``target_endpoint`` names a worker that stopped answering."""

    code = "endpoint_dead"


class NameTaken(CapacityError):
    """Another healthy worker has this name or endpoint."""

    code = "name_taken"


class ModelContested(CapacityError):
    """As many keys of the cluster state another model; the worker retries."""

    code = "model_contested"


class RequestCancelled(BatonError):
    """The client cancelled the request."""

    code = "cancelled"


class DeadlineExceeded(BatonError):
    """The request's deadline has passed."""

    code = "deadline_exceeded"


class RequestFailed(BatonError):
    """The cluster could not finish an admitted request."""

    code = "failed"


class WorkerLost(RequestFailed):
    """Every attempt lost a worker."""

    code = "worker_lost"


class RequestPoisoned(RequestFailed):
    """Two workers died with the request; it is not replayed."""

    code = "poisoned"


class HandoffFailed(RequestFailed):
    """The KV blocks could not be handed off."""

    code = "handoff_failed"


class ProtocolError(BatonError):
    """A peer violated the protocol."""

    code = "protocol"


class DecodeFailed(ProtocolError):
    """The bytes are not a valid message."""

    code = "decode_failed"


class EnvelopeDamaged(ProtocolError):
    """The bytes do not match the sender's digest; the envelope counts as lost."""

    code = "damaged"


class LimitExceeded(ProtocolError):
    """A size, count or depth is over its limit."""

    code = "limit_exceeded"


class VersionMismatch(ProtocolError):
    """The peer has an incompatible protocol version."""

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
    """The caller's key is unknown, or its role or name does not allow this."""

    code = "access_denied"


class InternalError(BatonError):
    """A bug of Baton."""

    code = "internal"


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {cls.code: cls for cls in _tree(BatonError)}


def known_codes() -> frozenset[str]:
    """Return the codes of all errors that a cluster's processes may send."""
    return frozenset(_BY_CODE)


def error_from_code(code: str, message: str, retry_after: float | None = None) -> BatonError:
    """Return the error for a code; an unknown code becomes :class:`RequestFailed`."""
    return _BY_CODE.get(code, RequestFailed)(message, retry_after=retry_after)
