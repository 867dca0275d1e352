"""The command line's way to a cluster: which one is meant, and the requests that only people need.

Names are looked up as kubectl does (`acjob`, `po`, `podgroups.scheduling.volcano.sh`), lists come as tables, refusals
keep the server's details, and logs can be followed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evertrain.cli.running import UsageError
from evertrain.embedded import instance
from evertrain.kube.client import Client, httpx
from evertrain.kube.port import ApiError, Kind, Object

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


class Refused(ApiError):
    """The server's refusal with all that it said."""

    def __init__(self, code: int, status: Object) -> None:
        super().__init__(code, str(status.get("reason") or ""), str(status.get("message") or f"HTTP {code}"))
        self.details: Object = status.get("details") or {}


def choose_kubeconfig(given: str | None, folder: Path) -> Path:
    """The one named, else $KUBECONFIG, else that of the embedded cluster that runs, else ~/.kube/config."""
    named = given or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no kubeconfig {path}")
        return path
    running = instance.find(folder)
    if running is not None and running.kubeconfig:
        return Path(running.kubeconfig)
    usual = Path("~/.kube/config").expanduser()
    if not usual.is_file():
        raise UsageError(f"no cluster runs on {folder}; start one with `evertrain up`, or name a --kubeconfig")
    return usual


def connect(kubeconfig: Path) -> Connection:
    try:
        return Connection.from_kubeconfig(kubeconfig)
    except Exception as error:  # lightkube lets through whatever it stumbles over in a file that is none
        raise UsageError(f"{kubeconfig} is not a usable kubeconfig: {error}") from None


class Connection(Client):
    """A client that also knows what people write."""

    @classmethod
    def from_kubeconfig(cls, path: str | Path, context: str | None = None) -> Connection:
        made = super().from_kubeconfig(path, context)
        assert isinstance(made, cls)
        return made

    async def ask(
        self,
        method: str,
        path: str,
        parameters: dict[str, str] | None = None,
        body: Object | None = None,
        accept: str = "application/json",
    ) -> Object:
        headers = {"Accept": accept}
        try:
            response = await self._http.request(method, path, params=parameters, json=body, headers=headers)
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        found = _object(response.content)
        if response.status_code >= 400:
            raise Refused(response.status_code, found or {"message": response.text.strip()})
        return found

    async def find_kind(self, name: str) -> Kind:
        """The kind that is meant by a plural, singular, short name or kind, perhaps with its group behind a dot."""
        word, _, group = name.lower().partition(".")
        for version, resources in await self._served():
            if group and group not in (version.partition("/")[0], ".".join(reversed(version.split("/")))):
                continue
            for resource in resources:
                names = {resource["name"], resource.get("singularName"), resource["kind"].lower()}
                if word in names | set(resource.get("shortNames") or ()):
                    return Kind(version, resource["kind"], resource["name"], bool(resource["namespaced"]))
        raise UsageError(f"the server doesn't have a resource type {name!r}")

    async def find_kind_of(self, item: Object) -> Kind:
        """The kind of an object that somebody wrote."""
        version, name = str(item.get("apiVersion")), str(item.get("kind"))
        path = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        try:
            resources = (await self.ask("GET", path))["resources"]
        except Refused as error:
            if error.code != 404:
                raise
            raise UsageError(f"the server knows no apiVersion {version!r}") from None
        for resource in resources:
            if resource["kind"] == name and "/" not in resource["name"]:
                return Kind(version, name, resource["name"], bool(resource["namespaced"]))
        raise UsageError(f"the server knows no kind {name!r} in apiVersion {version!r}")

    async def _served(self) -> list[tuple[str, list[Object]]]:
        found = [("v1", (await self.ask("GET", "/api/v1"))["resources"])]
        for group in (await self.ask("GET", "/apis")).get("groups") or []:
            version = group["preferredVersion"]["groupVersion"]
            found.append((version, (await self.ask("GET", f"/apis/{version}"))["resources"]))
        return [(version, [item for item in items if "/" not in item["name"]]) for version, items in found]

    @contextlib.asynccontextmanager
    async def follow(self, path: str, parameters: dict[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """An answer that comes piece by piece, for as long as the server sends."""
        timeout = httpx.Timeout(10.0, read=None)
        try:
            async with self._http.stream("GET", path, params=parameters, timeout=timeout) as response:
                if response.status_code >= 400:
                    raise Refused(response.status_code, _object(await response.aread()))
                yield response.aiter_bytes()
        except httpx.TransportError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


def path_of(kind: Kind, namespace: str | None, name: str = "", subresource: str = "") -> str:
    place = ["namespaces", namespace] if kind.namespaced and namespace else []
    parts = [*place, kind.plural, name, subresource]
    return "/".join([kind.path, *(quote(part, safe="") for part in parts if part)])


def _object(content: bytes) -> Object:
    import msgspec

    with contextlib.suppress(msgspec.DecodeError):
        found: Any = msgspec.json.decode(content)
        if isinstance(found, dict):
            return found
    return {}
