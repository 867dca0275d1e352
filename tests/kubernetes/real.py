"""A cluster that is reached by a kubeconfig, and jobs whose containers see this machine's torch and files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.clusterd.chain import Job
from tests.embedded.up import ROOT, Reached
from tests.kubernetes_cluster.images import IMAGE
from tests.taskd.jobs import library

OVERLAY = ROOT / "deploy" / "overlays" / "default-scheduler"
OPERATOR, CLUSTERD, NODED = "deployment/ascend-operator-manager", "deployment/clusterd", "daemonset/noded"
PARTS = (OPERATOR, CLUSTERD, NODED)
RUN_WITH = os.environ.get("EVERTRAIN_KUBERNETES_IMAGE", IMAGE)
"""An image with python and a shell, which the cluster has or can pull."""


class Real(Reached):
    def __init__(self, folder: Path, kubeconfig: str) -> None:
        super().__init__(folder)
        self.environment["KUBECONFIG"] = kubeconfig

    def run_pod(self, name: str, *command: str, node: str = "", labels: str = "") -> None:
        """A pod that stays as it is."""
        place = f"  nodeName: {node}\n" if node else ""
        shell = ", ".join(map(repr, command))
        self.kubectl("apply", "-f", "-", stdin=f"""\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  labels: {{made-by: test{labels}}}
spec:
{place}  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  containers:
    - name: main
      image: {RUN_WITH}
      imagePullPolicy: IfNotPresent
      command: [{shell}]
""")  # fmt: skip


class RealJob(Job):
    """Its pods run on any node: what they read and write is this machine's."""

    def __init__(self, folder: Path, strategies: str, **environment: str) -> None:
        super().__init__(folder, strategies, **environment)
        self.image, self.scheduler = RUN_WITH, "default-scheduler"
        places = {ROOT, Path(sys.prefix), folder, _first_own(library())}
        self.visible = tuple(each for each in places if not places & set(each.parents))


def _first_own(path: Path) -> Path:
    """The folder that was made for it."""
    return next(parent for parent in path.parents if parent.name.startswith("libtaskd-"))
