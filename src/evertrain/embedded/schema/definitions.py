"""CustomResourceDefinition objects into kinds."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from evertrain.embedded.schema import models
from evertrain.embedded.schema.kinds import Column, Resource, Schema
from evertrain.embedded.schema.structure import OBJECT_META
from evertrain.kube.port import Object


def version_rank(version: str) -> tuple[int, int, int, str]:
    """Kubernetes' order of versions: v2, v1, v2beta1, v1beta2, v1alpha1, then others by name."""
    found = re.fullmatch(r"v(\d+)(?:(alpha|beta)(\d+))?", version)
    if found is None:
        return (3, 0, 0, version)
    major, stage, minor = found.groups()
    return ({None: 0, "beta": 1, "alpha": 2}[stage], -int(major), -int(minor or 0), version)


def columns_of(version: Object) -> tuple[Column, ...]:
    columns = [Column("Name", description="Name must be unique within a namespace.", format="name")]
    listed = version.get("additionalPrinterColumns")
    if listed:
        for column in listed:
            columns.append(
                Column(
                    column["name"],
                    column["jsonPath"],
                    column["type"],
                    column.get("format", ""),
                    column.get("description", ""),
                    column.get("priority", 0),
                )
            )
    else:
        columns.append(Column("Age", ".metadata.creationTimestamp", "date"))
    return tuple(columns)


def _complete(schema: Schema) -> Schema:
    """A custom resource's schema with what every object has."""
    properties = {**schema.get("properties", {})}
    described = models.definition(models.name_of("core_v1", "Pod"))["properties"]
    for field in ("apiVersion", "kind"):
        properties[field] = described[field]
    properties["metadata"] = {
        "allOf": [{"$ref": f"#/components/schemas/{OBJECT_META}"}],
        "description": described["metadata"]["description"],
    }
    return {**schema, "properties": properties}


def resources_of(definition: Object) -> list[Resource]:
    """The served versions of a valid CustomResourceDefinition."""
    spec = definition["spec"]
    names = spec["names"]
    found: list[Resource] = []
    for version in spec["versions"]:
        if not version.get("served", True):
            continue
        declared: dict[str, Any] = version.get("subresources") or {}
        schema: Schema = (version.get("schema") or {}).get("openAPIV3Schema") or {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
        }
        warning = ""
        if version.get("deprecated"):
            warning = version.get("deprecationWarning") or (
                f"{spec['group']}/{version['name']} {names['kind']} is deprecated"
            )
        found.append(
            Resource(
                group=spec["group"],
                version=version["name"],
                kind=names["kind"],
                plural=names["plural"],
                namespaced=spec.get("scope", "Namespaced") == "Namespaced",
                singular=names.get("singular") or names["kind"].lower(),
                list_kind=names.get("listKind") or names["kind"] + "List",
                short_names=tuple(names.get("shortNames") or ()),
                categories=tuple(names.get("categories") or ()),
                subresources=frozenset(declared) & {"status"},
                columns=columns_of(version),
                custom=True,
                storage=f"{spec['group']}/{names['plural']}",
                selectable=tuple(item["jsonPath"] for item in version.get("selectableFields") or ()),
                load=partial(_complete, schema),
                definitions=models.definition,
                warning=warning,
            )
        )
    return found
