"""The OpenAPI documents, by which kubectl explains kinds and knows how to patch them.

kubectl asks for version 3 (JSON, one document for a group version) and, where it finds no answer there, for version 2
in protobuf, which it takes in no other form. Both are made when first asked for and kept until the kinds change.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from evertrain.embedded.schema import models
from evertrain.embedded.schema.builtin import definition_name
from evertrain.embedded.schema.kinds import Registry, Resource, Schema, reference
from evertrain.embedded.schema.openapi_protobuf import encode_document
from evertrain.embedded.schema.patches import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE_PATCH
from evertrain.embedded.schema.structure import INT_OR_STRING, OURS, QUANTITY
from evertrain.kube.port import Object

VERSION = "v1.32.0"
"""The Kubernetes version that the server says to be."""

_INFO = {"title": "Kubernetes", "version": VERSION}
_V3 = "#/components/schemas/"
_V2 = "#/definitions/"
_PARAMETERS = (
    ("pretty", "string", "If 'true', then the output is pretty printed."),
    ("dryRun", "string", "When present, indicates that modifications should not be persisted."),
    ("fieldManager", "string", "fieldManager is a name associated with the actor that is making these changes."),
    (
        "fieldValidation",
        "string",
        "fieldValidation instructs the server on how to handle unknown or duplicate fields: Ignore, Warn or Strict.",
    ),
)


def schema_name(resource: Resource) -> str:
    """`io.k8s.api.core.v1.Pod`, `com.gitee.mindxdl.v1.AscendJob`."""
    if not resource.custom:
        return definition_name(resource)
    return ".".join([*reversed(resource.group.split(".")), resource.version, resource.kind])


def _kind(resource: Resource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def patch_types(resource: Resource) -> list[str]:
    """What a patch of this kind may be; kubectl reads here that custom resources merge by JSON merge patch."""
    types = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH]
    return types if resource.custom else [*types, STRATEGIC_MERGE_PATCH]


def _definitions(resources: list[Resource]) -> dict[str, Schema]:
    """In the form of version 3, with lists of all kinds."""
    roots = [models.name_of("meta_v1", name) for name in ("ObjectMeta", "ListMeta", "Status", "DeleteOptions")]
    found: dict[str, Schema] = {}
    for resource in resources:
        name = schema_name(resource)
        found[name] = {**resource.schema, "x-kubernetes-group-version-kind": [_kind(resource)]}
        found[name + "List"] = _list(resource, name)
        roots.extend(models.pointers(resource.schema))
    for name, schema in models.closure(roots).items():
        found.setdefault(name, schema)
    return found


def _list(resource: Resource, name: str) -> Schema:
    described: dict[str, Any] = models.definition(models.name_of("core_v1", "Pod"))["properties"]
    return {
        "type": "object",
        "description": f"{resource.list_kind} is a list of {resource.kind}",
        "required": ["items"],
        "properties": {
            "apiVersion": described["apiVersion"],
            "kind": described["kind"],
            "metadata": {"$ref": _V3 + models.name_of("meta_v1", "ListMeta")},
            "items": {"type": "array", "items": {"$ref": _V3 + name}},
        },
        "x-kubernetes-group-version-kind": [{**_kind(resource), "kind": resource.list_kind}],
    }


def _shaped(schema: Any, version: int) -> Any:
    """A schema as a document of this OpenAPI version writes it."""
    if isinstance(schema, list):
        return [_shaped(item, version) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if not key.startswith(OURS)}
    if schema.get(QUANTITY) or schema.get("format") == "int-or-string":
        made.pop(INT_OR_STRING, None)
        if version == 2:
            made["type"] = "string"
        else:
            kinds = ("string", "number") if schema.get(QUANTITY) else ("integer", "string")
            made["oneOf"] = [{"type": kind} for kind in kinds]
        return made
    if version == 2:
        target = reference(schema)
        if target:
            made = {key: value for key, value in made.items() if key in ("description",) or key.startswith("x-")}
            return {"$ref": _V2 + target, **made}
        for key in ("oneOf", "anyOf", "not", "allOf", "nullable"):
            made.pop(key, None)
    for key in ("properties", "items", "additionalProperties", "allOf", "anyOf", "oneOf", "not"):
        if key not in made:
            continue
        if key == "properties":
            made[key] = {name: _shaped(part, version) for name, part in made[key].items()}
        else:
            made[key] = _shaped(made[key], version)
    return made


def _addresses(resource: Resource) -> tuple[str, str]:
    """Of the collection and of one object."""
    where = "/namespaces/{namespace}" if resource.namespaced else ""
    collection = f"/{resource.path}{where}/{resource.plural}"
    return collection, collection + "/{name}"


def _operation(resource: Resource, action: str, version: int) -> Object:
    name = schema_name(resource) + ("List" if action == "list" else "")
    pointer = {"$ref": (_V2 if version == 2 else _V3) + name}
    made: Object = {
        "description": f"{action} {resource.plural}",
        "operationId": f"{action}{resource.group.title().replace('.', '')}{resource.version.title()}{resource.kind}",
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _kind(resource),
    }
    if version == 3:
        made["parameters"] = [
            {"name": key, "in": "query", "description": text, "schema": {"type": kind, "uniqueItems": True}}
            for key, kind, text in _PARAMETERS
        ]
        made["responses"] = {"200": {"description": "OK", "content": {"application/json": {"schema": pointer}}}}
    else:
        made["parameters"] = [
            {"name": key, "in": "query", "description": text, "type": kind, "uniqueItems": True}
            for key, kind, text in _PARAMETERS
        ]
        made["produces"] = ["application/json", "application/yaml"]
        made["responses"] = {"200": {"description": "OK", "schema": pointer}}
    if action == "patch":
        types = patch_types(resource)
        if version == 3:
            made["requestBody"] = {
                "required": True,
                "content": {kind: {"schema": {"type": "object"}} for kind in types},
            }
        else:
            made["consumes"] = types
    elif action in ("post", "put"):
        if version == 3:
            made["requestBody"] = {"required": True, "content": {"*/*": {"schema": pointer}}}
        else:
            made["consumes"] = ["*/*"]
    return made


def _paths(resources: list[Resource], version: int) -> dict[str, Object]:
    found: dict[str, Object] = {}
    for resource in resources:
        collection, single = _addresses(resource)
        found[collection] = {
            "get": _operation(resource, "list", version),
            "post": _operation(resource, "post", version),
            "delete": _operation(resource, "deletecollection", version),
        }
        found[single] = {
            "get": _operation(resource, "get", version),
            "put": _operation(resource, "put", version),
            "patch": _operation(resource, "patch", version),
            "delete": _operation(resource, "delete", version),
        }
        if resource.namespaced:
            found[f"/{resource.path}/{resource.plural}"] = {"get": _operation(resource, "list", version)}
        if resource.has_status:
            found[single + "/status"] = {
                "get": _operation(resource, "get", version),
                "put": _operation(resource, "put", version),
                "patch": _operation(resource, "patch", version),
            }
    return found


def openapi_v2(registry: Registry) -> Object:
    """For GET /openapi/v2 with JSON."""

    def make() -> Object:
        resources = registry.all()
        return {
            "swagger": "2.0",
            "info": _INFO,
            "paths": _paths(resources, 2),
            "definitions": {name: _shaped(schema, 2) for name, schema in sorted(_definitions(resources).items())},
        }

    made: Object = registry.remember("v2", make)
    return made


def openapi_v2_protobuf(registry: Registry) -> bytes:
    """For GET /openapi/v2 with `Accept: application/com.github.proto-openapi.spec.v2@v1.0+protobuf` (kubectl)."""
    made: bytes = registry.remember("v2pb", lambda: encode_document(openapi_v2(registry)))
    return made


def openapi_v3_index(registry: Registry) -> Object:
    """For GET /openapi/v3. The hash in an address changes with the document, so that clients may keep the rest."""

    def make() -> Object:
        paths: Object = {}
        for group, versions in registry.groups().items():
            for version in versions:
                path = f"apis/{group}/{version}" if group else f"api/{version}"
                text = json.dumps(openapi_v3(registry, path), sort_keys=True)
                paths[path] = {
                    "serverRelativeURL": f"/openapi/v3/{path}?hash={hashlib.sha256(text.encode()).hexdigest().upper()}"
                }
        return {"paths": paths}

    made: Object = registry.remember("v3", make)
    return made


def openapi_v3(registry: Registry, path: str) -> Object | None:
    """For GET /openapi/v3/PATH with PATH `api/v1` or `apis/GROUP/VERSION`; None if there is no such group version."""
    resources = [resource for resource in registry.all() if resource.path == path]
    if not resources:
        return None

    def make() -> Object:
        return {
            "openapi": "3.0.0",
            "info": _INFO,
            "paths": _paths(resources, 3),
            "components": {
                "schemas": {name: _shaped(schema, 3) for name, schema in sorted(_definitions(resources).items())}
            },
        }

    made: Object = registry.remember(f"v3/{path}", make)
    return made
