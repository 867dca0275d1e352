"""A node: the first process of its namespaces, with containerd, kubelet and kube-proxy as children.

`Node` is it from outside. `python -m tests.kubernetes_cluster.node FILE` is it from inside; it ends by being killed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.kubernetes_cluster import images, network
from tests.kubernetes_cluster.components import Components
from tests.kubernetes_cluster.processes import Daemon, tail

STATE = ("/var/lib", "/var/log")
"""What a node keeps, each in a place of its own behind these names: its programs know no others, and a kubelet removes
logs of pods that it doesn't know."""
SOCKET = "/run/containerd/containerd.sock"
CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNSHARE = ("unshare", "--net", "--mount", "--propagation=private", "--pid", "--mount-proc", "--fork", "--kill-child")
ENDING = 30.0
READY = "the node's programs run"


@dataclass(frozen=True)
class Plan:
    """What a node is told."""

    name: str
    number: int
    nodes: int
    group: str
    """Of control groups."""
    folder: str
    components: str
    kubeconfig: str
    proxy_kubeconfig: str
    archives: list[str]
    """Images to begin with."""


class Node:
    def __init__(self, plan: Plan, components: Components) -> None:
        self.plan, self.name, self.number = plan, plan.name, plan.number
        self.folder = Path(plan.folder)
        self._first: int | None = None
        """Of its namespaces: a descriptor that tells when it is gone."""
        file = self.folder.with_suffix(".json")
        file.write_text(json.dumps(asdict(plan)))
        self._daemon = Daemon(
            [*UNSHARE, sys.executable, "-m", "tests.kubernetes_cluster.node", file],
            self.folder.with_suffix(".log"), components.environment(), stdin=subprocess.PIPE,
        )  # fmt: skip

    def start(self, cables: network.Network) -> None:
        """Returns at once; `wait` until it works."""
        self.folder.mkdir(exist_ok=True)
        for name in STATE:
            (self.folder / Path(name).name).mkdir(exist_ok=True)
        make_control_groups(self.plan.group)
        self._daemon.log.write_text("")
        self._daemon.start()
        first = self._daemon.until(self._inside, "its first process")
        self._first = os.pidfd_open(first)
        cables.plug_in(self.number, first)
        assert self._daemon.process.stdin is not None
        self._daemon.process.stdin.close()  # it waits for its cable

    def _inside(self) -> int:
        """The first process of its namespaces, by its number outside."""
        pid = self._daemon.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        here = os.stat("/proc/self/ns/net").st_ino
        return next((int(each) for each in children if os.stat(f"/proc/{each}/ns/net").st_ino != here), 0)

    def wait(self) -> None:
        self._daemon.until(lambda: READY in tail(self._daemon.log), "having started its programs", 300)

    @property
    def runs(self) -> bool:
        return self._daemon.process.poll() is None

    def kill(self) -> None:
        """As a power cut: the kernel ends all processes of a namespace with its first one, and that one last."""
        self._daemon.kill()
        if self._first is not None:
            select.select([self._first], [], [], ENDING)
            os.close(self._first)
            self._first = None


def make_control_groups(group: str) -> None:
    for kind in _kinds():
        place = kind / group
        place.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (place / name).exists():
                (place / name).write_text((kind / name).read_text())


def remove_control_groups(group: str) -> None:
    """When nothing runs in them any more. Of every kind: runc makes them in the second version's as well."""
    for kind in CONTROL_GROUPS.iterdir():
        for folder, _, _ in os.walk(kind / group, topdown=False):
            os.rmdir(folder)


def _kinds() -> list[Path]:
    """Of the first version of control groups; kubelet knows no other."""
    return [each for each in CONTROL_GROUPS.iterdir() if (each / "tasks").exists() and not each.is_symlink()]


class Inside:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.folder = plan, Path(plan.folder)
        self.components = Components(Path(plan.components))
        self.environment = self.components.environment()

    def run(self) -> None:
        self._mount()
        sys.stdin.read()
        network.settle(self.plan.number, self.plan.nodes, self.environment)
        containerd = self._daemon("containerd", "--config", self._containerd())
        ctr = ["ctr", "--address", SOCKET, "--namespace", "k8s.io"]
        containerd.until(lambda: Path(SOCKET).exists() and self._quietly(*ctr, "version"), "serving")
        for archive in self.plan.archives:
            subprocess.run([*ctr, "images", "import", archive], check=True, env=self.environment)
        self._daemon(
            self.components.program("kubelet"), f"--config={self._kubelet()}", f"--kubeconfig={self.plan.kubeconfig}",
            f"--hostname-override={self.plan.name}", f"--node-ip={network.node_address(self.plan.number)}",
            "--container-runtime=remote", f"--container-runtime-endpoint=unix://{SOCKET}",
        )  # fmt: skip
        self._daemon(self.components.program("kube-proxy"), f"--config={self._proxy()}")
        print(READY, flush=True)
        while True:  # shims have no other parent
            try:
                os.wait()
            except ChildProcessError:
                time.sleep(1)

    def _mount(self) -> None:
        self._mounting("--make-rshared", "/")
        self._mounting("-t", "tmpfs", "run", "/run")
        for name in STATE:
            self._mounting("--bind", str(self.folder / Path(name).name), name)
        Path("/run/containerd").mkdir()

    def _mounting(self, *options: str) -> None:
        subprocess.run(["mount", *options], check=True, env=self.environment)

    def _quietly(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def _daemon(self, *command: str | Path) -> Daemon:
        log = self.folder / f"{Path(str(command[0])).name}.log"
        return Daemon(command, log, self.environment).start()

    def _file(self, name: str, content: str) -> Path:
        (self.folder / name).write_text(content)
        return self.folder / name

    def _containerd(self) -> Path:
        self.folder.joinpath("cni").mkdir(exist_ok=True)
        plugins = self.components.plugins
        configuration = self.folder / "network"
        configuration.mkdir(exist_ok=True)
        way = {
            "cniVersion": "0.4.0", "name": "pods",
            "plugins": [
                {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True,
                 "ipam": {"type": "host-local", "ranges": [[{"subnet": network.pod_range(self.plan.number)}]],
                          "routes": [{"dst": "0.0.0.0/0"}]}},
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }  # fmt: skip
        self._file("network/pods.conflist", json.dumps(way))
        return self._file("containerd.toml", f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{configuration}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
""")  # fmt: skip

    def _kubelet(self) -> Path:
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.plan.group}", "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%",
                             "nodefs.inodesFree": "1%"},
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "imageGCHighThresholdPercent": 100, "nodeStatusUpdateFrequency": "3s", "nodeLeaseDurationSeconds": 12,
            # Nobody answers: at once, and not after a timeout. Were it empty, pods would have this machine's.
            "resolvConf": str(self._file("resolv.conf", "nameserver 127.0.0.1\n")),
        }  # fmt: skip
        return self._file("kubelet.json", json.dumps(settings))

    def _proxy(self) -> Path:
        """Between pods of one node answers would not come back through it: everything is masqueraded."""
        settings = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables",
            "clientConnection": {"kubeconfig": self.plan.proxy_kubeconfig}, "hostnameOverride": self.plan.name,
            "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s"},
            "conntrack": {"maxPerCore": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
        }  # fmt: skip
        return self._file("proxy.json", json.dumps(settings))


if __name__ == "__main__":
    Inside(Plan(**json.loads(Path(sys.argv[1]).read_text()))).run()
