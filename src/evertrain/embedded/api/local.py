"""The port to Kubernetes for the parts that live in the server's own process: the same requests without HTTP.

Objects go in and come out as copies, so nobody can change what is stored other than by a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from evertrain.embedded.api.core import APPLY, Api, WriteOptions, Written
from evertrain.embedded.api.deletion import DeleteOptions
from evertrain.embedded.api.listing import ListOptions
from evertrain.embedded.api.status import path_not_found
from evertrain.embedded.schema import Refused, Resource
from evertrain.embedded.store import NotStored
from evertrain.kube.port import (
    POD,
    AlreadyExists,
    ApiError,
    Change,
    Conflict,
    Gone,
    Kind,
    Listing,
    NotFound,
    Object,
)

_MERGE = "application/merge-patch+json"


def _error(refused: Refused) -> ApiError:
    types: dict[tuple[int, bool], type[ApiError]] = {
        (404, False): NotFound,
        (409, True): AlreadyExists,
        (409, False): Conflict,
        (410, False): Gone,
    }
    kind = types.get((refused.code, refused.reason == "AlreadyExists"), ApiError)
    return kind(refused.code, refused.reason, refused.message)


def _copy(item: Object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(item))


class LocalKube:
    def __init__(self, api: Api, *, manager: str = "evertrain") -> None:
        self._api = api
        self._options = WriteOptions(manager=manager)

    def _resource(self, kind: Kind) -> Resource:
        group, _, version = kind.api_version.rpartition("/")
        resource = self._api.registry.find(group, version, kind.plural)
        if resource is None:
            raise path_not_found()
        return resource

    async def _turn(self) -> None:
        """Lets others run: a part that makes a thousand requests in a row must not hold up the rest."""
        await asyncio.sleep(0)

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        await self._turn()
        try:
            found: Object = _copy(self._api.get(self._resource(kind), namespace or "", name))
        except Refused as refused:
            raise _error(refused) from None
        return found

    async def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        await self._turn()
        try:
            resource = self._resource(kind)
            page = self._api.page(resource, namespace, ListOptions(labels=labels, fields=fields))
            items = [self._api.own(resource, record) for record in page.records]
        except Refused as refused:
            raise _error(refused) from None
        return Listing(items, str(page.version))

    async def watch(
        self, kind: Kind, namespace: str | None = None, *, resource_version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Change]:
        try:
            resource = self._resource(kind)
            watch = self._api.watch(
                resource, namespace, labels=labels, fields=fields, version=resource_version, bookmarks=True
            )
        except Refused as refused:
            raise _error(refused) from None
        batches = watch.batches()
        try:
            async for events in batches:
                for event in events:
                    yield Change(event.type, self._api.own(resource, event.record))
        finally:
            watch.close()

    async def create(self, kind: Kind, item: Object) -> Object:
        namespace = (item.get("metadata") or {}).get("namespace") or ""
        return await self._write(lambda: self._api.create(self._resource(kind), namespace, _copy(item), self._options))

    async def replace(self, kind: Kind, item: Object) -> Object:
        return await self._replace(kind, item, "")

    async def replace_status(self, kind: Kind, item: Object) -> Object:
        return await self._replace(kind, item, "status")

    async def _replace(self, kind: Kind, item: Object, subresource: str) -> Object:
        metadata = item["metadata"]
        namespace, name = metadata.get("namespace") or "", metadata["name"]
        return await self._write(
            lambda: self._api.update(
                self._resource(kind), namespace, name, _copy(item), self._options, subresource=subresource
            )
        )

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, patch: Object, *, status: bool = False
    ) -> Object:
        return await self._write(
            lambda: self._api.patch(
                self._resource(kind),
                namespace or "",
                name,
                _copy(patch),
                _MERGE,
                self._options,
                subresource="status" if status else "",
            )
        )

    async def apply(self, kind: Kind, item: Object, *, manager: str, force: bool = False) -> Object:
        metadata = item["metadata"]
        namespace, name = metadata.get("namespace") or "", metadata["name"]
        options = WriteOptions(manager=manager, force=force)
        return await self._write(
            lambda: self._api.patch(self._resource(kind), namespace, name, _copy(item), APPLY, options)
        )

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> None:
        options = DeleteOptions(grace=grace, uid=uid, version=version)
        await self._write(lambda: self._api.delete(self._resource(kind), namespace or "", name, options))

    async def bind(self, pod: Object, node: str, annotations: Mapping[str, str] | None = None) -> None:
        await self._turn()
        metadata = pod["metadata"]
        given = {"uid": metadata.get("uid"), "annotations": dict(annotations or {})}
        binding = {"metadata": given, "target": {"kind": "Node", "name": node}}
        try:
            self._api.bind(self._resource(POD), metadata.get("namespace") or "", metadata["name"], binding)
        except Refused as refused:
            raise _error(refused) from None
        except NotStored as error:
            raise ApiError(500, "InternalError", str(error)) from None

    async def close(self) -> None:
        """Nothing is held open."""

    async def _write(self, request: Callable[[], Written]) -> Object:
        await self._turn()
        try:
            return request().object
        except Refused as refused:
            raise _error(refused) from None
        except NotStored as error:
            raise ApiError(500, "InternalError", str(error)) from None
