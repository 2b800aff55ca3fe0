"""The wire contract: contexts, sampling parameters, messages, codec, layouts and errors."""

from .contexts import TextContext
from .errors import (
    BatonError,
    CapacityError,
    CheckpointError,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeFailed,
    DuplicateRequest,
    EndpointDead,
    EndpointDraining,
    EndpointUnknown,
    HandoffFailed,
    InputError,
    InternalError,
    LimitExceeded,
    ModelMismatch,
    ProtocolError,
    RequestCancelled,
    RequestFailed,
    RequestPoisoned,
    VersionMismatch,
    WorkerLost,
    error_from_code,
)
from .ids import RequestID
from .numpy_maps import msgpack_numpy_decoder, msgpack_numpy_encoder
from .outputs import LogProbabilities, TextGenerationOutput
from .requests import build_wire_context, check_wire_context
from .sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)
from .status import GenerationStatus
from .tokens import FUTURE_TOKEN, Range, TokenBuffer

__all__ = [
    "FUTURE_TOKEN",
    "BatonError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ConnectionLost",
    "DeadlineExceeded",
    "DecodeFailed",
    "DuplicateRequest",
    "EndpointDead",
    "EndpointDraining",
    "EndpointUnknown",
    "GenerationStatus",
    "HandoffFailed",
    "InputError",
    "InternalError",
    "LimitExceeded",
    "LogProbabilities",
    "ModelMismatch",
    "ProtocolError",
    "Range",
    "RequestCancelled",
    "RequestFailed",
    "RequestID",
    "RequestPoisoned",
    "SamplingParams",
    "SamplingParamsGenerationConfigDefaults",
    "SamplingParamsInput",
    "TextContext",
    "TextGenerationOutput",
    "TokenBuffer",
    "VersionMismatch",
    "WorkerLost",
    "build_wire_context",
    "check_wire_context",
    "error_from_code",
    "msgpack_numpy_decoder",
    "msgpack_numpy_encoder",
]
