"""What the routes share: the client of the routers, the served model's name, the body's limit."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from starlette.requests import Request

from baton.client.async_client import AsyncClient
from baton.client.images import data_url_content
from baton.client.model import ServedModel
from baton.client.options import RequestOptions
from baton.images.processor import MAX_IMAGE_BYTES, ScaledImage
from baton.proto.errors import InputError, RequestCancelled
from baton.proto.layout import model_name
from baton.proto.limits import MAX_REQUEST_ID_CHARS, MAX_REQUEST_IMAGES
from baton.proto.trace_context import parse_traceparent

from .bodies import MAX_BODY_BYTES
from .chat_plan import ChatPlanner
from .errors import BodyTooLarge, BodyTooSlow, GatewayBusy, ModelNotFound, ParameterError
from .exchange import Exchange, WriteBatch
from .image_fetch import ImageFetcher
from .messages import ImageUrl

MAX_UNFINISHED_BYTES = 256 << 20
"""Of all bodies that are still arriving."""
BODY_TIMEOUT_S = 60.0
"""A body must arrive within this time."""

TARGET_HEADER = b"x-target-endpoint"
"""Address of the worker that shall serve a request."""
_RANDOM_CHARS = 24
_OWN = f"{random.getrandbits(128):032x}"
"""Of this process, since a random number for each name takes three times as long."""
_names = count(random.getrandbits(36))


@dataclass(slots=True)
class Served:
    """The cluster that a gateway serves.

    ``names``: names of the model that requests may use, the first of which answers have; empty:
    the name by which the cluster knows the model. ``gateway``: name of this gateway.
    ``router_clients``: a client for each router if there are several; empty: ``client`` is enough.
    ``fetcher``: fetches images of other URLs than data URLs; None: they are refused.
    ``unfinished_bytes``: of all bodies that are still arriving. ``vllm_metrics``: ``/metrics`` has
    vLLM's names too. ``strict_parameters``: fields without effect are refused instead of ignored.
    ``writes``: holds events while a message of the router is handled.
    """

    client: AsyncClient
    names: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    gateway: str = "gateway"
    unfinished_bytes: int = 0
    planner: ChatPlanner = field(default_factory=ChatPlanner)
    fetcher: ImageFetcher | None = None
    vllm_metrics: bool = False
    strict_parameters: bool = False
    router_clients: tuple[AsyncClient, ...] = ()
    writes: WriteBatch = field(default_factory=WriteBatch)
    _known: tuple[str, ...] = field(default=(), init=False)
    _model: ServedModel | None = field(default=None, init=False)

    async def images(self, model: ServedModel, urls: Sequence[ImageUrl]) -> list[ScaledImage]:
        """Return the encoded images of a request's URLs.

        The bytes of fetched images count as held as long as these objects exist. Raises
        ParameterError, ImageHostRefused, ImageNotFetched, GatewayBusy.
        """
        if urls and not model.takes_images:
            raise ParameterError(f"the model {self.name!r} takes no images", urls[0].place)
        if len(urls) > MAX_REQUEST_IMAGES:
            text = f"{len(urls)} images, at most {MAX_REQUEST_IMAGES} are allowed"
            raise ParameterError(text, urls[MAX_REQUEST_IMAGES].place)
        images: list[ScaledImage] = []
        try:
            for one in urls:
                left = MAX_IMAGE_BYTES - sum(len(image.content) for image in images)
                images.append(await self._image(one, left))
        except BaseException:
            images.clear()  # the error's traceback refers to the list
            raise
        return images

    async def _image(self, url: ImageUrl, left: int) -> ScaledImage:
        """Return one encoded image. ``left``: bytes that may be fetched for the request."""
        try:
            if url.url.startswith("data:"):
                content = await asyncio.to_thread(data_url_content, url.url)
                return ScaledImage(content, url.max_side)
            fetcher = self.fetcher or ImageFetcher(())
            image = ScaledImage(await fetcher.fetch(url.url, left), url.max_side)
            weakref.finalize(image, fetcher.release, len(image.content))
            return image
        except InputError as error:
            if type(error) is InputError:
                raise ParameterError(f"{url.place}: {error}", url.place) from None
            raise

    @classmethod
    def of(cls, request: Request) -> Served:
        """Return the cluster of the gateway that received this request."""
        served: Served = request.scope["app"].served
        return served

    @property
    def name(self) -> str:
        """The model's name in answers; known after :meth:`model`."""
        return self._known[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that requests may use; known after :meth:`model`."""
        return self._known

    async def model(self, wanted: str | None = None) -> ServedModel:
        """Return the served model. Raises ModelNotFound if ``wanted`` is another one."""
        model = await self.client.model()
        if model is not self._model:
            folder, own = model_name(model.description.folder), model.card.name
            self._known = self.names or tuple(dict.fromkeys(name for name in (folder, own) if name))
            self._model = model
        if wanted is not None and wanted not in self._known:
            raise ModelNotFound(f"the model {wanted[:200]!r} is not served; {self.name!r} is")
        return model

    async def text_model(self, wanted: str | None = None) -> ServedModel:
        """Return the served model as :meth:`model`. Raises TaskMismatch if it draws pictures."""
        model = await self.model(wanted)
        model.check_text()
        return model

    async def generating_model(self, wanted: str | None = None) -> ServedModel:
        """Return the served model as :meth:`model`. Raises TaskMismatch if it generates no text.

        Else the first error of an embedding model would be its missing chat template.
        """
        model = await self.model(wanted)
        model.check_generates()
        return model


def origin_of(request: Request) -> RequestOptions:
    """Return the options that name a native request's origin: gateway and trace."""
    options: RequestOptions = {"gateway": Served.of(request).gateway}
    given = header_of(request, b"traceparent")
    trace = parse_traceparent(given) if given else None
    if trace is not None:  # an invalid header is ignored, as W3C Trace Context asks for
        options["traceparent"] = trace.traceparent
    return options


def target_of(request: Request) -> RequestOptions:
    """Return the options that name the worker which the HTTP client has chosen, if it has."""
    target = header_of(request, TARGET_HEADER)
    return {"target_endpoint": target} if target else {}


def header_of(request: Request, name: bytes) -> str:
    """Return the first value of a header, or empty text. ``name``: in lower case.

    Starlette's mapping of the headers takes five times as long.
    """
    exchange = Exchange.find(request.scope)
    if exchange is not None and exchange.fields:
        return exchange.fields.get(name, b"").decode("latin-1")
    for found, value in request.scope["headers"]:
        if found == name:
            text: str = value.decode("latin-1")
            return text
    return ""


async def read_body(request: Request) -> bytes:
    """Read the body. Raises BodyTooLarge or GatewayBusy as soon as it exceeds a limit."""
    served = Served.of(request)
    exchange = Exchange.find(request.scope)
    body = None if exchange is None else exchange.take_body()
    if body is not None:  # nearly always; a timer and a coroutine take longer than all other reads
        _check_size(len(body), served)
        return body
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            message = await request.receive()
            part: bytes = message.get("body", b"")
            if not message.get("more_body") and message["type"] == "http.request":
                _check_size(len(part), served)
                return part
            length = header_of(request, b"content-length")
            _check_size(int(length) if length.isdigit() else 0, served)
            while True:
                if message["type"] != "http.request":
                    raise RequestCancelled("the client has closed its connection")
                part = message.get("body", b"")
                size += len(part)
                served.unfinished_bytes += len(part)
                _check_size(size, served)
                if served.unfinished_bytes > MAX_UNFINISHED_BYTES:
                    raise GatewayBusy("too many bytes of unfinished bodies", retry_after=1.0)
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
                message = await request.receive()
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    finally:
        served.unfinished_bytes -= size


def _check_size(size: int, served: Served) -> None:
    most = served.max_body_bytes
    if size > most:
        raise BodyTooLarge(f"the body has at least {size} bytes, at most {most} are read")


def name_of(kind: str, request: Request) -> str:
    """Return the native request's id, which contains the X-Request-Id of the response."""
    own = header_of(request, b"x-request-id")
    room = MAX_REQUEST_ID_CHARS - len(kind) - _RANDOM_CHARS - 8
    return f"{kind}-{own[:room]}-{random_name(_RANDOM_CHARS)}"


def random_name(chars: int) -> str:
    """Return hexadecimal characters that differ each time. They need not be secret."""
    return f"{_OWN[: chars - 10]}{next(_names):010x}"
