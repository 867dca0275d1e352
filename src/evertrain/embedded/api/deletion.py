"""What a DELETE means for an object: gone at once, or marked and left to whoever has to finish. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from evertrain.embedded.schema import FieldError, Resource, bad_request, invalid_object
from evertrain.kube.port import Object
from evertrain.kube.times import parse_time

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
POLICIES = ("Background", "Foreground", "Orphan")


@dataclass(frozen=True)
class DeleteOptions:
    grace: int | None = None
    uid: str = ""
    version: str = ""
    """uid and version are preconditions."""
    policy: str = ""
    dry_run: bool = False


def delete_options(body: Any, query: dict[str, str]) -> DeleteOptions:
    """From the body of a DELETE (if there is one) and the query. Raises Refused."""
    body = {} if body is None else body
    if not isinstance(body, dict):
        raise bad_request("DeleteOptions must be an object")
    grace: Any = body.get("gracePeriodSeconds")
    if grace is None and query.get("gracePeriodSeconds"):
        try:
            grace = int(query["gracePeriodSeconds"])
        except ValueError:
            raise bad_request(f"invalid gracePeriodSeconds: {query['gracePeriodSeconds']!r}") from None
    if grace is not None and type(grace) is not int:
        raise bad_request("gracePeriodSeconds must be an integer")
    preconditions = body.get("preconditions") or {}
    if not isinstance(preconditions, dict):
        raise bad_request("preconditions must be an object")
    policy = body.get("propagationPolicy") or query.get("propagationPolicy") or ""
    if not policy and body.get("orphanDependents") is not None:
        policy = "Orphan" if body["orphanDependents"] else "Background"
    if policy and policy not in POLICIES:
        error = FieldError(
            "propagationPolicy",
            "FieldValueInvalid",
            f'Invalid value: "{policy}": must be one of "Foreground", "Background", "Orphan" or not set',
        )
        raise invalid_object("meta.k8s.io", "DeleteOptions", "", [error])
    dry_run = body.get("dryRun") or ([query["dryRun"]] if query.get("dryRun") else [])
    return DeleteOptions(
        grace=max(grace, 0) if grace is not None else None,
        uid=str(preconditions.get("uid") or ""),
        version=str(preconditions.get("resourceVersion") or ""),
        policy=str(policy),
        dry_run=is_dry_run(dry_run),
    )


def is_dry_run(values: Any) -> bool:
    if not values:
        return False
    if values in (["All"], "All"):
        return True
    error = FieldError("dryRun", "FieldValueNotSupported", f'Unsupported value: "{values}": supported values: "All"')
    raise invalid_object("meta.k8s.io", "DeleteOptions", "", [error])


def grace_of(resource: Resource, item: Object, asked: int | None) -> int:
    """Only pods that run somewhere are given time."""
    if (resource.group, resource.kind) != ("", "Pod"):
        return 0
    spec = item.get("spec") or {}
    if not spec.get("nodeName") or (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    if asked is not None:
        return asked
    return int(spec.get("terminationGracePeriodSeconds", 30))


def finishable(item: Object) -> bool:
    """Marked for deletion, and nobody has to do anything before it goes."""
    metadata = item["metadata"]
    return bool(
        metadata.get("deletionTimestamp")
        and not metadata.get("finalizers")
        and not metadata.get("deletionGracePeriodSeconds")
    )


def marked(resource: Resource, item: Object, options: DeleteOptions, now: datetime) -> Object | None:
    """The object (the caller's own, changed) after the request, or None if it goes at once."""
    metadata = item["metadata"]
    finalizers = [name for name in metadata.get("finalizers") or []]
    if options.policy:
        finalizers = [name for name in finalizers if name not in (FOREGROUND, ORPHAN)]
        if options.policy == "Foreground":
            finalizers.append(FOREGROUND)
        elif options.policy == "Orphan":
            finalizers.append(ORPHAN)
    grace = grace_of(resource, item, options.grace)
    if metadata.get("deletionTimestamp"):
        before = int(metadata.get("deletionGracePeriodSeconds") or 0)
        # A second request may only shorten the time that is left.
        grace = min(grace, before) if options.grace is not None or grace == 0 else before
        if grace < before:
            begun = parse_time(metadata["deletionTimestamp"]) - timedelta(seconds=before)
            metadata["deletionTimestamp"] = _text(max(begun + timedelta(seconds=grace), now))
            metadata["deletionGracePeriodSeconds"] = grace
    else:
        metadata["deletionTimestamp"] = _text(now + timedelta(seconds=grace))
        metadata["deletionGracePeriodSeconds"] = grace
        if "generation" in metadata:
            metadata["generation"] += 1
    if finalizers:
        metadata["finalizers"] = finalizers
    else:
        metadata.pop("finalizers", None)
    return None if grace == 0 and not finalizers else item


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
