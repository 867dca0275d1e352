"""An AscendJob of two pods as MindCluster's documents have it, on `evertrain up`, where ClusterD decides."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.embedded.up import Reached, Up, evertrain
from tests.launch.harness import ROOT
from tests.ports import free_ports
from tests.taskd.documents import MANAGER, START
from tests.taskd.jobs import LIGHT, Result, put_programs, read_result
from tests.taskd.paced import Pace

PACED = ROOT / "tests" / "taskd" / "paced.py"
PODS = ("train-master-0", "train-worker-0")
NAME = "train"
RANKS = 4
EXPLANATION = "--- cluster"
"""How it begins."""
HALT = re.compile(r"training is to halt at the end of step (\d+)\n")
LIMIT = 300.0
"""Seconds for each thing that is waited for; a busy machine needs a good part of it to start the processes."""


class Job:
    """Files of the job and its YAML. Pods see the machine's own files: its folder is their working directory."""

    def __init__(
        self,
        folder: Path,
        strategies: str,
        *,
        labels: str = "",
        annotations: str = "",
        run_policy: str = "",
        start: str = START,
        script: Path = PACED,
        **environment: str,
    ) -> None:
        """`start` is the script of a pod, and `script` what its processes run."""
        self.folder, self.strategies, self.environment = folder, strategies, environment
        self.labels, self.annotations, self.run_policy = labels, annotations, run_policy
        self.script = script
        self.image, self.scheduler, self.visible = "local", "volcano", tuple[Path, ...]()
        """Folders of this machine that containers see; pods of the embedded cluster see all of it."""
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        (folder / "manager.py").write_text(MANAGER)
        (folder / "train_start.sh").write_text(start)
        self.path = put_programs(folder)
        self.pace = Pace(self.work)
        self.master, self.ttp, self.manager, self.proxy = free_ports(4)

    def yaml(self, *args: str) -> str:
        """`args` of the training."""
        line = " ".join(["bash", "train_start.sh", str(self.script), "--dir", str(self.work), *args])
        command = f"cd {self.folder}; exec {line} >> pod$RANK.out 2>&1"
        kinds = "".join(self._replica(kind, command) for kind in ("Master", "Worker"))
        return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: reset-config-{NAME}
  namespace: default
  labels:
    reset: "true"
data:
  reset.json: |
    {{
        "status":"initializing"
    }}
  checkCode: ""
---
apiVersion: mindxdl.gitee.com/v1
kind: AscendJob
metadata:
  name: {NAME}
  labels:
    framework: pytorch
    ring-controller.atlas: ascend-910b
    fault-scheduling: "grace"
{self.labels}
  annotations:
    {f'recover-strategy: "{self.strategies}"' if self.strategies else ""}
    huawei.com/schedule_policy: "chip8-node8"
{self.annotations}
spec:
  schedulerName: {self.scheduler}
  runPolicy:
{self.run_policy}
    schedulingPolicy:
      minAvailable: 2
      queue: default
  successPolicy: AllWorkers
  replicaSpecs:{kinds}
