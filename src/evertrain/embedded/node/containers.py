"""What the runtime is told to run for a container (see `runtime.container`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.embedded.node import environment, volumes
from evertrain.embedded.node.environment import Place
from evertrain.embedded.node.lifecycle import ContainerRun
from evertrain.embedded.node.runtime.mounts import SHARED_MEMORY, Mount
from evertrain.embedded.node.volumes import Prepared
from evertrain.kube.port import Object

if TYPE_CHECKING:
    from evertrain.embedded.node.node import VirtualNode

MAX_HOST_NAME = 63
NAME_FILES = ("hosts", "resolv.conf")
"""Of a pod's own, in /etc: which names stand for which addresses."""
NO_NAME_SERVER = "# Nothing leaves this machine: no name server; the names of Services are in /etc/hosts.\n"


def log_folder(pod_folder: Path, container: str) -> Path:
    return pod_folder / "logs" / container


def log_name(attempt: int) -> str:
    return f"{attempt}.log"


def specification(
    node: VirtualNode, pod: Object, container: ContainerRun, place: Place, prepared: Prepared, folder: Path
) -> dict[str, Any]:
    """Raises ConfigError if something that it refers to is missing."""
    spec, pod_spec = container.spec, pod.get("spec") or {}
    hostname = ""
    if not pod_spec.get("hostNetwork"):
        hostname = str(pod_spec.get("hostname") or pod["metadata"]["name"])[:MAX_HOST_NAME]
    base = {**node.base_environment, "HOSTNAME": hostname or os.uname().nodename}
    variables = environment.build(pod, spec, place, node.lookup, base)
    names = [folder / name for name in NAME_FILES if not node.engine.no_mounts and (folder / name).exists()]
    mounts = volumes.mounts(spec, prepared.paths, variables, names)
    logs = log_folder(folder, container.name)
    logs.mkdir(parents=True, exist_ok=True)
    _forget_old(logs, container.attempts - 2)
    security = {**(pod_spec.get("securityContext") or {}), **(spec.get("securityContext") or {})}
    return {
        "argv": environment.command(spec, variables),
        "env": variables,
        "workdir": str(spec.get("workingDir") or "/"),
        "mounts": mounts,
        "staging": str(folder / "root"),
        "hostname": hostname,
        "own_memory": not pod_spec.get("hostIPC") and not _in_shared_memory(folder, mounts),
        "log_folder": str(logs),
        "log_name": log_name(container.attempts),
        "log_limits": node.config.log_limits,
        "user": security.get("runAsUser"),
        "group": security.get("runAsGroup", security.get("runAsUser")),
    }


def _forget_old(folder: Path, newest: int) -> None:
    """Logs and records up to this run of the container."""
    for path in folder.iterdir():
        number = path.name.partition(".")[0]
        if number.isdecimal() and int(number) <= newest:
            with contextlib.suppress(OSError):
                path.unlink()


def _in_shared_memory(folder: Path, wanted: Iterable[Mount]) -> bool:
    """Something that the pod needs lies there, and would be hidden by shared memory of its own."""
    paths = [folder, *(Path(mount["source"]) for mount in wanted)]
    return any(path.resolve().is_relative_to(SHARED_MEMORY) for path in paths)
