"""The wire contract: contexts, sampling parameters, messages, codec, layouts and errors."""

from .audio import AudioGenerationMetadata, AudioGenerationOutput, AudioGenerationResponse
from .batch import (
    BatchType,
    TextGenerationInputs,
    reserve_token_space_for_batch,
    update_batch,
)
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
from .generators import AudioGenerator, EmbeddingsGenerator, EmbeddingsOutput
from .ids import RequestID
from .image_output import GenerationOutput, OutputImageContent
from .images import ImageMetadata
from .numpy_maps import msgpack_numpy_decoder, msgpack_numpy_encoder
from .outputs import LogProbabilities, SchedulerResult, TextGenerationOutput
from .pixels import PixelContext
from .ranges import Range
from .requests import build_wire_context, check_wire_context
from .sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)
from .speech import TTSContext
from .status import GenerationStatus
from .tokens import FUTURE_TOKEN, TokenBuffer
from .validators import (
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
    validate_image_shape_5d,
    validate_initial_prompt_has_image,
    validate_only_one_image,
    validate_requires_vision_context,
    validate_vision_position_ids,
)
from .vision import TextAndVisionContext

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
