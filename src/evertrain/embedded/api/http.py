"""Bodies in, answers out: limits, media types, and streams that end when the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evertrain import aio
from evertrain.embedded.api.protobuf import MEDIA as PROTOBUF
from evertrain.embedded.api.protobuf import NotReadable, read_protobuf
from evertrain.embedded.api.status import not_acceptable, too_large, unsupported_media_type
from evertrain.embedded.schema import Decoded, Refused, decode
from evertrain.kube.port import Object

MAX_BODY = 3 << 20
_MAX_DRAINED = 64 << 20
"""Of a body that is too large so much is read on, so that the client, still writing, gets to see the answer."""
_BODY_SECONDS = 60.0
_LATE_SECONDS = 30.0
_YAML_IN_THREAD = 16 << 10
JSON = "application/json"
YAML = "application/yaml"
OBJECTS = (JSON, YAML, PROTOBUF)
"""Media types of bodies that are objects."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accepted:
    """How the client wants its answer."""

    media: str = JSON
    form: str = ""
    """Table, PartialObjectMetadata, PartialObjectMetadataList, APIGroupDiscoveryList or empty."""
    version: str = ""

    @property
    def content_type(self) -> str:
        if self.form == "APIGroupDiscoveryList":
            return f"{JSON};g=apidiscovery.k8s.io;v={self.version};as={self.form}"
        return self.media


PLAIN = Accepted()
_FORMS = {
    ("Table", "meta.k8s.io"): ("v1", "v1beta1"),
    ("PartialObjectMetadata", "meta.k8s.io"): ("v1",),
    ("PartialObjectMetadataList", "meta.k8s.io"): ("v1",),
    ("APIGroupDiscoveryList", "apidiscovery.k8s.io"): ("v2", "v2beta1"),
}


def accepted(header: str, *, forms: Sequence[str] = ()) -> Accepted:
    """The first of the client's wishes that can be met. Raises Refused (406)."""
    for wish in header.split(",") if header.strip() else ("*/*",):
        media, *parameters = (part.strip() for part in wish.split(";"))
        values = dict(part.partition("=")[::2] for part in parameters)
        form = values.get("as", "")
        if media in ("*/*", "application/*"):
            media = JSON
        if media not in (JSON, YAML, "text/plain"):
            continue
        if not form:
            return Accepted(JSON if media == "text/plain" else media)
        versions = _FORMS.get((form, values.get("g", "")), ())
        if form in forms and values.get("v") in versions and media == JSON:
            return Accepted(media, form, values["v"])
    raise not_acceptable(JSON, YAML)


async def read_body(request: Request) -> bytes:
    """Raises Refused (413, 408)."""
    pieces: list[bytes] = []
    size = 0
    try:
        async with aio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= MAX_BODY:
                    pieces.append(piece)
                elif size > _MAX_DRAINED:
                    break
    except TimeoutError:
        raise Refused(408, "Timeout", "the body of the request did not come in time") from None
    if size > MAX_BODY:
        raise too_large(MAX_BODY)
    return b"".join(pieces)


async def read_object(body: bytes, content_type: str) -> Decoded:
    """Raises Refused (400, 415)."""
    if content_type == PROTOBUF:
        try:
            return Decoded(read_protobuf(body))
        except NotReadable:
            raise unsupported_media_type(JSON, YAML) from None
    if content_type.endswith("yaml"):
        # kubectl names it YAML and sends JSON, which is read a hundred times as fast.
        if body.lstrip()[:1] == b"{":
            try:
                return decode(body, JSON)
            except Refused:
                pass
        if len(body) > _YAML_IN_THREAD:
            return await asyncio.to_thread(decode, body, YAML)
    return decode(body, content_type)


def encoded(item: Any, media: str = JSON) -> bytes:
    if media == YAML:
        return yaml.safe_dump(item, sort_keys=False, allow_unicode=True).encode()
    return msgspec.json.encode(item)


def answer(item: Object | bytes, code: int = 200, *, form: Accepted = PLAIN, warnings: Sequence[str] = ()) -> Response:
    if isinstance(item, bytes):
        body = item if form.media == JSON else encoded(msgspec.json.decode(item), form.media)
    else:
        body = encoded(item, form.media)
    response = Response(body, code, media_type=None, headers={"content-type": form.content_type})
    for warning in warnings:
        text = warning.replace("\\", "\\\\").replace('"', '\\"')
        printable = "".join(letter if " " <= letter < "\x7f" else "?" for letter in text)
        response.raw_headers.append((b"warning", f'299 - "{printable}"'.encode()))
    return response


def refusal(refused: Refused) -> Response:
    headers: Mapping[str, str] = {"content-type": JSON}
    if refused.code == 401:
        headers = {**headers, "www-authenticate": "Bearer"}
    if "retryAfterSeconds" in refused.details:
        headers = {**headers, "retry-after": str(refused.details["retryAfterSeconds"])}
    return Response(encoded(refused.status()), refused.code, headers=dict(headers))


def _nothing() -> None:
    """Nobody wants to know."""


class Stream(Response):
    """An answer that goes on until its source ends or the client is gone."""

    def __init__(
        self,
        source: AsyncIterator[bytes],
        content_type: str,
        *,
        seconds: float | None = None,
        on_end: Callable[[], object] = _nothing,
    ) -> None:
        """A source that should end after `seconds` may be held up by a client that doesn't read; it is not waited for
        much longer. `on_end` is called in any case, also if the source was never begun."""
        self.source = source
        self._limit = None if seconds is None else seconds + _LATE_SECONDS
        self._on_end = on_end
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache, private")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, timeout=self._limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            done = await asyncio.gather(sending, leaving, return_exceptions=True)
            self._on_end()
        for result in done:
            if isinstance(result, Exception) and not isinstance(result, OSError | ClientDisconnect):
                log.error("a stream ended with an error", exc_info=result)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # An empty piece makes some servers send the headers, for which the client may be waiting.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async with aclosing(self.source) as source:  # type: ignore[type-var]
            async for piece in source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
