"""What clients ask before they ask for objects: version, discovery, OpenAPI."""

from __future__ import annotations

import hashlib
import platform
from typing import Any
from weakref import WeakKeyDictionary

from starlette.responses import Response

from evertrain.embedded.api.http import JSON, Accepted, accepted, answer, encoded
from evertrain.embedded.api.status import not_acceptable
from evertrain.embedded.schema import (
    VERSION,
    Registry,
    aggregated_discovery,
    group_document,
    group_list,
    legacy_versions,
    openapi_v2,
    openapi_v2_protobuf,
    openapi_v3,
    openapi_v3_index,
    resource_list,
)
from evertrain.kube.port import Object

_V2_PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_V2_ASKED = (_V2_PROTOBUF, _V2_PROTOBUF.replace("v2.v1.0", "v2@v1.0"))
"""Clients ask for it by its old name, which they themselves can't read in an answer."""
_cache: WeakKeyDictionary[Registry, tuple[int, dict[str, Any]]] = WeakKeyDictionary()
"""Documents are made once for each state of the registry."""


def version_document() -> Object:
    major, minor, _ = VERSION.lstrip("v").split(".")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"{VERSION}+evertrain",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": f"{platform.system().lower()}/{machine}",
    }


def documents(registry: Registry, path: str, accept: str) -> Response | None:
    """None if the path is none of a document. Raises Refused (406)."""
    path = path.rstrip("/") or "/"
    match path:
        case "/":
            return answer(
                {"paths": ["/api", "/apis", "/healthz", "/livez", "/openapi/v2", "/openapi/v3", "/readyz", "/version"]}
            )
        case "/version":
            return answer(version_document())
        case "/api" | "/apis":
            form = accepted(accept, forms=("APIGroupDiscoveryList",))
            return _cached(registry, f"{path} {form.version}", lambda: _groups(registry, path, form), form)
        case "/openapi/v2":
            return _openapi_v2(registry, accept)
        case "/openapi/v3":
            return _cached(registry, path, lambda: openapi_v3_index(registry), Accepted())
    if path.startswith("/openapi/v3/"):
        name = path.removeprefix("/openapi/v3/")
        # Its own JSON is what is served, also to those who would rather have protobuf.
        return _cached(registry, path, lambda: openapi_v3(registry, name), Accepted())
    parts = path.strip("/").split("/")
    match parts:
        case ["api", version]:
            return _cached(registry, path, lambda: resource_list(registry, "", version), Accepted())
        case ["apis", group]:
            return _cached(registry, path, lambda: group_document(registry, group), Accepted())
        case ["apis", group, version]:
            return _cached(registry, path, lambda: resource_list(registry, group, version), Accepted())
    return None


def _groups(registry: Registry, path: str, form: Accepted) -> Object:
    if form.form:
        return aggregated_discovery(registry, legacy=path == "/api", version=form.version)
    return legacy_versions(registry) if path == "/api" else group_list(registry)


def _cached(registry: Registry, key: str, make: Any, form: Accepted) -> Response | None:
    revision, made = _cache.get(registry, (-1, {}))
    if revision != registry.revision:
        made = {}
        _cache[registry] = registry.revision, made
    if key not in made:
        document = make()
        if document is None:
            return None
        made[key] = document if isinstance(document, bytes) else encoded(document)
    body: bytes = made[key]
    response = Response(body, headers={"content-type": form.content_type})
    response.headers["etag"] = f'"{hashlib.sha256(body).hexdigest()}"'
    response.headers["vary"] = "Accept"
    return response


def _openapi_v2(registry: Registry, accept: str) -> Response | None:
    for wish in accept.split(",") if accept else ("*/*",):
        media = wish.partition(";")[0].strip()
        if media in _V2_ASKED:
            response = _cached(registry, "/openapi/v2 protobuf", lambda: openapi_v2_protobuf(registry), Accepted())
            if response is not None:
                response.headers["content-type"] = _V2_PROTOBUF
            return response
        if media in (JSON, "*/*", "application/*"):
            return _cached(registry, "/openapi/v2", lambda: openapi_v2(registry), Accepted())
    raise not_acceptable(JSON, _V2_PROTOBUF)