"""

    def _replica(self, kind: str, command: str) -> str:
        more = "".join(
            f"""
                - {{name: {name}, value: "{value}"}}"""
            for name, value in self.environment.items()
        )
        mounts, volumes = "", ""
        for number, folder in enumerate(self.visible):
            mounts += f"""
                - {{name: visible-{number}, mountPath: {folder}}}"""
            volumes += f"""
            - name: visible-{number}
              hostPath: {{path: {folder}}}"""
        return f"""
    {kind}:
      replicas: 1
      restartPolicy: Never
      template:
        metadata:
          labels:
            ring-controller.atlas: ascend-910b
        spec:
          terminationGracePeriodSeconds: 5
          automountServiceAccountToken: false
          affinity:
            podAntiAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                - labelSelector:
                    matchExpressions:
                      - {{key: job-name, operator: In, values: [{NAME}]}}
                  topologyKey: kubernetes.io/hostname
          containers:
            - name: ascend # do not modify
              image: {self.image}
              imagePullPolicy: IfNotPresent
              env:
                - name: XDL_IP
                  valueFrom: {{fieldRef: {{fieldPath: status.hostIP}}}}
                - name: POD_IP
                  valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}
                - {{name: TTP_PORT, value: "{self.ttp}"}}
                - {{name: TASKD_MANAGER_PORT, value: "{self.manager}"}}
                - {{name: TASKD_PROXY_PORT, value: "{self.proxy}"}}
                - {{name: TASKD_LOG_PATH, value: "{self.folder}/log-{kind.lower()}"}}
                - {{name: TASKD_WARM_SPARES, value: "0"}}
                - {{name: TTP_LOG_PATH, value: "{self.folder}/ttp-log"}}
                - {{name: PATH, value: "{self.path}"}}
                - {{name: PYTHONPATH, value: "{LIGHT}:{ROOT / "src"}"}}
                - {{name: PYTHONDONTWRITEBYTECODE, value: "1"}}
                - {{name: OMP_NUM_THREADS, value: "1"}}{more}
              command: ["/bin/bash", "-c"]
              args: [{json.dumps(command)}]
              ports:
                - {{containerPort: {self.master}, name: ascendjob-port}}
                - {{containerPort: {self.ttp}, name: ttp-port}}
                - {{containerPort: {self.manager}, name: taskd-port}}
              resources:
                limits: {{huawei.com/Ascend910: 2}}
                requests: {{huawei.com/Ascend910: 2}}
              volumeMounts:
                - {{name: reset-config, mountPath: /user/restore/reset/config, readOnly: true}}{mounts}
          volumes:
            - name: reset-config
              configMap: {{name: reset-config-{NAME}}}{volumes}"""


class Chain:
    """The job on its cluster: what a test does to it, and what it waits for."""

    def __init__(self, up: Reached, job: Job) -> None:
        self.up, self.job, self.pace = up, job, job.pace

    def start(self, *args: str) -> None:
        self.up.kubectl("apply", "-f", "-", stdin=self.job.yaml(*args))

    def uids(self) -> list[str]:
        return [self.up.get("pod", name)["metadata"]["uid"] for name in PODS]

    def node(self, pod: int) -> str:
        return str(self.up.get("pod", PODS[pod])["spec"]["nodeName"])

    def processes(self, rank: int) -> set[int]:
        """Ids that the processes of a rank have had; those of one pod are never used twice."""
        return {pid for _, pid in self.result().events[rank]}

    def to(self, step: int, *ranks: int) -> None:
        """Let the training go on, and wait until all ranks have done this step."""
        self.pace.allow(step)
        self.until(lambda: all(self.pace.step(rank) >= step for rank in ranks or range(4)), f"step {step}")

    def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """For what happens inside of pods, where nobody tells us."""
        end = time.monotonic() + limit
        while not (found := condition()):
            assert time.monotonic() < end, f"waited too long for {what}\n{self.explain()}"
            time.sleep(0.05)
        return found

    def until_replaced(self, pod: int, uid: str) -> None:
        """Until there is another pod than this; for a moment there may be none."""

        def replaced() -> bool:
            found = self.up.kubectl("get", "pod", PODS[pod], "-o", "jsonpath={.metadata.uid}", check=False).stdout
            return found not in ("", uid)

        self.until(replaced, f"another {PODS[pod]}")

    def told_to_halt(self) -> int:
        """At the end of which step all ranks are to halt, by the newest order that all have; 0 without one."""
        logs = [HALT.findall(file.read_text()) for file in self.job.folder.glob("ttp-log/*")]
        steps = [int(found[-1]) for found in logs if found]
        newest = max(steps, default=0)
        return newest if steps.count(newest) == RANKS else 0

    def halts_for(self, *command: str | Path) -> tuple[int, str]:
        """Training, which is held, is let go as far as the command has it halt. Its exit code, and what it said."""
        before = self.told_to_halt()
        with subprocess.Popen(
            list(map(str, command)), env=self.up.environment, cwd=self.up.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip

            def over() -> bool:
                step = self.told_to_halt()
                if step > before:
                    self.pace.allow(step)
                return process.poll() is not None

            try:
                self.until(over, f"the end of {command}")
                assert process.stdout is not None
                return process.returncode, process.stdout.read()
            finally:
                process.kill()

    def until_recovery(self, states: Collection[str]) -> None:
        """Until one is in one of these states. To be begun before there is one: kubectl takes its time to start."""

        def reached(found: Any) -> bool:
            text = (found.get("data") or {}).get("state.json", "{}")
            return (json.loads(text).get("state") or {}).get("state") in states

        self.up.until(reached, "configmaps", "-l", "evertrain.dev/clusterd-recovery=true", timeout=LIMIT)

    def training(self, pod: int) -> list[int]:
        """Processes that train in a pod, by their ids outside of it."""
        found = []
        for process in self.up.pod_processes():
            with contextlib.suppress(psutil.Error):
                here, environment = process.cwd() == str(self.job.folder), process.environ()
                if here and "LOCAL_RANK" in environment and environment.get("GROUP_RANK") == str(pod):
                    found.append(process.pid)
        return found

    def torchrun(self, pod: int) -> int:
        """Its process in a pod, by its id outside of it."""
        for process in self.up.pod_processes():
            with contextlib.suppress(psutil.Error):
                here, environment = process.cwd() == str(self.job.folder), process.environ()
                launches = any("torch.distributed.run" in word for word in process.cmdline())
                if here and launches and "GROUP_RANK" not in environment and environment.get("RANK") == str(pod):
                    return process.pid
        raise AssertionError(f"no torchrun runs in pod {pod}")

    def managers(self) -> list[int]:
        """Processes of `manager.py` of this job, by their ids outside of the pods."""
        found = []
        for process in self.up.pod_processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-1:] == ["manager.py"] and process.cwd() == str(self.job.folder):
                    found.append(process.pid)
        return found

    def ends(self) -> Result:
        """Well."""
        self.comes_to("Succeeded")
        return self.result([0, 0])

    def comes_to(self, condition: str) -> None:
        """The job has this condition, or will have it."""
        done = self.up.kubectl(
            "wait", f"--for=condition={condition}", f"acjob/{NAME}", f"--timeout={LIMIT:g}s", check=False,
            timeout=LIMIT + 30,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{self.explain()}"

    def result(self, codes: list[int] | None = None) -> Result:
        return read_result(self.job.folder, codes or [])

    def incidents(self, count: int = 1) -> list[dict[str, Any]]:
        """What `evertrain timeline` tells, once that many are over."""

        def over() -> list[dict[str, Any]]:
            told = self.up.evertrain("timeline", NAME, "-o", "json", check=False)
            found: list[dict[str, Any]] = json.loads(told.stdout) if told.returncode == 0 else []
            return found if len(found) >= count and all(each["closed"] for each in found) else []

        found: list[dict[str, Any]] = self.until(over, f"{count} incidents that are over")
        return found

    def explain(self) -> str:
        parts = [EXPLANATION, *self.up.lines[-60:], "--- objects"]
        parts.append(self.up.kubectl("get", "acjob,pods,podgroup,nodes", "-o", "wide", check=False).stdout)
        for file in sorted(self.job.folder.rglob("*.log"))[:8]:
            parts.append(f"--- {file.relative_to(self.job.folder)}\n{_end(file)}")
        for file in sorted(self.job.folder.glob("pod*.out")):
            parts.append(f"--- {file.name}\n{_end(file)}")
        if (log := self.up.folder / "clusterd.log").exists():
            parts.append(f"--- clusterd\n{_end(log)}")
        parts += ["--- timeline", self.up.evertrain("timeline", NAME, check=False).stdout, "--- callbacks"]
        events = self.result().events
        parts += [f"rank {rank}: {events[rank]}" for rank in sorted(events)]
        return "\n".join(parts)


class Beside:
    """`evertrain clusterd` as a process of its own, at the address of its Service: killed and started again."""

    def __init__(self, up: Up, port: int) -> None:
        self.up, self.log = up, up.folder / "clusterd.log"
        up.kubectl("apply", "-f", "-", stdin=SERVICE)
        address = up.get("service", "clusterd-grpc-svc", "-n", "mindx-dl")["spec"]["clusterIP"]
        self._command = evertrain(
            "clusterd", "--insecure", "--listen", f"{address}:{port}", "--timeline", up.folder / "timeline.db"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(self._command, env=self.up.environment, stdout=log, stderr=log)
        self.starts += 1

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def kill_in(self, chain: Chain, states: Collection[str]) -> None:
        chain.until_recovery(states)
        self.kill()


SERVICE = """\
apiVersion: v1
kind: Namespace
metadata:
  name: mindx-dl
