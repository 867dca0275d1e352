"""An embedded cluster as a user starts it, and kubectl as a user has it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cluster"
KUBECTL = shutil.which("kubectl")
START = 200.0

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not on PATH")


def kubectl_versions() -> list[str]:
    """All that lie beside the one on PATH, oldest first; that one alone if none do."""
    if KUBECTL is None:
        return []
    beside = Path(os.path.realpath(KUBECTL)).parent.glob("kubectl.1.*")
    found = sorted((path for path in beside), key=lambda path: int(path.name.rpartition(".")[2]))
    return [str(path) for path in found] or [KUBECTL]


def evertrain(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "evertrain.cli", *map(str, arguments)]


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the clusters that the developer works with."""
    theirs = ("KUBECONFIG", "EVERTRAIN_DATA_DIR", "EVERTRAIN_CLUSTERD_ADDR")
    kept = {name: value for name, value in os.environ.items() if name not in theirs}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"HOME": str(folder), "PATH": path, "EVERTRAIN_DATA_DIR": str(folder / "data")}


class Watch:
    """All states that `kubectl get --watch` shows."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.seen: list[Any] = []
        self._process, self._ended, self._news = process, False, threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, condition: Callable[[Any], bool], timeout: float = 200.0) -> Any:
        """The first one of which it holds."""
        found: list[Any] = []

        def there() -> bool:
            found[:] = filter(condition, self.seen)
            return bool(found) or self._ended

        with self._news:
            self._news.wait_for(there, timeout)
        assert found, f"it did not come to it in {timeout:g} s; the last state: {self.seen[-1:]}"
        return found[0]

    def join(self) -> None:
        """When the process has been ended."""
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        text = ""
        for line in self._process.stdout:
            text += line
            if line == "}\n":
                with self._news:
                    self.seen.append(json.loads(text))
                    self._news.notify_all()
                text = ""
        with self._news:
            self._ended = True
            self._news.notify_all()


class Reached:
    """Any cluster, as kubectl and our own commands reach it."""

    def __init__(self, folder: Path) -> None:
        """In which they run."""
        self.folder = folder
        self.environment = environment(folder)
        self.lines: list[str] = []
        """What the cluster has said, if it says anything."""

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, check: bool = True, binary: str | None = None,
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        command = [binary or KUBECTL or "kubectl", *map(str, arguments)]
        return self._run(command, stdin, check, timeout)

    def evertrain(
        self, *arguments: str | Path, stdin: str | None = None, check: bool = True, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        return self._run(evertrain(*arguments), stdin, check, timeout)

    def _run(
        self, command: list[str], stdin: str | None, check: bool, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            said = f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            raise AssertionError(f"{said}\n{self.explain()}")
        return done

    def explain(self) -> str:
        """For whoever reads of a test that failed."""

        def shown(*arguments: str) -> str:
            asked = subprocess.run(
                [KUBECTL or "kubectl", *arguments, "--request-timeout=20s"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=self.environment, cwd=self.folder,
            )  # fmt: skip
            return asked.stdout

        parts = {
            "cluster": "\n".join(self.lines[-30:]),
            "jobs and pods": shown("get", "acjob,pods", "-A", "-o", "wide"),
            "events": "\n".join(shown("get", "events", "-A").splitlines()[-20:]),
        }
        for pod in shown("get", "pods", "-o", "name").split()[:8]:
            parts[f"log of {pod}"] = shown("logs", pod, "--tail=15")
        return "\n".join(f"--- {name}\n{text}" for name, text in parts.items())

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)

    def until(self, condition: Callable[[Any], bool], *arguments: str, timeout: float = 200.0) -> Any:
        """The first state of an object of which the condition holds, as kubectl's watch shows them."""
        with self.watching(*arguments) as watch:
            return watch.until(condition, timeout)

    @contextlib.contextmanager
    def watching(self, *arguments: str) -> Iterator[Watch]:
        command = [KUBECTL or "kubectl", "get", *arguments, "--watch", "--output=json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self.environment, cwd=self.folder
        ) as process:
            watch = Watch(process)
            try:
                yield watch
            finally:
                process.kill()
                watch.join()

    def pod_processes(self) -> list[psutil.Process]:
        """As far as they are processes of this machine, and ours."""
        return []


class Up(Reached):
    """`evertrain up` in the foreground."""

    def __init__(self, folder: Path, *options: str, program: Sequence[str] = ()) -> None:
        """`program`: instead of `evertrain`, as which it is started."""
        super().__init__(folder)
        self.data = folder / "data"
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*(program or evertrain()), "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            cwd=folder,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            line = self.wait_for_line(r"export KUBECONFIG=(\S+)", START)
        except BaseException:
            self.end()
            raise
        self.environment["KUBECONFIG"] = line[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("<end>")
            self._news.notify_all()

    def wait_for_line(self, pattern: str, timeout: float) -> re.Match[str]:
        found: list[re.Match[str]] = []

        def there() -> bool:
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            return bool(found) or self.lines[-1:] == ["<end>"]

        with self._news:
            self._news.wait_for(there, timeout)
        assert found, f"no line like {pattern!r}:\n" + "\n".join(self.lines)
        return found[0]

    def pod_processes(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self, timeout: float = 200.0) -> int:
        """By Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join(timeout)
            assert self.process.stdout is not None
            self.process.stdout.close()
        return code


def small_job(
    name: str,
    command: str,
    *,
    workers: int = 1,
    npus: int = 1,
    restart: str = "Never",
    labels: str = "",
    spec: str = "",
) -> str:
    """A PyTorch job whose pods run a line of shell."""

    def replica(kind: str, replicas: int) -> str:
        return f"""
    {kind}:
      replicas: {replicas}
      restartPolicy: {restart}
      template:
        spec:
          terminationGracePeriodSeconds: 2
          containers:
            - name: ascend
              image: none
              command: ["/bin/sh", "-c", {json.dumps(command)}]
              resources:
                requests: {{huawei.com/Ascend910: {npus}}}
                limits: {{huawei.com/Ascend910: {npus}}}"""

    kinds = replica("Master", 1) + (replica("Worker", workers) if workers else "")
    return f"""\
apiVersion: mindxdl.gitee.com/v1
kind: AscendJob
metadata:
  name: {name}
  labels:
    framework: pytorch
{labels}
spec:
  runPolicy:
    schedulingPolicy:
      minAvailable: {1 + workers}
      queue: default
{spec}
  replicaSpecs:{kinds}
"""


def example_job(folder: Path, port: int) -> Path:
    """The example with its three nfs paths in a folder of the test, and a port of the test's: others use theirs."""
    text = (EXAMPLE / "job.yaml").read_text().replace("containerPort: 2222", f"containerPort: {port}")
    for name in ("code", "data", "output"):
        place = folder / name
        if name == "code":
            shutil.copytree(EXAMPLE, place, dirs_exist_ok=True)
        place.mkdir(exist_ok=True)
        assert f'"/tmp/evertrain/{name}/"' in text
        text = text.replace(f'"/tmp/evertrain/{name}/"', f'"{place}/"')
    file = folder / "job.yaml"
    file.write_text(text)
    return file
