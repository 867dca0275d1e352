"""Lists: at a version, by selectors, in pages that all show the same moment."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass

from evertrain.embedded.api.status import Expired, version_in_future
from evertrain.embedded.schema import (
    FieldError,
    FieldSelector,
    LabelSelector,
    Resource,
    bad_request,
    converted,
    invalid_object,
)
from evertrain.embedded.store import Record, Store, TooOld
from evertrain.kube.port import Object

Matcher = Callable[[Object], bool]


@dataclass(frozen=True)
class ListOptions:
    labels: str = ""
    fields: str = ""
    limit: int = 0
    token: str = ""
    """`continue` of the page before."""
    version: str = ""
    match: str = ""
    """resourceVersionMatch: Exact or NotOlderThan."""


@dataclass(frozen=True)
class Page:
    records: list[Record]
    version: int
    token: str = ""
    remaining: int | None = None

    @property
    def metadata(self) -> Object:
        metadata: Object = {"resourceVersion": str(self.version)}
        if self.token:
            metadata["continue"] = self.token
        if self.remaining:
            metadata["remainingItemCount"] = self.remaining
        return metadata


def storage_of(resource: Resource) -> str:
    """The key of its objects in the store."""
    return resource.storage or f"{resource.group}/{resource.plural}"


def shown(resource: Resource, record: Record) -> Object:
    """As this version of the kind shows it; to be read only."""
    item = record.object
    return item if item.get("apiVersion") == resource.api_version else converted(record.copy(), resource)


def matcher(resource: Resource, labels: str, fields: str) -> Matcher | None:
    """None if everything matches. Raises Refused (400)."""
    by_label = LabelSelector.parse(labels) if labels.strip() else LabelSelector()
    by_field = FieldSelector.parse(fields, resource) if fields.strip() else FieldSelector()
    if not by_label and not by_field:
        return None

    def matches(item: Object) -> bool:
        return by_field.matches(item) and by_label.matches(item["metadata"].get("labels"))

    return matches


def quick_matcher(resource: Resource, fields: str) -> Matcher | None:
    """Refuses most of what `matcher` refuses, at a fraction of the cost: a watch by node has fifty like it beside it,
    and each looks at every pod."""
    if resource.storage or not fields.strip():
        return None  # what is stored may have other fields than what is shown
    terms = FieldSelector.parse(fields, resource).terms
    for path, equal, value in terms:
        first, _, second = path.partition(".")
        if equal and value not in ("", "true", "false") and second and "." not in second:
            return lambda item: (item.get(first) or {}).get(second) == value
    return None


def select(resource: Resource, records: list[Record], matches: Matcher | None) -> list[Record]:
    if matches is None:
        return records
    return [record for record in records if matches(shown(resource, record))]


def parse_version(text: str, field: str = "resourceVersion") -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 19:
        error = FieldError(field, "FieldValueInvalid", f"Invalid value: {json.dumps(text)}: must be a decimal number")
        raise invalid_object("meta.k8s.io", "ListOptions", "", [error])
    return int(text)


def page(store: Store, resource: Resource, namespace: str | None, options: ListOptions) -> Page:
    """Raises Refused, Expired."""
    _check(options)
    matches = matcher(resource, options.labels, options.fields)
    storage = storage_of(resource)
    start: tuple[str, str] | None = None
    version = store.version
    if options.token:
        version, start = _read_token(options.token)
        if version < 0:
            version = store.version
        if version > store.version:
            raise version_in_future(version, store.version)
    elif options.version not in ("", "0"):
        asked = parse_version(options.version)
        if asked > store.version:
            raise version_in_future(asked, store.version)
        if options.match == "Exact" or (not options.match and options.limit):
            version = asked
    try:
        found = store.records_at(storage, version, namespace)
    except TooOld:
        if start is None:
            raise Expired("The resourceVersion for the provided list is too old.") from None
        raise Expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list "
            "without the continue parameter, or use the continue token in this response to retrieve the remainder of "
            "the results. Continuing with the provided token results in an inconsistent list - objects that were "
            "created, modified, or deleted between the time the first chunk was returned and now may show up in the "
            "list.",
            _token(-1, start),
        ) from None
    if start is not None:
        found = [record for record in found if (record.namespace, record.name) > start]
    found = select(resource, found, matches)
    if not options.limit or len(found) <= options.limit:
        return Page(found, version)
    kept = found[: options.limit]
    remaining = len(found) - options.limit if matches is None else None
    return Page(kept, version, _token(version, (kept[-1].namespace, kept[-1].name)), remaining)


def _check(options: ListOptions) -> None:
    if options.limit < 0:
        raise bad_request("limit must not be negative")

    def forbidden(detail: str) -> Exception:
        error = FieldError("resourceVersionMatch", "FieldValueForbidden", f"Forbidden: {detail}")
        return invalid_object("meta.k8s.io", "ListOptions", "", [error])

    if options.token and options.version not in ("", "0"):
        raise bad_request("specifying resource version is not allowed when using continue")
    if not options.match:
        return
    if options.match not in ("Exact", "NotOlderThan"):
        error = FieldError(
            "resourceVersionMatch",
            "FieldValueNotSupported",
            f'Unsupported value: {json.dumps(options.match)}: supported values: "Exact", "NotOlderThan"',
        )
        raise invalid_object("meta.k8s.io", "ListOptions", "", [error])
    if not options.version:
        raise forbidden("resourceVersionMatch is forbidden unless resourceVersion is provided")
    if options.token:
        raise forbidden("resourceVersionMatch is forbidden when continue is provided")
    if options.match == "Exact" and options.version == "0":
        raise forbidden('resourceVersionMatch "exact" is forbidden for resourceVersion "0"')


def _token(version: int, last: tuple[str, str]) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": list(last)}, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        content = json.loads(base64.urlsafe_b64decode(token.encode() + b"=" * (-len(token) % 4)))
        version, (namespace, name) = content["rv"], content["start"]
        if type(version) is not int or not isinstance(namespace, str) or not isinstance(name, str):
            raise ValueError
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError):
        raise bad_request("continue key is not valid: encoded start key is not readable") from None
    return version, (namespace, name)
