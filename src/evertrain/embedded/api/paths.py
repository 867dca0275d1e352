"""URL paths of the API into what they mean. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Path:
    """`/api/v1/namespaces/NAMESPACE/pods/NAME/log` and its relatives."""

    group: str
    version: str
    plural: str = ""
    namespace: str | None = None
    name: str = ""
    subresource: str = ""
    beyond: str = ""
    """What the object itself is asked, behind `proxy/`."""


def parse(path: str) -> Path | None:
    """None if it is no path of a resource."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    if any(not part for part in rest):
        return None
    if rest[:1] == ["namespaces"] and len(rest) >= 3 and not _of_namespace(group, rest):
        namespace, rest = rest[1], rest[2:]
        return _object(group, version, namespace, rest)
    return _object(group, version, None, rest)


def _of_namespace(group: str, rest: list[str]) -> bool:
    """`namespaces/NAME/status` is a part of the namespace, not a kind in it."""
    return group == "" and len(rest) == 3 and rest[2] in ("status", "finalize")


def _object(group: str, version: str, namespace: str | None, rest: list[str]) -> Path | None:
    if len(rest) > 3 and rest[2] != "proxy":
        return None
    plural, name, subresource = [*rest, "", "", ""][:3]
    return Path(group, version, plural, namespace, name, subresource, "/".join(rest[3:]))
