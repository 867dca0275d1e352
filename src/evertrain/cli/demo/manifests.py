"""The YAML files of the examples, for a demo: other folders and ports, more arguments, nothing else."""

from __future__ import annotations

import contextlib
import copy
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evertrain.cli import manifest
from evertrain.kube.port import Object

PORTS = range(12_000, 29_000)
"""Below those that the system hands out by itself: until one is used, seconds pass."""


def documents_of(
    file: Path, name: str, output: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[manifest.Document]:
    """Those of an example, the AscendJob as the last one; `arguments` of its training script."""
    *others, document = manifest.read(str(file))
    job = copy.deepcopy(document.object)
    original = job["metadata"]["name"]
    job["metadata"]["name"] = name
    # Others on this machine may use the examples' ports, and where pods have no network of their own, they would meet.
    names = ("ascendjob-port", "ttp-port", "taskd-port", "proxy")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    given = {
        "TTP_PORT": str(ports["ttp-port"]),
        "TASKD_MANAGER_PORT": str(ports["taskd-port"]),
        "TASKD_PROXY_PORT": str(ports["proxy"]),
        "TMPDIR": "/job/output",  # torch leaves a folder in it
        **environment,
    }
    for replica in job["spec"]["replicaSpecs"].values():
        _adapt(replica["template"]["spec"], (original, name), file.parents[1], output, arguments, given, ports)
    return [*(_renamed(other, original, name) for other in others), replace(document, object=job)]


def _renamed(document: manifest.Document, original: str, name: str) -> manifest.Document:
    """What belongs to a job by its name."""
    copied = copy.deepcopy(document.object)
    copied["metadata"]["name"] = copied["metadata"]["name"].replace(original, name)
    return replace(document, object=copied)


def _adapt(
    pod: Object,
    names: tuple[str, str],
    code: Path,
    output: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    ports: Mapping[str, int],
) -> None:
    for term in pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]:
        for expression in term["labelSelector"]["matchExpressions"]:
            expression["values"] = [names[1] if value == names[0] else value for value in expression["values"]]
    for volume in pod["volumes"]:
        if "nfs" in volume:
            volume["nfs"]["path"] = str({"code": code, "output": output}[volume["name"]])
        else:
            volume["configMap"]["name"] = volume["configMap"]["name"].replace(*names)
    (container,) = pod["containers"]
    container["args"][-1] = " ".join([container["args"][-1].rstrip(), *arguments])
    kept = [variable for variable in container["env"] if variable["name"] not in environment]
    container["env"] = kept + [{"name": name, "value": value} for name, value in environment.items()]
    for port in container["ports"]:
        port["containerPort"] = ports[port["name"]]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.SystemRandom().choice(PORTS)
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))  # on all addresses: torch's store listens on all
                found.append(port)
        return found