---
apiVersion: v1
kind: Service
metadata:
  name: clusterd-grpc-svc
  namespace: mindx-dl
spec:
  ports:
    - {protocol: TCP, port: 8899, targetPort: 8899}
"""
NODES = ("--nodes", "3", "--npus", "2", "-v")
"""Two for the two pods, and a spare one."""


@contextlib.contextmanager
def running(
    folder: Path,
    strategies: str,
    *options: str,
    labels: str = "",
    annotations: str = "",
    run_policy: str = "",
    start: str = START,
    script: Path = PACED,
    program: Sequence[str] = (),
    **environment: str,
) -> Iterator[Chain]:
    """`options` are those of `evertrain up`, `program` is started instead of `evertrain`."""
    up = Up(folder, *NODES, "--clusterd-addr", "127.0.0.1:0", *options, program=program)
    try:
        more = {"labels": labels, "annotations": annotations, "run_policy": run_policy, "start": start}
        chain = Chain(up, Job(folder / "job", strategies, script=script, **more, **environment))
        with explained(chain):
            yield chain
    finally:
        assert up.end() == 0, up.lines


@contextlib.contextmanager
def explained(chain: Chain) -> Iterator[None]:
    """What fails says what the cluster, the job and ClusterD looked like then."""
    try:
        yield
    except Exception as error:
        if EXPLANATION not in str(error):
            if hasattr(error, "add_note"):
                error.add_note(chain.explain())
            else:  # in Python 3.10
                print(chain.explain(), file=sys.stderr)
        raise


@contextlib.contextmanager
def running_beside(folder: Path, strategies: str) -> Iterator[tuple[Chain, Beside]]:
    """With ClusterD in a process of its own."""
    up = Up(folder, *NODES, "--no-clusterd")
    beside = None
    try:
        (port,) = free_ports(1)
        beside = Beside(up, port)
        beside.start()
        chain = Chain(up, Job(folder / "job", strategies, MINDX_SERVER_PORT=str(port)))
        with explained(chain):
            yield chain, beside
    finally:
        if beside is not None:
            beside.kill()
        assert up.end() == 0, up.lines


def _end(file: Path, characters: int = 4000) -> str:
    return re.sub(r"\0+", "", file.read_text(errors="replace")[-characters:])
