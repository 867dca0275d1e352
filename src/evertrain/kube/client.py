"""The client behind the port: plain HTTP and plain dictionaries, for any Kubernetes API server.

Reading a kubeconfig, certificates and tokens (also those that rotate) is lightkube's work. Its typed objects aren't
used: they drop fields that they don't know, and an operator that writes an object back would erase them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import KubeConfig, SingleConfig

from evertrain import aio
from evertrain.kube.port import AlreadyExists, ApiError, Change, Conflict, Gone, Kind, Listing, NotFound, Object

httpx = client_adapter.httpx

REQUEST_TIMEOUT = 10.0
POOL_TIMEOUT = 60.0
"""A burst of requests waits for a free connection longer than a server may take to answer one."""
WATCH_SECONDS = 240
"""The server is asked to end a watch after about this time; a watch that is silent for longer than that is dead."""
ANSWER_TIMEOUT = 30.0
"""Until a watch has begun."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""A server that is gone without a word, or a path to it that drops everything, looks like one that has no news. So the
kernel asks it, and ends the connection when there was no answer for 30 seconds."""
PAGE = 500
NO_ANSWER = "none"
JSON, MERGE_PATCH, APPLY_PATCH = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"


class Client:
    """One API server, as one user."""

    def __init__(self, config: SingleConfig) -> None:
        user = config.user
        # As with kubectl, a proxy in the environment is not for servers on this machine.
        trust_env = not _is_loopback(config.cluster.server)
        timeout = httpx.Timeout(REQUEST_TIMEOUT, pool=POOL_TIMEOUT)
        parameters = client_adapter.ConnectionParams(timeout=timeout, trust_env=trust_env)
        if user is None:
            raise ValueError(f"context {config.context_name} of the kubeconfig names no user")
        self._http = client_adapter.AsyncClient(config, parameters)
        self.namespace = config.namespace
        self.answers: Counter[tuple[str, str]] = Counter()
        """How many there were, by method and status; NO_ANSWER if there was none."""

    @classmethod
    def from_kubeconfig(cls, path: str | Path, context: str | None = None) -> Client:
        config = KubeConfig.from_file(path).get(context)
        assert config is not None  # get() raises where there is no context
        return cls(config)

    @classmethod
    def from_environment(cls) -> Client:
        """The service account in a pod, else $KUBECONFIG, else ~/.kube/config."""
        config = KubeConfig.from_env().get()
        assert config is not None
        return cls(config)

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        return _decode(await self._send("GET", _path(kind, namespace, name)))

    async def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        parameters = _selectors(labels, fields)
        try:
            return await self._pages(kind, namespace, {**parameters, "limit": str(PAGE)})
        except Gone:  # the rest of the pages has expired meanwhile
            return await self._pages(kind, namespace, parameters)

    async def _pages(self, kind: Kind, namespace: str | None, parameters: dict[str, str]) -> Listing:
        items: list[Object] = []
        parameters = dict(parameters)
        while True:
            page = _decode(await self._send("GET", _path(kind, namespace), parameters))
            # Items of a list come without their kind.
            items += [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return Listing(items, str(metadata.get("resourceVersion", "")))
            parameters["continue"] = metadata["continue"]

    async def watch(
        self, kind: Kind, namespace: str | None = None, *, resource_version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Change]:
        seconds = WATCH_SECONDS + random.randrange(60)  # so that not all watches begin again at the same moment
        parameters = {
            **_selectors(labels, fields),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        timeout = httpx.Timeout(REQUEST_TIMEOUT, read=seconds + 30.0, pool=POOL_TIMEOUT)
        request = self._http.build_request("GET", _path(kind, namespace), params=parameters, timeout=timeout)
        try:
            response = await self._begun(request)
            try:
                if response.status_code >= 400:
                    await response.aread()
                    raise _error(response)
                async for line in response.aiter_lines():
                    if line:
                        yield _change(line)
            finally:
                await response.aclose()
        except httpx.TimeoutException as error:
            raise TimeoutError(_text(error)) from error
        except httpx.TransportError as error:
            raise ConnectionError(_text(error)) from error

    async def _begun(self, request: Any) -> Any:
        """The response to a watch, of which only the head has come."""
        try:
            async with aio.timeout(ANSWER_TIMEOUT):
                response = await self._counted("GET", self._http.send(request, stream=True))
        except TimeoutError:
            raise TimeoutError(f"the watch has not begun within {ANSWER_TIMEOUT:g} s") from None
        # The client could be told to do this for all its connections, but it forgets it for those through a proxy.
        stream = response.extensions.get("network_stream")
        connection = stream.get_extra_info("socket") if stream is not None else None
        if connection is not None:
            with contextlib.suppress(OSError):  # who reads of it is told soon enough that it is closed
                for option in KEEPALIVE:
                    connection.setsockopt(*option)
        return response

    async def create(self, kind: Kind, item: Object) -> Object:
        return _decode(await self._send("POST", _path(kind, _namespace(item)), body=item))

    async def replace(self, kind: Kind, item: Object) -> Object:
        return _decode(await self._send("PUT", _path(kind, _namespace(item), item["metadata"]["name"]), body=item))

    async def replace_status(self, kind: Kind, item: Object) -> Object:
        path = _path(kind, _namespace(item), item["metadata"]["name"], "status")
        return _decode(await self._send("PUT", path, body=item))

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, patch: Object, *, status: bool = False
    ) -> Object:
        path = _path(kind, namespace, name, "status" if status else "")
        return _decode(await self._send("PATCH", path, body=patch, content_type=MERGE_PATCH))

    async def apply(self, kind: Kind, item: Object, *, manager: str, force: bool = False) -> Object:
        parameters = {"fieldManager": manager, "force": "true" if force else "false"}
        path = _path(kind, _namespace(item), item["metadata"]["name"])
        return _decode(await self._send("PATCH", path, parameters, item, APPLY_PATCH))

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
        policy: str = "Background",
    ) -> None:
        """With policy "Foreground" the object is there until what belongs to it is gone, the pods of a job say."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if uid or version:
            asked = {"uid": uid, "resourceVersion": version}
            options["preconditions"] = {name: value for name, value in asked.items() if value}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        await self._send("DELETE", _path(kind, namespace, name), body=options)

    async def bind(self, pod: Object, node: str, annotations: Mapping[str, str] | None = None) -> None:
        metadata = pod["metadata"]
        given = {key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {**given, "annotations": dict(annotations or {})},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        path = f"/api/v1/namespaces/{_quoted(metadata['namespace'])}/pods/{_quoted(metadata['name'])}/binding"
        await self._send("POST", path, body=body)

    async def close(self) -> None:
        await self._http.aclose()

    async def _counted(self, method: str, sending: Awaitable[Any]) -> Any:
        status = NO_ANSWER
        try:
            response = await sending
            status = str(response.status_code)
            return response
        finally:
            self.answers[method, status] += 1

    async def _send(
        self,
        method: str,
        path: str,
        parameters: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = JSON,
    ) -> bytes:
        """What the server answered."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": "application/json"} if body is None else {"Content-Type": content_type}
        try:
            sending = self._http.request(method, path, params=parameters, content=content, headers=headers)
            response = await self._counted(method, sending)
        except httpx.TimeoutException as error:
            raise TimeoutError(_text(error)) from error
        except httpx.TransportError as error:
            raise ConnectionError(_text(error)) from error
        if response.status_code >= 400:
            raise _error(response)
        answer: bytes = response.content
        return answer


def _is_loopback(server: str) -> bool:
    host = urlsplit(server).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _namespace(item: Object) -> str | None:
    namespace: str | None = item["metadata"].get("namespace")
    return namespace


def _path(kind: Kind, namespace: str | None, name: str = "", subresource: str = "") -> str:
    parts = [kind.path]
    if kind.namespaced and namespace:
        parts += ["namespaces", _quoted(namespace)]
    parts.append(kind.plural)
    if name:
        parts.append(_quoted(name))
    if subresource:
        parts.append(subresource)
    return "/".join(parts)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _decode(content: bytes) -> Object:
    try:
        decoded = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ApiError(502, "BadGateway", f"the server answered with something that is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ApiError(502, "BadGateway", "the server answered with JSON that is not an object")
    return decoded


def _change(line: str) -> Change:
    event = _decode(line.encode())
    kind, item = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(item, dict):
        raise ApiError(502, "BadGateway", "the server sent a watch event without type or object")
    if kind == "ERROR":
        raise _refusal(int(item.get("code") or 500), item)
    return Change(kind, item)


def _error(response: Any) -> ApiError:
    try:
        status = _decode(response.content)
    except ApiError:
        status = {}
    if status.get("kind") != "Status":
        status = {"message": response.content.decode(errors="replace").strip() or response.reason_phrase}
    return _refusal(response.status_code, status)


def _refusal(code: int, status: Object) -> ApiError:
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    kind: type[ApiError] = {404: NotFound, 409: Conflict, 410: Gone}.get(code, ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(code, reason, message or f"HTTP {code}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
