"""The routes beside text: models, embeddings, tokens, health."""

from __future__ import annotations

import asyncio
import base64
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..client.model import encode, encode_chat
from ..proto.errors import BatonError
from .bodies import MAX_TEXTS, BodyReader, DetokenizeBody, EmbeddingBody, TokenizeBody
from .errors import ParameterError, RouteNotFound
from .parameters import list_of, messages_of
from .served import Served, read_body
from .streams import unless_gone

_STARTED = int(time.time())
_embedding_reader = BodyReader(EmbeddingBody)
_tokenize_reader = BodyReader(TokenizeBody)
_detokenize_reader = BodyReader(DetokenizeBody)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


# --------------------------------------------------------------------------- models


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    served = Served.of(request)
    return _json({"object": "list", "data": [await _card(served)]})


async def model(request: Request) -> Response:
    """``GET /v1/models/{name}``."""
    served = Served.of(request)
    await served.model(request.path_params["name"])
    return _json(await _card(served))


async def _card(served: Served) -> dict[str, Any]:
    found = await served.model()
    return {
        "id": served.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "baton",
        "max_model_len": found.card.max_length,
    }


# --------------------------------------------------------------------------- embeddings


async def embeddings(request: Request) -> Response:
    """``POST /v1/embeddings``."""
    served = Served.of(request)
    body = _embedding_reader.read(await read_body(request))
    if body.encoding_format not in (None, "float", "base64"):
        raise ParameterError("encoding_format must be float or base64", "encoding_format")
    found = await served.model(body.model)
    size = found.card.embedding_size
    if body.dimensions not in (None, size) and size:
        raise ParameterError(f"dimensions must be {size}, those of the model", "dimensions")
    texts = list_of(body.input, "input", MAX_TEXTS)

    def tokens() -> list[Any]:
        return [encode(one, found) if isinstance(one, str) else one for one in texts]

    prompts = await asyncio.to_thread(tokens)
    vectors = await unless_gone(request.receive, served.client.embed(prompts))
    as_text = body.encoding_format == "base64"
    count = sum(len(prompt) for prompt in prompts)
    return _json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": at, "embedding": _vector(vector, as_text)}
                for at, vector in enumerate(vectors)
            ],
            "model": served.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def _vector(vector: np.ndarray[Any, np.dtype[np.float32]], as_text: bool) -> str | list[float]:
    if not as_text:
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# --------------------------------------------------------------------------- tokens


async def tokenize(request: Request) -> Response:
    """``POST /tokenize``."""
    served = Served.of(request)
    body = _tokenize_reader.read(await read_body(request))
    found = await served.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("give either prompt or messages", "prompt")

    def work() -> dict[str, Any]:
        if body.messages is not None:
            variables = dict(body.chat_template_kwargs or {})
            if body.add_generation_prompt is not None:
                variables["add_generation_prompt"] = body.add_generation_prompt
            ids = encode_chat(messages_of(body.messages), found, variables)
        else:
            special = body.add_special_tokens is not False
            ids = encode(body.prompt or "", found, add_special_tokens=special)
        answer = {
            "tokens": ids.tolist(),
            "count": len(ids),
            "max_model_len": found.card.max_length,
        }
        if body.return_token_strs:
            token_bytes = found.tokenizer.token_bytes
            answer["token_strs"] = [token_bytes(one).decode("utf-8", "replace") for one in ids]
        return answer

    return _json(await asyncio.to_thread(work))


async def detokenize(request: Request) -> Response:
    """``POST /detokenize``."""
    served = Served.of(request)
    body = _detokenize_reader.read(await read_body(request))
    found = await served.model(body.model)
    text = await asyncio.to_thread(found.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return _json({"prompt": text})


# --------------------------------------------------------------------------- health


async def live(_: Request) -> Response:
    """``GET /live``: the gateway runs."""
    return _json({"status": "live"})


async def ready(request: Request) -> Response:
    """``GET /ready`` and ``GET /health``: 200 if a worker of each role is ready, else 503."""
    try:
        report = await Served.of(request).client.status(handoffs=0)
    except BatonError as error:
        return _json({"status": "not ready", "reason": str(error)}, 503)
    counts = {"prefill": 0, "decode": 0}
    for worker in report["workers"]:
        counts[worker["role"]] += worker["state"] == "ready"
    missing = [role for role, count in counts.items() if not count]
    if missing == ["decode"] and (await Served.of(request).model()).card.embedding_size:
        missing = []  # prefill workers alone serve an embedding model
    status = {"status": "not ready" if missing else "ready", "ready_workers": counts}
    return _json(status, 503 if missing else 200)


async def build(_: Request) -> Response:
    """``GET /version``."""
    try:
        return _json({"version": version("baton-serve")})
    except PackageNotFoundError:
        return _json({"version": "unknown"})


async def not_served(request: Request) -> Response:
    """Routes of models that no worker computes."""
    raise RouteNotFound(f"{request.url.path}: this cluster's model gives text, not this")
