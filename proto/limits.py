"""Caps checked before anything is allocated; one place, so an operator can read them all."""

from __future__ import annotations

PROTOCOL_VERSION = 3

MAX_CONTROL_BYTES = 16 << 20
"""Largest first frame of a control message."""
MAX_DESCRIBED_BYTES = 64 << 20
"""Largest first frame from a router to a client, which may carry a model's text files."""
DESCRIBED_MARGIN = 1 << 20
"""What of that frame is left for everything but the files."""
INLINE_ARRAY_BYTES = 4096
"""Arrays from this size on are frames of their own; below, a frame costs more than the copy."""
MAX_ARRAY_FRAMES = 64
"""Most array frames behind one control message."""
MAX_KV_HEADER_BYTES = 256
MAX_KV_FRAME_BYTES = 16 << 20
"""Largest payload of one KV frame; larger ZeroMQ frames collapse in speed."""
MAX_MESSAGES_PER_FRAME = 65_536
"""Most messages in one batch."""
MAX_DEPTH = 32
"""Deepest nesting of a decoded message."""
MAX_ARRAY_NDIM = 8
MAX_ARRAY_BYTES = 1 << 30
MAX_SHARED_BYTES = 256 << 20
"""Most shared memory that one message may name; larger arrays travel in the message."""

MAX_REQUEST_ID_CHARS = 256
MAX_MODEL_NAME_CHARS = 256
MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARS = 128
MAX_STOP_TOKEN_IDS = 64
MAX_EOS_TOKEN_IDS = 64
MAX_EOS_SEQUENCES = MAX_STOP_SEQUENCES + MAX_STOP_TOKEN_IDS
MAX_EOS_SEQUENCE_TOKENS = 128
MAX_LOG_PROBABILITIES = 20
MAX_TOP_K = 255
MAX_CONTEXT_TOKENS = 4 << 20
MAX_IMAGES = 1024
MAX_VISION_TOKEN_IDS = 64
MAX_NAMED_ARRAYS = 64
"""Most arrays by name in one context."""
MAX_ENDPOINT_BYTES = 512
DEFAULT_DEADLINE_S = 600.0
MAX_DEADLINE_S = 86_400.0
MAX_CACHE_SALT_CHARS = 256
MAX_JSON_SCHEMA_CHARS = 128 << 10
MAX_JSON_SCHEMA_DEPTH = 64
"""Deepest nesting of brackets in a JSON schema."""

# What numbers and texts of a message may be; far above what is ever right, so that what a user
# can ask wrongly still gets an answer that says so.
MAX_ATTEMPT = 1 << 31
MAX_RESUMED_ATTEMPT = 1 << 30
"""What a client may claim to have seen; leaves room for the attempts that follow."""
MAX_COUNT = 1 << 53
"""Largest number of tokens, blocks, frames or bytes."""
MAX_SIZE = 1 << 24
"""Largest dimension of a model."""
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 30
"""Longest context a model may declare."""
MAX_EMBEDDING_SIZE = 1 << 14
"""Most numbers of a vector."""
MAX_DURATION_S = 1e9
MAX_NAME_CHARS = 4096
MAX_TEXT_CHARS = 1 << 20
MAX_KEY_BYTES = 64
MAX_LIST_ITEMS = 1 << 20
MAX_POOL_CHARS = 256
MAX_DROP_REASONS = 64
MAX_ROUTERS = 64
"""Most routers a worker speaks of."""
