"""The whole: started, led by those who test with it, and removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kube_http import JSON_PATCH
from tests.kubernetes_cluster import images
from tests.kubernetes_cluster.components import NEEDS, Components, Unsuitable, get, say
from tests.kubernetes_cluster.control_plane import ADMINISTRATOR, OPERATOR, PROXY, ControlPlane
from tests.kubernetes_cluster.network import Network
from tests.kubernetes_cluster.node import CONTROL_GROUPS, Node, Plan, remove_control_groups
from tests.kubernetes_cluster.processes import own_network

NAME = "evertrain-kubernetes-"
"""Every run's folder and control groups begin with this."""
CONTROL = "EVERTRAIN_KUBERNETES_CONTROL"
"""Where tests find the socket by which they pull cables."""
NODE_GRACE = 12.0
CHIPS = 2


def runs() -> Path:
    return Path(tempfile.gettempdir())


class Cluster:
    """Three nodes, with two chips each."""

    def __init__(self, components: Components, folder: Path, nodes: int) -> None:
        own_network()
        self.folder, self._environment = folder, components.environment()
        names = [f"node-{number}" for number in range(nodes)]
        self.network = Network(self._environment)
        self.control = ControlPlane(components, folder / "control-plane", names, node_grace=NODE_GRACE)
        self.kubeconfig = self.control.kubeconfig(ADMINISTRATOR)
        self.control.kubeconfig(OPERATOR)
        archives = [folder / "pause.tar", folder / "evertrain.tar"]
        if nodes:
            say("images")
            images.write_pause(Path(components.program("pause")), archives[0])
            images.write_parts(archives[1])
        self.nodes = {
            name: Node(
                Plan(
                    name=name, number=number, nodes=nodes, group=f"{folder.name}-{name}", folder=str(folder / name),
                    components=str(components.folder), kubeconfig=str(self.control.kubeconfig(f"system:node:{name}")),
                    proxy_kubeconfig=str(self.control.kubeconfig(PROXY)), archives=list(map(str, archives)),
                ),
                components,
            )
            for number, name in enumerate(names)
        }  # fmt: skip

    def start(self) -> None:
        say("the control plane")
        self.control.start()
        say(f"{len(self.nodes)} nodes")
        for node in self.nodes.values():
            node.start(self.network)
        for node in self.nodes.values():
            node.wait()
        for name in self.nodes:
            self._register(name)
        say("the cluster runs")

    def _register(self, name: str) -> None:
        """Until it is ready; then it has chips, which no driver tells of here."""
        node = self.nodes[name]
        node._daemon.until(lambda: self._kubectl("get", "node", name, check=False).returncode == 0, "its registration")
        self._kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=180s")
        chips = [{"op": "add", "path": "/status/capacity/huawei.com~1Ascend910", "value": str(CHIPS)}]
        self.control.client().patch(f"/api/v1/nodes/{name}/status", chips, JSON_PATCH).expect(200)

    def _kubectl(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(["kubectl", *command], env=environment, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(command)}: {done.stderr}")
        return done

    def environment(self) -> dict[str, str]:
        """Of those who use it; the contract tests talk to its API without any library."""
        url, token, authority = self.control.access()
        contract = {"URL": url, "TOKEN": token, "CA": authority}
        return {"KUBECONFIG": str(self.kubeconfig), **{f"EVERTRAIN_CONTRACT_{k}": v for k, v in contract.items()}}

    # What a test may do to it, by the socket.

    def do(self, order: str, node: str = "", seconds: float = 0.0) -> None:
        number = self.nodes[node].number if node else 0
        if order == "cut":
            self.network.cut(number)
        elif order == "mend":
            self.network.mend(number)
        elif order == "kill":
            self.nodes[node].kill()
        elif order == "repair":
            if self.nodes[node].runs:
                self.network.mend(number)
            else:
                self.nodes[node].start(self.network)
                self.nodes[node].wait()
            self._register(node)
        elif order == "restart-api":
            self.control.restart_api(seconds)
        else:
            raise ValueError(f"no such order: {order}")

    def serve(self, listener: socket.socket) -> None:
        """Orders, one at a time, each a line of JSON; the answer is empty, or says what went wrong."""
        while True:
            with contextlib.suppress(OSError), listener.accept()[0] as peer, peer.makefile("rw") as lines:
                line = lines.readline()
                try:
                    self.do(**json.loads(line))
                    lines.write("\n")
                except Exception as error:
                    lines.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")

    def end(self) -> None:
        for node in self.nodes.values():
            if hasattr(node._daemon, "process"):
                node.kill()
        self.control.end()


def order(what: str, **details: Any) -> None:
    """From a test to its cluster."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(os.environ[CONTROL])
        with peer.makefile("rw") as lines:
            lines.write(json.dumps({"order": what, **details}) + "\n")
            lines.flush()
            problem = lines.readline().strip()
    if problem:
        raise RuntimeError(f"{what} {details}: {problem}")


@contextlib.contextmanager
def running(nodes: int = 3) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        raise Unsuitable(NEEDS.format(why="You are not root."))
    components = get()
    clean()
    folder = runs() / f"{NAME}{secrets.token_hex(3)}"
    folder.mkdir(mode=0o755)
    lock = _lock(folder)
    assert lock is not None
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.kubernetes_cluster", "--keep", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    cluster = None
    try:
        cluster = Cluster(components, folder, nodes)
        cluster.start()
        yield cluster
    finally:
        if cluster is not None:
            cluster.end()
        lock.close()
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def keep(folder: Path) -> None:
    """Until the process at the other end of the pipe is gone, however it ended; then nothing is left of its cluster."""
    sys.stdin.read()
    end = time.monotonic() + 30
    while folder.exists() and not remove(folder) and time.monotonic() < end:
        time.sleep(0.1)  # the kernel is ending its processes


def clean() -> list[str]:
    """What clusters have left whose processes are gone; their names."""
    places = [*runs().glob(f"{NAME}*"), *CONTROL_GROUPS.glob(f"*/{NAME}*")]
    names = {match[0] for place in places if (match := re.match(rf"{NAME}[0-9a-z]+", place.name))}
    return [name for name in sorted(names) if remove(runs() / name)]


def remove(folder: Path) -> bool:
    """Unless it runs."""
    lock = _lock(folder) if folder.exists() else contextlib.nullcontext()
    if lock is None:
        return False
    with lock:
        try:
            for group in {path.name for path in CONTROL_GROUPS.glob(f"*/{folder.name}-*")}:
                remove_control_groups(group)
        except OSError:
            return False  # something still runs in it
        shutil.rmtree(folder, ignore_errors=True)  # what still ends may still write
    return not folder.exists()


def _lock(folder: Path) -> Any:
    """Held as long as the cluster runs."""
    file = open(folder / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
