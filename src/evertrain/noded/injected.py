"""Faults that somebody has injected: a ConfigMap per node, which the node's daemon reads. Pure.

`noded-injected-NODE` in the namespace mindx-dl, key `faults`: a JSON array of faults as in `faults`. So faults can be
injected wherever the Kubernetes API is, and whoever may write ConfigMaps of that namespace may do it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from evertrain.kube.port import Object
from evertrain.noded.faults import AnyFault, Malformed, decode, encode

NAMESPACE = "mindx-dl"
PREFIX = "noded-injected-"
LABEL = "evertrain.dev/injected-faults"
KEY = "faults"
MOST = 1000


def name_of(node: str) -> str:
    return PREFIX + node


def node_of(config_map: Object) -> str:
    return str(config_map["metadata"]["name"]).removeprefix(PREFIX)


def config_map(node: str, faults: Iterable[AnyFault]) -> Object:
    text = "[" + ",\n ".join(json.dumps(encode(fault)) for fault in faults) + "]"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name_of(node), "namespace": NAMESPACE, "labels": {LABEL: "true"}},
        "data": {KEY: text},
    }


def read(config_map: Object | None, now_ms: int) -> tuple[list[AnyFault], list[str]]:
    """The faults, and what is wrong with what else is there."""
    text = ((config_map or {}).get("data") or {}).get(KEY) or "[]"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:
        return [], [f"{KEY} is not JSON: {error}"]
    if not isinstance(entries, list):
        return [], [f"{KEY} is not a JSON array"]
    faults: list[AnyFault] = []
    problems = [f"only the first {MOST} of {len(entries)} faults count"] if len(entries) > MOST else []
    for number, entry in enumerate(entries[:MOST]):
        try:
            if not isinstance(entry, dict):
                raise Malformed("not a JSON object")
            faults.append(decode(entry, now_ms))
        except Malformed as error:
            problems.append(f"{KEY}[{number}]: {error}")
    return faults, problems
