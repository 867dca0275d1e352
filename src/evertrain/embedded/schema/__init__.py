"""What each kind of object looks like, and everything that follows from it. Pure: no I/O, no clock.

The way of a write through it::

    decoded = decode(body, content_type)                       # 400 for what can't be read
    ready = prepare_create(resource, decoded.value, …)         # unknown fields, pruning, defaults, validation
    ready = prepare_update(resource, new, old, …)              # the same, and what may not change
    new = patched(resource, old, body, content_type)           # JSON, merge and strategic merge patch
    new = applied(resource, old, body, manager=…, force=…)     # server-side apply
    new = tracked(resource, old, new, manager=…)               # managedFields of all other writes

Everything that refuses raises `Refused`, which carries the Status object for the answer.
"""

from evertrain.embedded.schema.apply import applied, tracked
from evertrain.embedded.schema.decoding import Decoded, decode
from evertrain.embedded.schema.discovery import (
    aggregated_discovery,
    group_document,
    group_list,
    legacy_versions,
    resource_list,
)
from evertrain.embedded.schema.errors import FieldError, Refused, bad_request, invalid_object
from evertrain.embedded.schema.kinds import Column, Registry, Resource, Schema
from evertrain.embedded.schema.openapi import VERSION, openapi_v2, openapi_v2_protobuf, openapi_v3, openapi_v3_index
from evertrain.embedded.schema.patches import patched
from evertrain.embedded.schema.preparing import Prepared, converted, prepare_create, prepare_update
from evertrain.embedded.schema.selectors import FieldSelector, LabelSelector
from evertrain.embedded.schema.tables import table

__all__ = [
    "VERSION",
    "Column",
    "Decoded",
    "FieldError",
    "FieldSelector",
    "LabelSelector",
    "Prepared",
    "Refused",
    "Registry",
    "Resource",
    "Schema",
    "aggregated_discovery",
    "applied",
    "bad_request",
    "converted",
    "decode",
    "group_document",
    "group_list",
    "invalid_object",
    "legacy_versions",
    "openapi_v2",
    "openapi_v2_protobuf",
    "openapi_v3",
    "openapi_v3_index",
    "patched",
    "prepare_create",
    "prepare_update",
    "resource_list",
    "table",
    "tracked",
]
