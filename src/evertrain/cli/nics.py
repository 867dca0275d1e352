"""Which devices of a job change their network link, from what a person has written. Pure.

An operation is a list for each node: devices, and for each whether it goes to its backup link (true) or to its primary
one (false), as ClusterD's SwitchNicTrack takes it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from evertrain.acjob import names
from evertrain.cli.running import UsageError
from evertrain.kube.port import Object

T = TypeVar("T")
Operations = dict[str, tuple[list[str], list[bool]]]
"""By node."""

DEVICE = "device"
LINKS = {True: "backup", False: "primary"}
_WORDS = {"true": True, "backup": True, "false": False, "primary": False}


def devices(text: str) -> list[str]:
    """`device0,device8`, `0,8` or `[device0, device8]`. ValueError says what is wrong."""
    found = [word.removeprefix(DEVICE) for word in _words(text)]
    for word in found:
        if not word.isascii() or not word.isdecimal():
            raise ValueError(f"{word!r} is not a device: they are numbers, such as device0 or 0")
    if len(set(found)) != len(found):
        raise ValueError(f"{text!r} names a device twice")
    return found


def ops(text: str) -> list[bool]:
    """`true,true` or `[true, false]`. ValueError says what is wrong."""
    found = []
    for word in _words(text):
        if word.lower() not in _WORDS:
            raise ValueError(f"{word!r} is neither true (to the backup link) nor false (back to the primary one)")
        found.append(_WORDS[word.lower()])
    return found


def _words(text: str) -> list[str]:
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    found = [word.strip() for word in inner.split(",")]
    if not all(found):
        raise ValueError(f"{text!r} is not a list like [device0, device8] or [true, true]")
    return found


def used(pods: Sequence[Object]) -> dict[str, list[str]]:
    """The devices of a job's pods, by node."""
    found: dict[str, list[str]] = {}
    for pod in pods:
        annotations = pod["metadata"].get("annotations") or {}
        text = next((annotations[key] for key in names.DEVICE_CONFIGURATIONS if key in annotations), "{}")
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            listed = [str(each["device_id"]) for each in json.loads(text).get("devices") or []]
            if listed and (node := (pod.get("spec") or {}).get("nodeName")):
                found.setdefault(node, []).extend(listed)
    return found


def operations(
    nodes: Sequence[str],
    devs: Sequence[Sequence[str]],
    wanted: Sequence[Sequence[bool]],
    known: Mapping[str, Sequence[str]],
) -> Operations:
    """The options in the order in which they were given. Without nodes: all of the job; without devices: all of a node.

    A list is given once for all nodes, or once for each; one operation counts for all devices beside it.
    """
    if len(set(nodes)) != len(nodes):
        raise UsageError("a node is named twice; list all its devices behind one --dev")
    places = list(nodes) or sorted(known)
    if not places:
        raise UsageError("no pod of the job is on a node")
    found: Operations = {}
    for index, node in enumerate(places):
        named = _one("--dev", devs, index, len(places))
        chosen = list(known.get(node, ()) if named is None else named)
        if not chosen:
            raise UsageError(f"the job has no device on {node}")
        given = list(_one("--op", wanted, index, len(places)) or ())
        if len(given) == 1:
            given *= len(chosen)
        if len(given) != len(chosen):
            raise UsageError(f"{node}: {len(chosen)} devices and {len(given)} operations; each device needs one")
        found[node] = chosen, given
    return found


def _one(option: str, given: Sequence[T], index: int, places: int) -> T | None:
    if len(given) <= 1:
        return given[0] if given else None
    if len(given) != places:
        raise UsageError(f"{option} is given {len(given)} times for {places} nodes: once for all, or once for each")
    return given[index]


def described(ops: Operations) -> list[str]:
    """A line for each node and direction."""
    lines = []
    for node, (devs, given) in ops.items():
        for backup, link in LINKS.items():
            chosen = [dev for dev, op in zip(devs, given, strict=True) if op is backup]
            if chosen:
                lines.append(f"{node}: device {', '.join(chosen)} to the {link} link")
    return lines
