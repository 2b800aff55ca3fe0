"""The routes beside text: models, embeddings, tokens, health and metrics."""

from __future__ import annotations

import asyncio
import base64
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from baton.client.model import encode, encode_chat
from baton.proto.errors import BatonError
from baton.runtime.metrics.exposition import CONTENT_TYPE, exposition
from baton.runtime.metrics.families import Family
from baton.runtime.metrics.vllm import vllm_families

from .bodies import MAX_TEXTS, BodyReader, DetokenizeBody, EmbeddingBody, TokenizeBody, Warnings
from .errors import ParameterError
from .field_rules import EMBEDDINGS_IGNORED, EMBEDDINGS_REFUSED
from .messages import Unknown, messages_of
from .metrics import GatewayMetrics
from .parameters import list_of
from .served import Served, header_of, name_of, origin_of, read_body, target_of
from .streams import unless_gone
from .tools import tools_of

ROUTER_TIMEOUT_S = 2.0
"""Seconds to wait for the router's metrics; without an answer only the gateway's are shown."""
STATUS_TIMEOUT_S = 5.0
"""Seconds to wait for the router's status."""
STATUS_ONLY = "baton.status_only"
"""In the scope of a probe without a key, whose answer must not show more than the status."""
_STARTED = int(time.time())
_embedding_reader = BodyReader(EmbeddingBody, EMBEDDINGS_REFUSED, EMBEDDINGS_IGNORED)
_tokenize_reader = BodyReader(TokenizeBody)
_detokenize_reader = BodyReader(DetokenizeBody)
_CHAT_FIELDS = ("add_generation_prompt", "chat_template_kwargs", "tools")
"""Fields of ``/tokenize`` that only messages use."""
_PROMPT_FIELDS = ("add_special_tokens",)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _shown(warnings: Warnings) -> dict[str, Any]:
    return {"warnings": warnings} if warnings else {}


