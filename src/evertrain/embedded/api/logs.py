"""Logs of pods: the question, as the nodes get it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import datetime

from evertrain.embedded.podlogs import LogRequest, LogSource, LogsUnavailable
from evertrain.embedded.schema import bad_request
from evertrain.kube.port import Object
from evertrain.kube.times import parse_time

__all__ = ["LogRequest", "LogSource", "LogsUnavailable", "is_true", "log_request", "no_logs"]


async def no_logs(pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
    """Of a server without nodes."""
    raise LogsUnavailable(f"no node keeps logs of pod {pod['metadata']['name']}")
    yield b""


def log_request(pod: Object, query: Mapping[str, str], now: datetime) -> LogRequest:
    """From the query of GET pods/NAME/log. Raises Refused (400)."""
    name = pod["metadata"]["name"]
    spec = pod.get("spec") or {}
    containers = [item["name"] for item in spec.get("containers") or ()]
    others = [item["name"] for key in ("initContainers", "ephemeralContainers") for item in spec.get(key) or ()]
    container = query.get("container", "")
    if not container:
        if len(containers) != 1:
            choice = "[" + " ".join(containers) + "]"
            raise bad_request(f"a container name must be specified for pod {name}, choose one of: {choice}")
        container = containers[0]
    elif container not in containers + others:
        raise bad_request(f"container {container} is not valid for pod {name}")
    since: datetime | None = None
    seconds = _number(query, "sinceSeconds")
    if seconds is not None:
        since = datetime.fromtimestamp(now.timestamp() - seconds, now.tzinfo)
    elif query.get("sinceTime"):
        try:
            since = parse_time(query["sinceTime"])
        except ValueError:
            raise bad_request(f"invalid sinceTime: {query['sinceTime']!r}") from None
        if since.tzinfo is None:
            raise bad_request("sinceTime needs a time zone")
    return LogRequest(
        container=container,
        follow=is_true(query.get("follow", "")),
        previous=is_true(query.get("previous", "")),
        timestamps=is_true(query.get("timestamps", "")),
        tail=_number(query, "tailLines"),
        since=since,
        limit=_number(query, "limitBytes"),
    )


def is_true(text: str) -> bool:
    return text.lower() in ("true", "1", "t")


def _number(query: Mapping[str, str], key: str) -> int | None:
    text = query.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise bad_request(f"{key} must be a number that is not negative, not {text!r}")
    return int(text)
