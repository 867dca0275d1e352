"""Refusals in Kubernetes' words; those about the form of objects are in `embedded.schema`."""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.embedded.schema import FieldError, Refused, Resource
from evertrain.kube.port import Object


class Expired(Refused):
    """410. `token` continues a list at what is there now instead of what was there when it began."""

    def __init__(self, message: str, token: str = "") -> None:
        super().__init__(410, "Expired", message)
        self.token = token

    def status(self) -> Object:
        status = super().status()
        if self.token:
            status["metadata"] = {"continue": self.token}
        return status


def _about(resource: Resource, name: str) -> Object:
    details: Object = {"name": name, "group": resource.group, "kind": resource.plural}
    return {key: value for key, value in details.items() if value}


def success(resource: Resource, name: str, uid: str) -> Object:
    details = {**_about(resource, name), "uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def unauthorized() -> Refused:
    return Refused(401, "Unauthorized", "Unauthorized")


def forbidden(resource: Resource, name: str, why: str, causes: Sequence[FieldError] = ()) -> Refused:
    details = _about(resource, name)
    if causes:
        details["causes"] = [cause.cause() for cause in causes]
    return Refused(403, "Forbidden", f'{resource.qualified} "{name}" is forbidden: {why}', details)


def path_not_found() -> Refused:
    return Refused(404, "NotFound", "the server could not find the requested resource")


def not_found(resource: Resource, name: str) -> Refused:
    return Refused(404, "NotFound", f'{resource.qualified} "{name}" not found', _about(resource, name))


def method_not_allowed() -> Refused:
    return Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def not_acceptable(*accepted: str) -> Refused:
    return Refused(406, "NotAcceptable", f"only the following media types are accepted: {', '.join(accepted)}")


def already_exists(resource: Resource, name: str) -> Refused:
    return Refused(409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', _about(resource, name))


def conflict(resource: Resource, name: str, why: str) -> Refused:
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return Refused(409, "Conflict", message, _about(resource, name))


def changed(resource: Resource, name: str) -> Refused:
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(resource, name, why)


def too_large(limit: int) -> Refused:
    return Refused(413, "RequestEntityTooLarge", f"Request entity too large: limit is {limit}")


def unsupported_media_type(*accepted: str) -> Refused:
    message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(accepted)
    return Refused(415, "UnsupportedMediaType", message)


def internal(message: str) -> Refused:
    return Refused(500, "InternalError", f"Internal error occurred: {message}", {"causes": [{"message": message}]})


def unavailable(message: str) -> Refused:
    return Refused(503, "ServiceUnavailable", message)


def version_in_future(asked: int, current: int) -> Refused:
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    return Refused(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {asked}, current: {current}",
        {"causes": [cause], "retryAfterSeconds": 1},
    )