# --------------------------------------------------------------------------- models


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    served = Served.of(request)
    await served.model()
    cards = [await _card(served, name) for name in served.all_names]
    return _json({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    """``GET /v1/models/{name}``."""
    served = Served.of(request)
    name = request.path_params["name"]
    await served.model(name)
    return _json(await _card(served, name))


async def _card(served: Served, name: str) -> dict[str, Any]:
    found = await served.model()
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "baton",
        "max_model_len": found.card.max_length,
    }


# --------------------------------------------------------------------------- embeddings


async def embeddings(request: Request) -> Response:
    """``POST /v1/embeddings``."""
    served = Served.of(request)
    body, warnings = _embedding_reader.read(
        await read_body(request), strict=served.strict_parameters
    )
    if body.encoding_format not in (None, "float", "base64"):
        raise ParameterError("encoding_format must be float or base64", "encoding_format")
    found = await served.text_model(body.model)
    size = found.card.embedding_size
    if body.dimensions not in (None, size) and size:
        raise ParameterError(f"dimensions must be {size}, those of the model", "dimensions")
    texts = list_of(body.input, "input", MAX_TEXTS)

    def tokens() -> list[Any]:
        return [encode(one, found) if isinstance(one, str) else one for one in texts]

    prompts = await asyncio.to_thread(tokens)
    options = origin_of(request) | target_of(request)
    options["request_id"] = name_of("embd", request)
    vectors = await unless_gone(request.receive, served.client.embed(prompts, **options))
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
            **_shown(warnings),
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
    body, warnings = _tokenize_reader.read(
        await read_body(request), strict=served.strict_parameters
    )
    found = await served.text_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("give either prompt or messages", "prompt")
    is_chat = body.prompt is None
    without = "prompt" if is_chat else "messages"
    for name in _PROMPT_FIELDS if is_chat else _CHAT_FIELDS:
        if getattr(body, name) is not None:
            raise ParameterError(f"{name} needs {without}", name)

    unknown = Unknown(strict=served.strict_parameters)

    def work() -> dict[str, Any]:
        if body.messages is not None:
            variables = dict(body.chat_template_kwargs or {})
            if body.add_generation_prompt is not None:
                variables["add_generation_prompt"] = body.add_generation_prompt
            if (tools := tools_of(body.tools, None, None)) is not None:
                variables["tools"] = tools.definitions
            ids = encode_chat(messages_of(body.messages, unknown=unknown), found, variables)
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

    answer = await asyncio.to_thread(work)
    return _json(answer | _shown(warnings + unknown.warnings))


async def detokenize(request: Request) -> Response:
    """``POST /detokenize``."""
    served = Served.of(request)
    body, warnings = _detokenize_reader.read(
        await read_body(request), strict=served.strict_parameters
    )
    found = await served.text_model(body.model)
    count, most = len(body.tokens), found.card.max_length
    if count > most:  # the time to decode a body full of token ids is most of a second
        raise ParameterError(f"too many tokens: {count}, limit {most}", "tokens")
    size = found.card.vocab_size
    if (largest := max(body.tokens, default=0)) >= size:
        text = f"tokens: token id {largest} is outside the vocabulary of {size}"
        raise ParameterError(text, "tokens")
    text = await asyncio.to_thread(found.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return _json({"prompt": text, **_shown(warnings)})


# --------------------------------------------------------------------------- health


async def live(_: Request) -> Response:
    """``GET /live``: the gateway runs."""
    return _json({"status": "live"})


async def ready(request: Request) -> Response:
    """``GET /ready`` and ``GET /health``: 200 if a worker of each role is ready, else 503."""
    readiness: Readiness = request.app.state.readiness
    is_ready, details = await readiness.of(Served.of(request))
    status = {"status": "ready" if is_ready else "not ready"}
    shown = status if STATUS_ONLY in request.scope else status | details
    return _json(shown, 200 if is_ready else 503)


class Readiness:
    """Whether the cluster is ready. Requests at the same time share one query to the router.

    So probes without a key load the router no more than one client that asks again and again.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[tuple[bool, dict[str, Any]]] | None = None

    async def of(self, served: Served) -> tuple[bool, dict[str, Any]]:
        """Return it, and the ready workers by role or why the router was not reached."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._ask(served))
        return await asyncio.shield(self._task)

    async def _ask(self, served: Served) -> tuple[bool, dict[str, Any]]:
        try:
            report = await served.client.status(handoffs=0, timeout=STATUS_TIMEOUT_S)
        except BatonError as error:
            return False, {"reason": str(error)}
        counts = {"prefill": 0, "decode": 0}
        for worker in report["workers"]:
            counts[worker["role"]] += worker["state"] == "ready"
        return bool(report["router"]["serving"]), {"ready_workers": counts}


# --------------------------------------------------------------------------- metrics


async def metrics(request: Request) -> Response:
    """``GET /metrics``: the gateway's metrics for Prometheus, optionally under vLLM's names too."""
    own: GatewayMetrics = request.app.state.metrics
    families = own.families()
    served = Served.of(request)
    if served.vllm_metrics:
        families += vllm_families([*families, *await _of_router(served)])
    text = await asyncio.to_thread(exposition, families)
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _of_router(served: Served) -> list[Family]:
    try:
        report: dict[str, Any] = await served.client.status(
            handoffs=0, metrics=True, timeout=ROUTER_TIMEOUT_S
        )
        return msgspec.convert(report.get("metrics", []), list[Family])
    except (BatonError, msgspec.ValidationError):  # JSON has no infinity: a worker's becomes null
        return []


# --------------------------------------------------------------------------- rest


async def root(request: Request) -> Response:
    """``GET /``: lead a browser to the dashboard, and name the routes to a program."""
    if "text/html" in header_of(request, b"accept"):
        return RedirectResponse("/dashboard")
    paths = {"models": "/v1/models", "openapi": "/openapi.json", "dashboard": "/dashboard"}
    return _json({"server": "baton", **paths, "ready": "/ready", "metrics": "/metrics"})


async def build(_: Request) -> Response:
    """``GET /version``."""
    try:
        return _json({"version": version("baton-serve")})
    except PackageNotFoundError:
        return _json({"version": "unknown"})
