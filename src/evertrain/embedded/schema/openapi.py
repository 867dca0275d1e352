"""The OpenAPI documents, by which kubectl explains and knows how to patch."""

from __future__ import annotations

from evertrain.embedded.schema.kinds import Registry
from evertrain.kube.port import Object


def openapi_v2(registry: Registry) -> Object:
    """For GET /openapi/v2 with JSON."""
    return {"swagger": "2.0", "info": {"title": "Kubernetes", "version": "v1.32.0"}, "paths": {}, "definitions": {}}


def openapi_v2_protobuf(registry: Registry) -> bytes:
    """For GET /openapi/v2 with Accept: application/com.github.proto-openapi.spec.v2@v1.0+protobuf (what kubectl sends)."""
    return b""


def openapi_v3_index(registry: Registry) -> Object:
    """For GET /openapi/v3."""
    return {"paths": {}}


def openapi_v3(registry: Registry, path: str) -> Object | None:
    """For GET /openapi/v3/PATH with PATH `api/v1` or `apis/GROUP/VERSION`; None if there is no such group version."""
    return None
