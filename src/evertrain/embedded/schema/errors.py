"""Refusals in the words of Kubernetes.

kubectl prints these messages as they are, and its users know them; so the texts, reasons and codes are those of the
original API server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evertrain.kube.port import Object


@dataclass(frozen=True)
class FieldError:
    """One thing wrong with one field."""

    field: str
    reason: str
    """FieldValueRequired, FieldValueInvalid, …: the word of a StatusCause."""
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def cause(self) -> Object:
        return {"reason": self.reason, "message": self.message, "field": self.field}


def shown(value: Any) -> str:
    """A value as it stands in a message; long ones are cut, they help nobody."""
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 1000 else text[:1000] + "…"


def required(field: str, detail: str = "") -> FieldError:
    return FieldError(field, "FieldValueRequired", "Required value" + (f": {detail}" if detail else ""))


def invalid(field: str, value: Any, detail: str) -> FieldError:
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {shown(value)}: {detail}")


def wrong_type(field: str, value: Any, detail: str) -> FieldError:
    return FieldError(field, "FieldValueTypeInvalid", f"Invalid value: {shown(value)}: {detail}")


def unsupported(field: str, value: Any, supported: Iterable[Any]) -> FieldError:
    listed = ", ".join(shown(item) for item in supported)
    return FieldError(field, "FieldValueNotSupported", f"Unsupported value: {shown(value)}: supported values: {listed}")


def duplicate(field: str, value: Any) -> FieldError:
    return FieldError(field, "FieldValueDuplicate", f"Duplicate value: {shown(value)}")


def forbidden(field: str, detail: str) -> FieldError:
    return FieldError(field, "FieldValueForbidden", f"Forbidden: {detail}")


def too_many(field: str, count: int, limit: int) -> FieldError:
    return FieldError(field, "FieldValueTooMany", f"Too many: {count}: must have at most {limit} items")


def too_long(field: str, limit: int) -> FieldError:
    return FieldError(field, "FieldValueTooLong", f"Too long: may not be more than {limit} bytes")


class Refused(Exception):
    """A request that can't be granted; `status()` is the body of the answer."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    def status(self) -> Object:
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def invalid_object(group: str, kind: str, name: str, errors: Sequence[FieldError]) -> Refused:
    """422 with a cause for every field."""
    words = [str(error) for error in errors]
    listed = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    full = f"{kind}.{group}" if group else kind
    details: Object = {"name": name, "group": group, "kind": kind, "causes": [error.cause() for error in errors]}
    return Refused(
        422,
        "Invalid",
        f"{full} {json.dumps(name)} is invalid: {listed}",
        {key: value for key, value in details.items() if value},
    )
