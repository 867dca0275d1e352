"""A cluster that stops in the middle of starting a pod, at a chosen phase, so that it can be killed there.

    python -m tests.embedded.doomed FOLDER PHASE

and the one that comes after it:

    python -m tests.embedded.doomed FOLDER next

The phases are seams in the code of the product, of the cluster itself and of the two programs that it starts for the
network and for the containers. At its seam a process says so in the pipe FOLDER/here, and goes no further.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evertrain import aio
from tests.launch.harness import ROOT

HERE = "here"
"""A named pipe."""
DATA = "data"
VICTIM, NEXT = "victim", "next"
PATIENCE = 60.0
_EMBEDDED = "evertrain.embedded."


@dataclass(frozen=True)
class Seam:
    """Before or after the call of a function, the `number`-th one."""

    module: str
    path: str
    after: bool = True
    number: int = 1
    since: str = ""
    """The function, as MODULE:PATH, from which on calls count."""


_ADD_POD = "network.holder:World._add_pod"
CLUSTER = {
    "chosen a node": Seam("scheduler.shell", "Scheduler._bind", after=False),
    "bound": Seam("node.node", "VirtualNode._tell_about_images", after=False),
    "has an address": Seam("node.pod", "PodWorker._settle_address"),
    "asks for its network": Seam("network.fabric", "Fabric.add_pod", after=False),
    "has its network": Seam("network.fabric", "Fabric.add_pod"),
    "has its volumes": Seam("node.volumes", "prepare"),
    "has its init process": Seam("node.engine", "Engine.spawn"),
    "runs": Seam("node.pod", "PodWorker._note_start", after=False),
    "reports that it runs": Seam("node.pod", "PodWorker._note_start"),
}
NETWORK = {
    "its namespace": Seam("network.holder", "Namespace.here", since=_ADD_POD),
    "its first cable": Seam("network.rtnetlink", "Rtnetlink.add_cable", since=_ADD_POD),
    "its second cable, plugged": Seam("network.rtnetlink", "Rtnetlink.plug", number=2, since=_ADD_POD),
    "its address": Seam("network.rtnetlink", "Rtnetlink.add_address", since=_ADD_POD),
}
CONTAINER = {
    "an init process in its network": Seam("kernel", "enter", since="node.runtime.main:Runtime._become_init"),
    "its mounts": Seam("node.runtime.mounts", "arrange"),
    "its record": Seam("node.runtime.record", "Record.started"),
    "its program": Seam("node.runtime.container", "_Container.start"),
}
PHASES = {**CLUSTER, **NETWORK, **CONTAINER}

_SIDE = f"""\
import sys; sys.path[:0] = [sys.argv[1], {str(ROOT)!r}]
from tests.embedded.doomed import stop_at
stop_at({{folder!r}}, {{phase!r}})
from {{{{}}}} import main; main(sys.argv[2:])"""


def stop_at(folder: str, phase: str) -> None:
    """Puts the seam in, in this process."""
    seam = PHASES[phase]
    inside = [not seam.since]
    calls = [0]

    def arrived() -> None:
        calls[0] += inside[0]
        if inside[0] and calls[0] == seam.number:
            with open(f"{folder}/{HERE}", "w") as pipe:
                pipe.write(phase)
            signal.pause()

    def enters(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            inside[0] = True
            return function(*arguments, **named)

        return wrapped

    def stops(function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waiting(*arguments: Any, **named: Any) -> Any:
                if not seam.after:
                    arrived()
                found = await function(*arguments, **named)
                if seam.after:
                    arrived()
                return found

            return waiting

        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not seam.after:
                arrived()
            found = function(*arguments, **named)
            if seam.after:
                arrived()
            return found

        return wrapped

    _replace(seam.module, seam.path, stops)
    if seam.since:
        _replace(*seam.since.split(":"), enters)


def _replace(module: str, path: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner: Any = importlib.import_module(_EMBEDDED + module)
    *names, last = path.split(".")
    for name in names:
        owner = getattr(owner, name)
    found = inspect.getattr_static(owner, last)
    changed = change(found.__func__ if isinstance(found, classmethod) else found)
    setattr(owner, last, classmethod(changed) if isinstance(found, classmethod) else changed)


def pod(name: str, command: str) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "command": ["sh", "-c", command]}
    spec = {"restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


async def _main(folder: Path) -> None:
    from evertrain.embedded.cluster import Cluster
    from evertrain.kube.client import Client
    from evertrain.kube.port import POD

    async with Cluster(_settings(folder)) as cluster:
        kube = Client.from_kubeconfig(cluster.kubeconfig)
        await kube.create(POD, pod(VICTIM, f"echo run >> {folder}/record"))
        await asyncio.Event().wait()


async def next_one(folder: Path) -> str:
    """Comes to the end of the pod, starts another one. The phase in which the first one ended."""
    from evertrain.embedded.cluster import Cluster

    async with Cluster(_settings(folder)) as cluster:
        assert cluster.taken_over
        return await ends(cluster.kubeconfig)


async def ends(kubeconfig: Path) -> str:
    """The same on a cluster that runs already."""
    from evertrain.kube.cache import Cache
    from evertrain.kube.client import Client
    from evertrain.kube.port import POD

    kube = Client.from_kubeconfig(kubeconfig)
    pods = Cache(kube, POD, "default")
    watching = asyncio.create_task(pods.run())
    try:
        await kube.create(POD, pod("next", "grep -q eth0 /proc/net/dev && grep -q eth1 /proc/net/dev"))

        def phase(name: str) -> str:
            return str(((pods.get(name, "default") or {}).get("status") or {}).get("phase"))

        for name in (VICTIM, "next"):
            over = await pods.until(lambda name=name: phase(name) in ("Succeeded", "Failed"), PATIENCE)
            assert over, f"{name}: {pods.get(name, 'default')}"
        assert phase("next") == "Succeeded", pods.get("next", "default")
        return phase(VICTIM)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await kube.close()


def _settings(folder: Path) -> Any:
    """One node, and nothing that no pod needs."""
    from evertrain.embedded.cluster import Settings

    return Settings(folder / DATA, nodes=1, npus=0, operator=False, clusterd="", own_network=True)


if __name__ == "__main__":
    from evertrain.embedded import sideprocess
    from tests.embedded import doomed

    to, at = sys.argv[1:]
    if at == NEXT:
        print(aio.run(next_one(Path(to))))
        sys.exit()
    if at in CLUSTER:
        doomed.stop_at(to, at)
    else:
        sideprocess._PROGRAM = _SIDE.format(folder=to, phase=at)
    aio.run(_main(Path(to)))
