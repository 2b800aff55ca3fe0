"""``/openapi.json``: the routes as OpenAPI 3.1, from the types that decode their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from .field_rules import CHAT_REFUSED, EMBEDDINGS_REFUSED, REFUSED
from .images_route import IMAGES_REFUSED, ImagesBody
from .responses_bodies import RESPONSES_REFUSED, FunctionTool, ResponsesBody
from .speech_route import FORMATS, SPEECH_REFUSED, SpeechBody

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/audio/speech": SpeechBody,
    "/v1/images/generations": ImagesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""Types of the bodies by route."""
_EVENTS = "text/event-stream"
_MORE_REFUSED = {
    ChatBody: CHAT_REFUSED,
    EmbeddingBody: EMBEDDINGS_REFUSED,
    ResponsesBody: RESPONSES_REFUSED,
    SpeechBody: SPEECH_REFUSED,
    ImagesBody: IMAGES_REFUSED,
}
_REF = "#/components/schemas/{name}"
_TEXT = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_IMAGE = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "required": ["url"],
            "properties": {
                "url": {"type": "string"},
                "detail": {"enum": ["auto", "low", "high", None]},
            },
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"type": ["string", "array", "null"], "items": {"anyOf": [_TEXT, _IMAGE]}},
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    """``GET /openapi.json``."""
    return Response(request.app.state.openapi, media_type="application/json")


def encoded(routes: Iterable[Route]) -> bytes:
    """Return the description of these routes as JSON."""
    return msgspec.json.encode(document(routes))


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the description of these routes."""
    kinds = (*BODIES.values(), FunctionTool)
    (*references, tool), schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = dict(zip(BODIES, references, strict=True))
    for kind in set(BODIES.values()):
        _show_refused(schemas[kind.__name__]["properties"], kind)
    for one in schemas.values():
        one.pop("additionalProperties", None)  # an unknown field is ignored, with a warning
    schemas["ChatBody"]["properties"]["messages"]["items"] = _MESSAGE
    for one in schemas["ResponsesBody"]["properties"]["tools"]["anyOf"]:
        if one["type"] == "array":
            one["items"] = tool
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in (route.methods or set()) - {"HEAD"}:
            operations = paths.setdefault(path, {})
            operations[method.lower()] = _operation(method, path, bodies.get(path))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _show_refused(properties: dict[str, Any], kind: type[Body]) -> None:
    """Show the values with which refused fields are accepted."""
    for name, (neutral, reason) in {**REFUSED, **_MORE_REFUSED.get(kind, {})}.items():
        if name in properties:
            properties[name] = {"enum": [None, *neutral], "description": reason, "default": None}


def _operation(method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", method.lower() + path).rstrip("_"),
        "responses": {
            "200": {"description": "the answer", "content": answer},
            "default": {"description": "an error", "content": error},
        },
    }
    if path == "/metrics":
        answer = {"text/plain": {"schema": {"type": "string"}}}
        found["responses"]["200"]["content"] = answer
    if path == "/":
        found["responses"]["307"] = {"description": "the dashboard, for a browser"}
    if path.startswith("/dashboard"):
        text: dict[str, Any] = {"text/html": {"schema": {"type": "string"}}}
        # Without a schema: OpenAPI 3.1 has none for single events, and tools read it as theirs.
        found["responses"]["200"]["content"] = text if path == "/dashboard" else {_EVENTS: {}}
    if path == "/v1/audio/speech":
        audio: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
        found["responses"]["200"]["content"] = {kind.decode(): audio for kind in FORMATS.values()}
    if path in ("/health", "/ready"):
        found["responses"]["503"] = {"description": "not ready", "content": answer}
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        if "stream" in BODIES[path].__struct_fields__:
            answer[_EVENTS] = {}
    return found
