"""The wire contract: contexts, sampling parameters, messages, codec, layouts and errors."""

from .codec.single_buffer import msgpack_numpy_decoder, msgpack_numpy_encoder
from .contexts.generators import (
    AudioGenerator,
    BatchType,
    EmbeddingsGenerator,
    EmbeddingsOutput,
    TextGenerationInputs,
    reserve_token_space_for_batch,
    update_batch,
)
from .contexts.images import ImageMetadata
from .contexts.outputs import LogProbabilities, SchedulerResult, TextGenerationOutput
from .contexts.pixels import GenerationOutput, OutputImageContent, PixelContext
from .contexts.ranges import Range
from .contexts.speech import (
    AudioGenerationMetadata,
    AudioGenerationOutput,
    AudioGenerationResponse,
    TTSContext,
)
from .contexts.status import GenerationStatus
from .contexts.text import TextContext
from .contexts.tokens import FUTURE_TOKEN, TokenBuffer
from .contexts.validators import (
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
    validate_image_shape_5d,
    validate_initial_prompt_has_image,
    validate_only_one_image,
    validate_requires_vision_context,
    validate_vision_position_ids,
)
from .contexts.vision import TextAndVisionContext
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
from .requests import build_wire_context, check_wire_context
from .sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)

__all__ = [
    "FUTURE_TOKEN",
    "AudioGenerationMetadata",
    "AudioGenerationOutput",
    "AudioGenerationResponse",
    "AudioGenerator",
    "BatchType",
    "BatonError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ConnectionLost",
    "DeadlineExceeded",
    "DecodeFailed",
    "DuplicateRequest",
    "EmbeddingsGenerator",
    "EmbeddingsOutput",
    "EndpointDead",
    "EndpointDraining",
    "EndpointUnknown",
    "GenerationOutput",
    "GenerationStatus",
    "HandoffFailed",
    "ImageMetadata",
    "InputError",
    "InternalError",
    "LimitExceeded",
    "LogProbabilities",
    "ModelMismatch",
    "OutputImageContent",
    "PixelContext",
    "ProtocolError",
    "Range",
    "RequestCancelled",
    "RequestFailed",
    "RequestID",
    "RequestPoisoned",
    "SamplingParams",
    "SamplingParamsGenerationConfigDefaults",
    "SamplingParamsInput",
    "SchedulerResult",
    "TTSContext",
    "TextAndVisionContext",
    "TextContext",
    "TextGenerationInputs",
    "TextGenerationOutput",
    "TokenBuffer",
    "VersionMismatch",
    "WorkerLost",
    "build_wire_context",
    "check_wire_context",
    "error_from_code",
    "msgpack_numpy_decoder",
    "msgpack_numpy_encoder",
    "reserve_token_space_for_batch",
    "update_batch",
    "validate_aspect_ratio_args",
    "validate_image_grid_thw_args",
    "validate_image_shape_5d",
    "validate_initial_prompt_has_image",
    "validate_only_one_image",
    "validate_requires_vision_context",
    "validate_vision_position_ids",
]
