"""Whole jobs as MindCluster's documents have them: pods that run a script with `manager.py` and torchrun."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed

from tests.launch.harness import ROOT
from tests.ports import free_ports
from tests.taskd.documents import MANAGER, START
from tests.taskd.native import PLACE, build

EXAMPLE = ROOT / "examples" / "resumable" / "train.py"
LIGHT = ROOT / "tests" / "taskd" / "light"
SED = "/import os/i import taskd.python.adaptor.patch"


GATE = """
import os, signal, time

def wait_and_die(job):
    while not (job.directory / "gate").exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

train.FAULTS["gate"] = wait_and_die
"""
"""For `example_with`: a kill that waits until the file `gate` is there."""


def example_with(faults: str, script: Path) -> Path:
    """The example with more kinds of faults, which these lines put into `train.FAULTS`."""
    paths = [str(EXAMPLE.parent), str(ROOT)]
    script.write_text(f"import sys\nsys.path[:0] = {paths}\nimport train\n{faults}\ntrain.main()\n")
    return script


@dataclass
class Result:
    codes: list[int]
    results: dict[int, dict[str, Any]]
    steps: dict[int, list[Any]]
    events: dict[int, list[tuple[str, int]]]
    outputs: list[str] = field(repr=False)
    times: list[int] = field(default_factory=list, repr=False)
    """When the ranks had done their steps, in milliseconds, by their own clock."""

    def explain(self) -> str:
        return "\n".join(f"--- pod {node}\n{text[-5000:]}" for node, text in enumerate(self.outputs))


@functools.cache
def library() -> Path:
    """libtaskd.so, in a folder as that of an installed package."""
    folder = tempfile.mkdtemp(prefix="libtaskd-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(Path(folder))


def _changed(folder: Path) -> dict[str, str]:
    """Programs of pods: torchrun, changed by the documents' line, and a pip that knows where the library is."""
    run = folder / "run.py"
    run.write_text(Path(torch.distributed.__file__).with_name("run.py").read_text())
    subprocess.run(["sed", "-i", SED, str(run)], check=True)
    location = str(library()).removesuffix(f"/{PLACE}")
    return {
        "python": f'"{sys.executable}" "$@"',
        "torchrun": f'"{sys.executable}" "{run}" "$@"',
        "pip": f'echo "Location: {location}"',
    }


def _own(place: Path) -> dict[str, str]:
    """Those of an environment."""
    return {"python": f'"{place}/bin/python" "$@"', "torchrun": f'"{place}/bin/python" -m torch.distributed.run "$@"'}


def put_programs(folder: Path, place: Path | None = None, manager_port: str = "") -> str:
    """What pods find by PATH, which is returned."""
    tools = folder / "bin"
    tools.mkdir()
    as_manager = f"env TASKD_MANAGER_PORT={manager_port} " if manager_port else ""
    for name, command in (_own(place) if place else _changed(folder)).items():
        (tools / name).write_text(f"#!/bin/sh\nexec {as_manager if name == 'python' else ''}{command}\n")
        (tools / name).chmod(0o755)
    return os.pathsep.join([str(tools), *([f"{place}/bin"] if place else []), os.environ["PATH"]])


def read_result(folder: Path, codes: list[int]) -> Result:
    """What the pods have printed, and what the training has written down."""

    def lines(name: str) -> list[str]:
        file = folder / "work" / name
        return file.read_text().splitlines() if file.exists() else []

    def output(node: int) -> str:
        file = folder / f"pod{node}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    outputs = [output(node) for node in (0, 1)]
    printed = [line for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    results = {int(each["rank"]): each for each in map(json.loads, printed)}
    steps = {rank: [json.loads(line) for line in lines(f"steps.{rank}")] for rank in range(4)}
    events = {
        rank: [(name, int(pid)) for name, pid in (line.rsplit(" ", 1) for line in lines(f"events.{rank}"))]
        for rank in range(4)
    }
    times = [round(float(line.split()[1]) * 1000) for rank in range(4) for line in lines(f"times.{rank}")]
    return Result(codes, results, steps, events, outputs, times)


class TwoPods:
    def __init__(
        self,
        folder: Path,
        *,
        manager_port: str = "",
        start: str = START,
        script: Path = EXAMPLE,
        place: Path | None = None,
        **environment: str | None,
    ) -> None:
        """`manager_port`: where the manager listens, if everybody else is to be told another port.

        What is None in the environment is not there. Spares are, which cost half of the time of a job: they are for
        those who ask for them, or who have all as documented (`TASKD_WARM_SPARES=None`).

        `place` is an environment that was made as the documents say. Without, the pods have what there is here.
        """
        self.folder, self.script = folder, script
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        (folder / "manager.py").write_text(MANAGER)
        (folder / "train_start.sh").write_text(start)
        path = put_programs(folder, place, manager_port)
        master, ttp, manager, proxy = free_ports(4)
        variables: dict[str, str | None] = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": "" if place else f"{LIGHT}{os.pathsep}{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "MINDX_TASK_ID": "job-1",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.2",
            "MASTER_PORT": str(master),
            "TTP_PORT": str(ttp),
            "TASKD_MANAGER_PORT": str(manager),
            "TASKD_PROXY_PORT": str(proxy),
            "PROCESS_RECOVER": "on",
            "HIGH_AVAILABILITY": "recover,retry",
            "ENABLE_RESTART_FAULT_PROCESS": "on",
            "TASKD_WARM_SPARES": "0",
            "TTP_LOG_PATH": str(folder / "ttp-log"),
            **environment,
        }
        self.environment = {name: value for name, value in variables.items() if value is not None}
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        """The newest of each node."""
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, *args: str, address: int = 0) -> None:
        environment = {
            **self.environment,
            "RANK": str(node),
            "POD_IP": f"127.0.0.{address or node + 2}",
            "TASKD_LOG_PATH": str(self.folder / f"log{node}"),
        }
        with open(self.folder / f"pod{node}.out", "ab") as output:
            self.pods[node] = subprocess.Popen(
                ["bash", "train_start.sh", str(self.script), "--dir", str(self.work), *args],
                cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._all.append(self.pods[node])

    def run(self, *args: str, timeout: float = 300) -> Result:
        for node in (0, 1):
            self.start(node, *args)
        return self.wait(timeout)

    def wait(self, timeout: float = 300) -> Result:
        codes = []
        try:
            for node in (0, 1):
                codes.append(self.pods[node].wait(timeout))
        except subprocess.TimeoutExpired:
            codes.append(-1)
        finally:
            self.end()
        return self.result(codes)

    def end(self) -> None:
        for pod in self._all:
            self.delete(pod)

    def delete(self, pod: subprocess.Popen[bytes]) -> None:
        """As the cluster does with a pod, or its node's power supply."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()

    def log(self, node: int) -> str:
        """Of the agent of this node."""
        return "".join(file.read_text() for file in sorted((self.folder / f"log{node}").glob("agent-*")))

    def manager_log(self) -> str:
        return "".join(file.read_text() for file in sorted((self.folder / "log0").glob("manager*.log")))

    def halting(self, step: int) -> int:
        """How many ranks know that they are to halt at the end of this step."""
        line = f"training is to halt at the end of step {step}\n"
        return sum(line in file.read_text() for file in (self.folder / "ttp-log").glob("*"))

    def result(self, codes: list[int]) -> Result:
        return read_result(self.folder, codes)
