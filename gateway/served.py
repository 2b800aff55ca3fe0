"""What the routes share: the client of the routers, the served model's name, the body's limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath

from starlette.requests import ClientDisconnect, Request

from ..client.async_client import AsyncClient
from ..client.model import ServedModel
from ..proto.errors import RequestCancelled
from .bodies import MAX_BODY_BYTES
from .errors import BodyTooLarge, ModelNotFound


@dataclass(slots=True)
class Served:
    """The cluster behind a gateway.

    ``names``: names of the model that requests may use, the first of which answers have; empty:
    the name by which the cluster knows the model.
    """

    client: AsyncClient
    names: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    _known: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def of(cls, request: Request) -> Served:
        """Return the cluster behind the gateway that got this request."""
        served: Served = request.app.state.served
        return served

    @property
    def name(self) -> str:
        """The model's name in answers; known after :meth:`model`."""
        return self._known[0]

    async def model(self, wanted: str | None = None) -> ServedModel:
        """Return the served model. Raises ModelNotFound if ``wanted`` is another one."""
        model = await self.client.model()
        own = model.card.name
        folder = PurePath(model.description.folder).name
        self._known = self.names or tuple(dict.fromkeys(name for name in (folder, own) if name))
        if wanted is not None and wanted not in self._known:
            raise ModelNotFound(f"the model {wanted[:200]!r} is not served; {self.name!r} is")
        return model


async def read_body(request: Request) -> bytes:
    """Read the body. Raises BodyTooLarge as soon as it exceeds the limit."""
    most = Served.of(request).max_body_bytes
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > most:
        raise BodyTooLarge(f"the body has {said} bytes, at most {most} are read")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise BodyTooLarge(f"the body has more than {most} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise RequestCancelled("the client has closed its connection") from None
    return b"".join(parts)
