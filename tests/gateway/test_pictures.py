"""``/v1/images/generations``: a real router and native client, a scripted worker that draws."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from baton.client.async_client import AsyncClient
from baton.client.options import BATCH_RETRIES
from baton.gateway.app import ROUTES, make_app
from baton.gateway.bodies import BodyReader
from baton.gateway.errors import ParameterError
from baton.gateway.images_route import IMAGES_IGNORED, IMAGES_REFUSED, ImagesBody
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.openapi import document
from baton.gateway.served import Served
from baton.proto.contexts.pixels import decode_png, encode_png

from ..client.conftest import Cluster, Playback
from ..client.test_pictures import FLUX, PAINTER, pixels_of, preview_of

PATH = "/v1/images/generations"
TINY = {"prompt": "a red house", "size": "32x16", "steps": 2}
DOCUMENTED = {
    "prompt", "background", "model", "moderation", "n", "output_compression", "output_format",
    "partial_images", "quality", "response_format", "size", "stream", "style", "user",
}  # fmt: skip
"""Parameters that OpenAI documents for this route."""


def draw(playback: Playback) -> bytes:
    return encode_png(pixels_of(playback))


@pytest.fixture(scope="module")
def painter(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("painter"), FLUX, PAINTER)
    cluster.prefill.answer = lambda position: position
    cluster.prefill.media = draw
    cluster.prefill.preview = preview_of
    cluster.start()
    yield cluster
    cluster.end()


class Fuzz:
    """Bodies whose fields have values of wrong types and sizes, and some without valid JSON."""

    FIELDS = (*ImagesBody.__struct_fields__, "foo")
    VALUES = (
        None, True, False, 0, 1, -1, 2, 16, 10**6, 2**64, -(2**63), 1.5, -0.0, 1e300, "", "16x16",
        "0x16", "png", "url", "a" * 70_000, "\0", "\U0001f600", [], {}, ["a"], {"a": 1}, "high",
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self) -> bytes:
        """Return the next body; none asks for a large picture."""
        pick = self._random
        fields: dict[str, Any] = {"prompt": "a", "size": "16x16", "steps": 1}
        for _ in range(pick.randrange(4)):
            fields[pick.choice(self.FIELDS)] = pick.choice(self.VALUES)
        fields["size"] = fields["size"] or "16x16"
        content = json.dumps(fields).encode()
        return content[: pick.randrange(len(content))] if pick.random() < 0.05 else content


def post(
    cluster: Cluster, body: Any, path: str = PATH, *, counts: GatewayMetrics | None = None,
    leave: bool = False,
) -> tuple[int, Any]:  # fmt: skip
    """Return status and JSON of an answer; ``leave``: close the connection once a step is done."""
    sent: list[dict[str, Any]] = []
    content = [body if isinstance(body, bytes) else json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if content:
            return {"type": "http.request", "body": content.pop(), "more_body": False}
        while not (leave and cluster.prefill.running):
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": b"/",
        "query_string": b"", "headers": [(b"x-request-id", b"mine")], "scheme": "http",
        "server": None, "client": None, "root_path": "",
    }  # fmt: skip

    async def run() -> None:
        async with AsyncClient(cluster.address) as client:
            await make_app(Served(client), counts=counts)(scope, receive, send)

    asyncio.run(asyncio.wait_for(run(), 60))
    text = b"".join(part.get("body", b"") for part in sent)
    if dict(sent[0]["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
        return sent[0]["status"], events_of(text.decode())
    return sent[0]["status"], json.loads(text) if text else None


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the contents of server-sent events; each has the name of its type."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def refused(cluster: Cluster, **changed: Any) -> tuple[str, str]:
    count = len(cluster.prefill.assigned)
    status, answer = post(cluster, {**TINY, **changed})
    assert status == 400, answer
    assert len(cluster.prefill.assigned) == count
    return answer["error"]["param"], answer["error"]["message"]


def test_a_picture_in_openais_shape(painter):
    counts = GatewayMetrics()
    status, answer = post(painter, {**TINY, "seed": 5, "user": "me"}, counts=counts)
    assert status == 200, answer
    (one,) = answer["data"]
    png = base64.b64decode(one["b64_json"])
    expected = np.random.default_rng(5).integers(0, 256, (16, 32, 3), np.uint8)
    assert np.array_equal(decode_png(png), expected)
    assert one["seed"] == 5
    assert (answer["size"], answer["output_format"], answer["background"]) == (
        "32x16", "png", "opaque",
    )  # fmt: skip
    usage = answer["usage"]
    assert usage["output_tokens"] == 2
    assert usage["input_tokens"] == usage["input_tokens_details"]["text_tokens"] > 2
    assert usage["total_tokens"] == usage["input_tokens"] + 2
    assert counts.requests == {(PATH, "200"): 1}


def test_previews_are_events_before_the_picture(painter):
    body = {**TINY, "steps": 6, "seed": 5, "stream": True}
    status, events = post(painter, {**body, "partial_images": 2})
    assert status == 200
    assert [one["type"] for one in events] == 2 * ["image_generation.partial_image"] + [
        "image_generation.completed"
    ]
    assert [one.get("partial_image_index") for one in events] == [0, 1, None]
    shades = [int(decode_png(base64.b64decode(one["b64_json"]))[0, 0, 0]) for one in events[:2]]
    assert shades == [2, 4]
    whole = post(painter, {**TINY, "steps": 6, "seed": 5})[1]
    assert events[-1]["b64_json"] == whole["data"][0]["b64_json"]
    assert (events[-1]["usage"], events[-1]["size"]) == (whole["usage"], "32x16")
    (only,) = post(painter, body)[1]
    assert only == {**events[-1], "created_at": only["created_at"]}


def test_several_pictures_have_seeds_that_follow_each_other(painter):
    status, answer = post(painter, {**TINY, "n": 3, "seed": 2**64 - 2})
    assert status == 200
    assert [one["seed"] for one in answer["data"]] == [2**64 - 2, 2**64 - 1, 0]
    assert len({one["b64_json"] for one in answer["data"]}) == 3
    assert answer["usage"]["output_tokens"] == 6
    names = {one.request_id for one in painter.prefill.assigned[-3:]}
    assert len(names) == 3
    assert all("img-mine-" in name for name in names)


def test_a_full_cluster_refuses_the_first_picture_alone(painter, monkeypatch):
    image, retries = AsyncClient.image, []

    async def noted(client, prompt, **options):
        retries.append(options.get("max_retries"))
        return await image(client, prompt, **options)

    monkeypatch.setattr(AsyncClient, "image", noted)
    assert post(painter, {**TINY, "n": 3})[0] == 200
    assert retries == [None, BATCH_RETRIES, BATCH_RETRIES]


def test_without_a_seed_pictures_differ(painter):
    (one,), (two,) = (post(painter, TINY)[1]["data"] for _ in range(2))
    assert one["seed"] != two["seed"]


def test_the_fields_reach_the_request(painter):
    body = {**TINY, "guidance_scale": 2.5, "negative_prompt": "blue", "true_cfg_scale": 3}
    assert post(painter, body)[0] == 200
    context = painter.prefill.assigned[-1].context
    assert (context.guidance_scale, context.true_cfg_scale) == (2.5, 3.0)
    assert (context.num_inference_steps, context.width, context.height) == (2, 32, 16)
    assert context.negative_tokens is not None


def test_neutral_values_are_accepted(painter):
    neutral = {name: values[0] for name, (values, _) in IMAGES_REFUSED.items() if values}
    assert post(painter, {**TINY, **neutral, "style": None, "model": "flux"})[0] == 200


@pytest.mark.parametrize("leaves_after", [1, 3])
def test_a_client_that_leaves_frees_its_requests(painter, leaves_after):
    body = {**TINY, "steps": 250, "n": leaves_after}
    status, _ = post(painter, body, leave=True)
    assert status == 499
    for _ in range(2000):
        if not painter.prefill.running:
            break
        painter.prefill.call(lambda: None)
    assert not painter.prefill.running


WRONG = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "  "}),
    ("prompt", {"prompt": "a" * 10**6}),
    ("prompt", {"prompt": 5}),
    ("n", {"n": 0}),
    ("n", {"n": 11}),
    ("n", {"n": 5, "size": "2048x2048"}),
    ("size", {"size": "1000x1000"}),
    ("size", {"size": "0x0"}),
    ("size", {"size": "99999x16"}),
    ("size", {"size": "4096x4096"}),
    ("size", {"size": "big"}),
    ("size", {"size": "16x16x16"}),
    ("size", {"size": "-16x16"}),
    ("size", {"size": "\uff11\uff16x16"}),
    ("steps", {"steps": 0}),
    ("steps", {"steps": 10**6}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**64}),
    ("guidance_scale", {"guidance_scale": -1}),
    ("guidance_scale", {"guidance_scale": 1e30}),
    ("true_cfg_scale", {"true_cfg_scale": 2}),
    ("true_cfg_scale", {"true_cfg_scale": 1, "negative_prompt": "a"}),
    ("negative_prompt", {"negative_prompt": "a" * 10**6}),
    ("response_format", {"response_format": "path"}),
    ("response_format", {"response_format": "url", "stream": True}),
    ("output_format", {"output_format": "jpeg"}),
    ("background", {"background": "transparent"}),
    ("stream", {"stream": "yes"}),
    ("n", {"stream": True, "n": 2}),
    ("size", {"stream": True, "size": "1000x1000"}),
    ("seed", {"stream": True, "seed": -1}),
    ("partial_images", {"partial_images": 2}),
    ("partial_images", {"stream": True, "partial_images": 17}),
]


@pytest.mark.parametrize(("name", "changed"), WRONG, ids=lambda one: str(one)[:40])
def test_wrong_fields_are_named(painter, name, changed):
    parameter, message = refused(painter, **changed)
    assert parameter == name
    assert name in message


def test_mutated_bodies_get_typed_errors(painter):
    """No body is an internal error, and each refusal has a text."""
    fuzz, found = Fuzz(5), set()
    for _ in range(100):
        body = fuzz.body()
        status, answer = post(painter, body)
        found.add(status)
        assert status in (200, 400, 404), (body[:200], answer)
        if isinstance(answer, list):
            assert answer[-1]["type"] == "image_generation.completed"
        else:
            assert answer["data"] if status == 200 else answer["error"]["message"]
    assert found >= {200, 400}


def test_nan_is_not_json(painter):
    status, answer = post(painter, {**TINY, "guidance_scale": float("nan")})
    assert (status, answer["error"]["code"]) == (400, "input")


def test_another_model_is_not_found(painter):
    status, answer = post(painter, {**TINY, "model": "dall-e-3"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_picture_model_generates_no_text(painter, path, body):
    status, answer = post(painter, body, path)
    assert (status, answer["error"]["code"]) == (400, "task_mismatch")
    assert "is a picture model" in answer["error"]["message"]


def test_a_text_model_draws_nothing(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.start()
    try:
        status, answer = post(cluster, TINY)
    finally:
        cluster.end()
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert answer["error"]["message"] == f"{PATH}: this cluster serves no picture model"


IGNORED = {
    "quality": "hd", "style": "vivid", "moderation": "high", "output_compression": 50, "image": "x",
    "user": "me",
}  # fmt: skip


def test_what_changes_no_pixel_is_named_among_the_warnings(painter):
    status, answer = post(painter, {**TINY, **IGNORED})
    assert status == 200, answer
    assert {one.split(" ")[0] for one in answer["warnings"]} == IGNORED.keys()
    status, events = post(painter, {**TINY, "stream": True, "quality": "high"})
    (warning,) = events[-1]["warnings"]
    assert warning == "quality is ignored: use steps"
    assert "warnings" not in post(painter, TINY)[1]


def test_a_url_is_a_data_url(painter):
    status, answer = post(painter, {**TINY, "seed": 5, "response_format": "url"})
    assert status == 200, answer
    (one,) = answer["data"]
    kind, _, content = one["url"].partition(",")
    assert (kind, one.keys()) == ("data:image/png;base64", {"url", "seed"})
    again = post(painter, {**TINY, "seed": 5, "response_format": "b64_json"})[1]["data"][0]
    assert again["b64_json"] == content


@pytest.mark.parametrize("size", [{}, {"size": "auto"}, {"size": None}], ids=str)
def test_without_a_size_it_is_the_models_own(painter, size):
    tiny = {name: value for name, value in TINY.items() if name != "size"}
    status, answer = post(painter, {**tiny, **size})
    assert (status, answer["size"]) == (200, "32x32"), answer


def test_every_documented_parameter_is_known():
    assert set(ImagesBody.__struct_fields__) >= DOCUMENTED


def test_the_page_has_every_field():
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    section = page.split("\n## Pictures\n")[1].split("\n## ")[0]
    for name in ImagesBody.__struct_fields__:
        assert f"`{name}`" in section, name


@pytest.mark.parametrize("changed", [{}, *(one for _, one in WRONG)], ids=str)
def test_openapi_refuses_no_good_body(changed):
    """What the description refuses, the reader refuses too."""
    schemas = document(ROUTES)["components"]["schemas"]
    whole = {**schemas["ImagesBody"], "components": {"schemas": schemas}}
    described = jsonschema.Draft202012Validator(whole).is_valid({**TINY, **changed})
    try:
        BodyReader(ImagesBody, IMAGES_REFUSED, IMAGES_IGNORED).read(
            json.dumps({**TINY, **changed}).encode()
        )
    except ParameterError:
        assert not described
    else:
        assert described
