"""The API over HTTP: which request is which, and the form of its answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from evertrain.embedded.api.core import APPLY, Api, WriteOptions, Written
from evertrain.embedded.api.deletion import DeleteOptions, delete_options, is_dry_run
from evertrain.embedded.api.documents import documents
from evertrain.embedded.api.http import (
    JSON,
    OBJECTS,
    Accepted,
    Stream,
    accepted,
    answer,
    read_body,
    read_object,
    refusal,
)
from evertrain.embedded.api.listing import ListOptions, Page, shown
from evertrain.embedded.api.logs import LogSource, LogsUnavailable, is_true, log_request, no_logs
from evertrain.embedded.api.paths import Path, parse
from evertrain.embedded.api.reviews import review
from evertrain.embedded.api.status import (
    internal,
    method_not_allowed,
    path_not_found,
    success,
    unauthorized,
    unavailable,
    unsupported_media_type,
)
from evertrain.embedded.api.watching import BOOKMARK, Watch
from evertrain.embedded.nodestats import SUMMARY, StatsSource, StatsUnavailable, no_stats
from evertrain.embedded.schema import Decoded, FieldError, Refused, Resource, bad_request, invalid_object, table
from evertrain.embedded.store import NotStored
from evertrain.kube.port import Object

PATCHES = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    APPLY,
)
_HEALTH = (["healthz"], ["livez"], ["readyz"])
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_FIRST_PIECE_SECONDS = 1.0
_TABLES = ("Table", "PartialObjectMetadata", "PartialObjectMetadataList")

log = logging.getLogger(__name__)


class App:
    """One for each server."""

    def __init__(self, api: Api, *, token: str, logs: LogSource = no_logs, stats: StatsSource = no_stats) -> None:
        self.api = api
        self._token = token.encode()
        self._logs = logs
        self._stats = stats
        self.asgi = Starlette(routes=[Route("/{path:path}", self._serve, methods=_METHODS)])

    async def _serve(self, request: Request) -> Response:
        try:
            return await self._route(request)
        except Refused as refused:
            return refusal(refused)
        except ClientDisconnect:
            return Response(status_code=499)
        except StatsUnavailable as error:
            return refusal(unavailable(str(error)))
        except NotStored as error:
            log.error("%s %s: %s", request.method, request.scope["path"], error)
            return refusal(internal(str(error)))
        except RecursionError:
            return refusal(bad_request("the object is nested too deeply"))
        except Exception as error:
            log.exception("%s %s failed", request.method, request.scope["path"])
            return refusal(internal(f"{type(error).__name__} while serving {request.method} {request.scope['path']}"))

    def _allowed(self, request: Request) -> bool:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)

    async def _route(self, request: Request) -> Response:
        # Not that of `request.url`, to which the Host header belongs.
        path: str = request.scope["path"]
        if path.split("/")[1:2] in _HEALTH:
            return PlainTextResponse("ok")
        if not self._allowed(request):
            raise unauthorized()
        document = documents(self.api.registry, path, request.headers.get("accept", ""))
        if document is not None:
            if request.method not in ("GET", "HEAD"):
                raise method_not_allowed()
            return document
        reviewed = review(path)
        if reviewed is not None:
            if request.method != "POST":
                raise method_not_allowed()
            await read_body(request)
            return answer(reviewed, 201)
        parsed = parse(path)
        if parsed is None:
            raise path_not_found()
        resource = self.api.registry.find(parsed.group, parsed.version, parsed.plural)
        if resource is None:
            raise path_not_found()
        one_namespace = parsed.name or request.method in ("POST", "DELETE")
        if resource.namespaced and parsed.namespace is None and one_namespace:
            raise path_not_found() if parsed.name else method_not_allowed()
        if not resource.namespaced and parsed.namespace is not None:
            raise path_not_found()
        if parsed.subresource:
            return await self._subresource(request, parsed, resource)
        if parsed.name:
            return await self._one(request, parsed, resource)
        return await self._many(request, parsed, resource)

    # Collections

    async def _many(self, request: Request, path: Path, resource: Resource) -> Response:
        query = _query(request)
        match request.method:
            case "GET" if is_true(query.get("watch", "")):
                return self._watch(request, path, resource, query)
            case "GET" | "HEAD":
                form = accepted(request.headers.get("accept", ""), forms=_TABLES)
                return self._listed(
                    resource, self.api.page(resource, path.namespace, _list_options(query)), form, query
                )
            case "POST":
                body, options = await self._body(request, query, *OBJECTS)
                return self._wrote(
                    request, resource, self.api.create(resource, path.namespace or "", body.value, options), query
                )
            case "DELETE":
                selection = _list_options(query)
                options_of = await self._delete_options(request, query)
                gone = self.api.delete_collection(resource, path.namespace, selection, options_of)
                return answer(
                    {
                        "kind": _list_kind(resource),
                        "apiVersion": resource.api_version,
                        "metadata": {"resourceVersion": str(self.api.store.version)},
                        "items": gone,
                    }
                )
        raise method_not_allowed()

    def _listed(self, resource: Resource, page: Page, form: Accepted, query: Mapping[str, str]) -> Response:
        if form.form == "Table":
            items = [shown(resource, record) for record in page.records]
            return answer(self._table(resource, items, page.metadata, form, query), form=form)
        if form.form:
            metadata_only = [_partial(shown(resource, record)) for record in page.records]
            return answer(
                {
                    "kind": "PartialObjectMetadataList",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": page.metadata,
                    "items": metadata_only,
                },
                form=form,
            )
        head = {"kind": _list_kind(resource), "apiVersion": resource.api_version, "metadata": page.metadata}
        pieces = [
            record.data
            if record.object.get("apiVersion") == resource.api_version
            else msgspec.json.encode(shown(resource, record))
            for record in page.records
        ]
        return answer(msgspec.json.encode(head)[:-1] + b',"items":[' + b",".join(pieces) + b"]}", form=form)

    def _table(
        self, resource: Resource, items: list[Object], metadata: Object, form: Accepted, query: Mapping[str, str]
    ) -> Object:
        include = query.get("includeObject") or "Metadata"
        if include not in ("None", "Metadata", "Object"):
            raise bad_request(f'unrecognized includeObject value: "{include}"')
        made = table(resource, items, now=self.api.now(), metadata=metadata, include=include)
        made["apiVersion"] = f"meta.k8s.io/{form.version}"
        return made

    def _watch(self, request: Request, path: Path, resource: Resource, query: Mapping[str, str]) -> Response:
        form = accepted(request.headers.get("accept", "").replace(";stream=watch", ""), forms=_TABLES)
        seconds = _number(query, "timeoutSeconds")
        initial = query.get("sendInitialEvents")
        if initial is not None and query.get("resourceVersionMatch") != "NotOlderThan":
            error = FieldError(
                "resourceVersionMatch",
                "FieldValueForbidden",
                "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            )
            raise invalid_object("meta.k8s.io", "ListOptions", "", [error])
        fields = query.get("fieldSelector", "")
        if path.name:
            fields = ",".join(filter(None, (fields, f"metadata.name={path.name}")))
        watch = self.api.watch(
            resource,
            path.namespace,
            labels=query.get("labelSelector", ""),
            fields=fields,
            version=query.get("resourceVersion", ""),
            bookmarks=is_true(query.get("allowWatchBookmarks", "")),
            send_initial=None if initial is None else is_true(initial),
        )
        last = float(seconds or random.randint(1800, 3600))
        return Stream(self._lines(watch, resource, form, query, last), JSON, seconds=last, on_end=watch.close)

    async def _lines(
        self, watch: Watch, resource: Resource, form: Accepted, query: Mapping[str, str], seconds: float
    ) -> AsyncIterator[bytes]:
        columns = True
        async for events in watch.batches(seconds):
            lines: list[bytes] = []
            for event in events:
                data = event.record.data
                if form.form == "Table":
                    item = self.api.own(resource, event.record)
                    rows = [] if event.type == BOOKMARK else [item]
                    made = self._table(resource, rows, {"resourceVersion": str(event.record.version)}, form, query)
                    if event.type == BOOKMARK:
                        made["metadata"] = item["metadata"]
                    if not columns:
                        made["columnDefinitions"] = None
                    columns = False
                    data = msgspec.json.encode(made)
                elif form.form:
                    data = msgspec.json.encode(_partial(self.api.own(resource, event.record)))
                elif event.record.object.get("apiVersion") != resource.api_version:
                    data = msgspec.json.encode(self.api.own(resource, event.record))
                lines.append(b'{"type":"' + event.type.encode() + b'","object":' + data + b"}\n")
            yield b"".join(lines)

    # Single objects

    async def _one(self, request: Request, path: Path, resource: Resource) -> Response:
        query = _query(request)
        namespace = path.namespace or ""
        match request.method:
            case "GET" if is_true(query.get("watch", "")):
                return self._watch(request, path, resource, query)
            case "GET" | "HEAD":
                return self._shown(request, resource, self.api.get(resource, namespace, path.name), query)
            case "PUT":
                body, options = await self._body(request, query, *OBJECTS)
                return self._wrote(
                    request, resource, self.api.update(resource, namespace, path.name, body.value, options), query
                )
            case "PATCH":
                return await self._patch(request, path, resource, query)
            case "DELETE":
                options_of = await self._delete_options(request, query)
                gone = self.api.delete(resource, namespace, path.name, options_of)
                if gone.deleted:
                    return answer(success(resource, path.name, gone.object["metadata"]["uid"]))
                return answer(gone.object)
        raise method_not_allowed()

    def _shown(self, request: Request, resource: Resource, item: Object, query: Mapping[str, str]) -> Response:
        form = accepted(request.headers.get("accept", ""), forms=_TABLES)
        return answer(self._formed(resource, item, form, query), form=form)

    def _formed(self, resource: Resource, item: Object, form: Accepted, query: Mapping[str, str]) -> Object:
        if form.form == "Table":
            metadata = {"resourceVersion": item["metadata"].get("resourceVersion", "")}
            return self._table(resource, [item], metadata, form, query)
        return _partial(item) if form.form else item

    def _wrote(self, request: Request, resource: Resource, written: Written, query: Mapping[str, str]) -> Response:
        form = accepted(request.headers.get("accept", ""), forms=_TABLES)
        code = 201 if written.created else 200
        warnings = (resource.warning, *written.warnings) if resource.warning else written.warnings
        return answer(self._formed(resource, written.object, form, query), code, form=form, warnings=warnings)

    async def _patch(self, request: Request, path: Path, resource: Resource, query: Mapping[str, str]) -> Response:
        media = _media(request)
        if media not in PATCHES:
            raise unsupported_media_type(*(kind for kind in PATCHES if not (resource.custom and "strategic" in kind)))
        body, options = await self._body(request, query, *PATCHES)
        if media == APPLY and not query.get("fieldManager"):
            error = FieldError("fieldManager", "FieldValueRequired", "Required value: is required for apply patch")
            raise invalid_object("meta.k8s.io", "PatchOptions", "", [error])
        written = self.api.patch(
            resource, path.namespace or "", path.name, body.value, media, options, subresource=path.subresource
        )
        return self._wrote(request, resource, written, query)

    # Subresources

    async def _subresource(self, request: Request, path: Path, resource: Resource) -> Response:
        query = _query(request)
        namespace = path.namespace or ""
        if path.subresource not in resource.subresources:
            raise path_not_found()
        match path.subresource, request.method:
            case "status", "GET":
                return self._shown(request, resource, self.api.get(resource, namespace, path.name), query)
            case "status", "PUT":
                body, options = await self._body(request, query, *OBJECTS)
                written = self.api.update(resource, namespace, path.name, body.value, options, subresource="status")
                return self._wrote(request, resource, written, query)
            case "status", "PATCH":
                return await self._patch(request, path, resource, query)
            case "log", "GET":
                return await self._log(path, resource, query)
            case "proxy", "GET":
                if path.beyond != SUMMARY:
                    raise path_not_found()
                self.api.get(resource, namespace, path.name)
                return answer(await self._stats(path.name))
            case "binding", "POST":
                body, options = await self._body(request, query, *OBJECTS)
                self.api.bind(resource, namespace, path.name, body.value, options.dry_run)
                return answer(
                    {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
                )
            case "eviction", "POST":
                body, options = await self._body(request, query, *OBJECTS)
                self._evict(resource, namespace, path.name, body, options)
                return answer(
                    {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
                )
            case "finalize", "PUT":
                body, options = await self._body(request, query, *OBJECTS)
                return self._wrote(
                    request, resource, self.api.finalize_namespace(resource, path.name, body.value, options), query
                )
        raise method_not_allowed()

    def _evict(self, resource: Resource, namespace: str, name: str, body: Decoded, options: WriteOptions) -> None:
        if not isinstance(body.value, dict):
            raise bad_request("an Eviction must be an object")
        metadata = body.value.get("metadata")
        given = metadata.get("name", name) if isinstance(metadata, dict) else name
        if given != name:
            raise bad_request(f"name in URL does not match name in Eviction object: {name} != {given}")
        wanted = delete_options(body.value.get("deleteOptions"), {"dryRun": "All"} if options.dry_run else {})
        self.api.delete(resource, namespace, name, wanted)

    async def _log(self, path: Path, resource: Resource, query: Mapping[str, str]) -> Response:
        pod = self.api.own(resource, self.api.record(resource, path.namespace or "", path.name))
        pieces = self._logs(pod, log_request(pod, query, self.api.now()))
        # The first piece decides between an answer and a refusal, but with `follow` it may be long in coming.
        first = asyncio.ensure_future(anext(pieces, b""))
        try:
            await asyncio.wait({first}, timeout=_FIRST_PIECE_SECONDS)
        except asyncio.CancelledError:
            first.cancel()
            raise
        if first.done() and isinstance(error := first.exception(), LogsUnavailable):
            raise bad_request(str(error))
        return Stream(_chained(first, pieces), "text/plain", on_end=first.cancel)

    # Parts of requests

    async def _body(
        self, request: Request, query: Mapping[str, str], *media_types: str
    ) -> tuple[Decoded, WriteOptions]:
        media = _media(request) or JSON
        if media not in media_types:
            raise unsupported_media_type(*media_types)
        accepted(request.headers.get("accept", ""), forms=_TABLES)  # nothing is written whose answer can't be read
        body = await read_body(request)
        if not body.strip():
            raise bad_request("the body of the request is empty")
        decoded = await read_object(body, media)
        validation = query.get("fieldValidation") or "Warn"
        if validation not in ("Ignore", "Warn", "Strict"):
            error = FieldError(
                "fieldValidation",
                "FieldValueNotSupported",
                f'Unsupported value: "{validation}": supported values: "Ignore", "Strict", "Warn"',
            )
            raise invalid_object("meta.k8s.io", "CreateOptions", "", [error])
        manager = query.get("fieldManager") or request.headers.get("user-agent", "").partition("/")[0] or "unknown"
        if len(manager) > 128 or not manager.isprintable():
            error = FieldError(
                "fieldManager", "FieldValueInvalid", "Invalid value: must be printable and at most 128 characters long"
            )
            raise invalid_object("meta.k8s.io", "CreateOptions", "", [error])
        return decoded, WriteOptions(
            manager=manager,
            dry_run=is_dry_run(query.get("dryRun")),
            validation=validation,
            force=is_true(query.get("force", "")),
            duplicates=tuple(decoded.duplicates),
        )

    async def _delete_options(self, request: Request, query: Mapping[str, str]) -> DeleteOptions:
        body = await read_body(request)
        content: Any = None
        if body.strip():
            media = _media(request) or JSON
            if media not in OBJECTS:
                raise unsupported_media_type(*OBJECTS)
            content = (await read_object(body, media)).value
        return delete_options(content, dict(query))


def _media(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _query(request: Request) -> dict[str, str]:
    """The first value of each."""
    found: dict[str, str] = {}
    for key, value in request.query_params.multi_items():
        found.setdefault(key, value)
    return found


def _number(query: Mapping[str, str], key: str) -> int:
    text = query.get(key, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise bad_request(f'invalid value for query parameter {key}: "{text}"')
    return int(text)


def _list_options(query: Mapping[str, str]) -> ListOptions:
    return ListOptions(
        labels=query.get("labelSelector", ""),
        fields=query.get("fieldSelector", ""),
        limit=_number(query, "limit"),
        token=query.get("continue", ""),
        version=query.get("resourceVersion", ""),
        match=query.get("resourceVersionMatch", ""),
    )


def _list_kind(resource: Resource) -> str:
    return resource.list_kind or f"{resource.kind}List"


def _partial(item: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}


async def _chained(first: asyncio.Future[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield await first
        async for piece in rest:
            yield piece
    except LogsUnavailable as error:
        yield f"{error}\n".encode()
    finally:
        first.cancel()
        if isinstance(rest, AsyncGenerator):
            await rest.aclose()
