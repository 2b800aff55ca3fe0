"""Limits that are checked before anything is allocated, all in one module."""

from __future__ import annotations

PROTOCOL_VERSION = 3

MAX_CONTROL_BYTES = 16 << 20
"""Largest first frame of a control message."""
MAX_DESCRIBED_BYTES = 64 << 20
"""Largest first frame from a router to a client, which may carry a model's text files."""
DESCRIBED_MARGIN = 1 << 20
"""Bytes of that frame reserved for everything except the files."""
INLINE_ARRAY_BYTES = 4096
"""Arrays of at least this size become separate frames; a smaller array is cheaper to copy."""
MAX_ARRAY_FRAMES = 64
"""Maximum array frames after one control message."""
MAX_KV_HEADER_BYTES = 256
MAX_KV_FRAME_BYTES = 16 << 20
"""Largest payload of one KV frame; larger ZeroMQ frames are much slower per byte."""
MAX_NAMED_BYTES = 1 << 40
"""Most bytes in the blocks that a KV frame names, if the receiver reads them in place."""
MAX_MESSAGES_PER_FRAME = 65_536
"""Maximum messages in one envelope."""
MAX_DEPTH = 32
"""Deepest nesting of a decoded message."""
MAX_ARRAY_NDIM = 8
MAX_ARRAY_BYTES = 1 << 30
MAX_SHARED_BYTES = 256 << 20
"""Maximum bytes of shared memory per message; further arrays travel in the message."""

MAX_REQUEST_ID_CHARS = 256
MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARS = 128
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
"""Maximum entries of a ``logit_bias``."""
MAX_EOS_TOKEN_IDS = 64
MAX_EOS_SEQUENCES = MAX_STOP_SEQUENCES + MAX_STOP_TOKEN_IDS
MAX_EOS_SEQUENCE_TOKENS = 128
MAX_LOG_PROBABILITIES = 20
MAX_TOP_K = 255
MAX_CONTEXT_TOKENS = 4 << 20
MAX_IMAGES = 1024
MAX_REQUEST_IMAGES = 60
"""Maximum images of a served request: with the tokens and the grids, each is an array frame."""
MAX_IMAGE_PIXEL_BYTES = MAX_CONTROL_BYTES
"""Largest pixels of one resized image: sockets accept no larger frame."""
MAX_PIXEL_BYTES = 64 << 20
"""Maximum bytes of the pixels of one request."""
MAX_VISION_TOKEN_IDS = 64
MAX_NAMED_ARRAYS = 64
"""Maximum named arrays in one context."""
MAX_PICTURE_SIDE = 4096
"""Largest width or height of a picture, in pixels."""
MAX_PICTURE_PIXELS = 4 << 20
MAX_PICTURE_STEPS = 250
MAX_PICTURE_PROMPT_TOKENS = 1024
"""Maximum tokens of each prompt for a picture."""
MAX_PREVIEWS = 16
"""Maximum previews of a picture."""
MAX_PREVIEW_PIXELS = 256 * 256
"""Most pixels of a preview: smaller than the picture if that has more."""
MAX_GUIDANCE = 1000.0
MAX_LATENT = 1e6
"""Largest latent of a request; noise has a variance of 1, and larger ones overflow in a model."""
MAX_CHUNK_BYTES = 1 << 20
"""Largest media of one token run."""
MAX_RESULT_BYTES = 14 << 20
"""Largest media of a terminal: the pixels of the largest picture, 3 bytes each, and some more."""
MAX_ENDPOINT_BYTES = 512
DEFAULT_DEADLINE_S = 600.0
MAX_DEADLINE_S = 86_400.0
MAX_CACHE_SALT_CHARS = 256
MAX_JSON_SCHEMA_CHARS = 128 << 10
MAX_JSON_SCHEMA_DEPTH = 64
MAX_PATTERN_TEXT_CHARS = 1 << 19
"""Maximum length of the shortest text that matches a ``pattern`` of a schema."""
"""Deepest nesting of brackets in a JSON schema."""

# Bounds of numbers and texts in messages. They are far above all valid values: a wrong value of
# a user must pass the decoder, so that the router can answer with an error that names it.
MAX_ATTEMPT = 1 << 31
MAX_RESUMED_ATTEMPT = 1 << 30
"""Highest attempt that a client may name in Resume; leaves room for the attempts after it."""
MAX_COUNT = 1 << 53
"""Largest number of tokens, blocks, frames or bytes."""
MAX_SIZE = 1 << 24
"""Largest dimension of a model."""
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 30
"""Longest context a model may declare."""
MAX_EMBEDDING_SIZE = 1 << 14
"""Maximum dimension of an embedding."""
MAX_FEATURES = 64
"""Maximum features that a worker names."""
MAX_DURATION_S = 1e9
MAX_NAME_CHARS = 4096
MAX_WORKER_NAME_CHARS = 256
MAX_CODE_CHARS = 64
"""Longest error code, status and transport: a router keeps those of many ended requests."""
MAX_TEXT_CHARS = 1 << 20
MAX_KEY_BYTES = 64
MAX_LIST_ITEMS = 1 << 20
MAX_POOL_CHARS = 256
MAX_LABELS = 32
"""Labels of a worker."""
MAX_DROP_REASONS = 64
MAX_EXTENSIONS = 8
"""Classes of users in one worker."""
MAX_EXTENSION_CHARS = 256
"""Characters of such a class's name, and of its last error."""
MAX_HISTOGRAMS = 16
"""Maximum histograms in a worker's report of its load."""
MAX_BUCKETS = 64
"""Maximum buckets of such a histogram."""
MAX_ROUTERS = 64
"""Maximum routers in a worker's report of its load."""
