"""The runtime process of a node: who may use it, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain import aio
from evertrain.embedded import sideprocess
from evertrain.embedded.node.engine import RUNTIME, Engine
from evertrain.embedded.sideprocess import Lost
from tests.embedded.networks import needs_networks
from tests.embedded.ordinary import NOBODY, interpreter_for


def with_word(word: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Any, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def order(folder: Path, *argv: str, **more: Any) -> dict[str, Any]:
    (folder / "root").mkdir(exist_ok=True)
    return {
        "argv": list(argv),
        "env": {"PATH": os.defpath},
        "workdir": "/",
        "mounts": [],
        "staging": str(folder / "root"),
        "hostname": "pod",
        "log_folder": str(folder),
        "log_name": "0.log",
        "no_mounts": "",
        **more,
    }


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that others may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="evertrain-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


class OrdinaryUser:
    """Runs our side processes as somebody who is not root, from a copy that they may read."""

    def __init__(self, folder: Path) -> None:
        self.number = NOBODY if os.geteuid() == 0 else os.geteuid()
        self._python = interpreter_for(self.number, sys.executable, shutil.which("python3", path=os.defpath))
        assert self._python, "no Python that another user may run"
        self._source = folder / "src"
        for part in ("node", "network"):
            shutil.copytree(sideprocess.ROOT / "evertrain/embedded" / part, self._source / "evertrain/embedded" / part)
        for file in ("evertrain/__init__.py", "evertrain/embedded/__init__.py", "evertrain/embedded/kernel.py"):
            shutil.copy(sideprocess.ROOT / file, self._source / file)
        subprocess.run(["chmod", "-R", "a+rX", str(self._source)], check=True)

    @contextlib.contextmanager
    def running(self, module: str, *arguments: str, descriptors: Sequence[int] = ()) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [self._python, "-I", "-S", "-c", sideprocess._PROGRAM.format(module), str(self._source)]
        command += [str(theirs.fileno()), str(os.getpid()), *arguments]
        who = {"user": self.number} if os.geteuid() == 0 else {}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *descriptors], **who)
        theirs.close()
        with ours:
            try:
                yield ours
            finally:
                process.kill()
                process.wait()


def ask(process: socket.socket, message: dict[str, Any], *descriptors: int) -> tuple[dict[str, Any], list[int]]:
    """What it answers, and the descriptors that come along."""
    if message:
        socket.send_fds(process, [json.dumps(message).encode()], list(descriptors))
    data, received, _, _ = socket.recv_fds(process, 65536, 4)
    return json.loads(data), received


@needs_networks
def test_an_ordinary_user_has_volumes_and_process_ids_and_a_network(open_folder: Path) -> None:
    """In a user namespace, in which they stay who they are."""
    user = OrdinaryUser(open_folder)
    for name in ("trial", "volume", "log"):
        (open_folder / name).mkdir()
        (open_folder / name).chmod(0o777)
    line, far_end = socket.socketpair()
    with line, user.running("evertrain.embedded.network.holder", "") as holder:
        hello, (users,) = ask(holder, {})
        assert (hello["error"], hello["machine"]) == ("", "only root may connect the two")
        assert ask(holder, {"do": "node", "index": 0})[0] == {"error": ""}
        address = hello["block"].replace(".0.0/14", ".0.2")
        _, (network,) = ask(holder, {"do": "pod", "pod": "a", "index": 0, "addresses": [address]})
        trial = str(open_folder / "trial")
        with user.running(RUNTIME, trial, str(users), descriptors=[users]) as runtime:
            os.close(users)
            assert ask(runtime, {})[0] == {"mounts": "", "pids": ""}
            assert ask(runtime, {"do": "spawn"}, far_end.fileno(), network)[0] == {"error": ""}
            os.close(network)
            far_end.close()
            mount = {"source": str(open_folder / "volume"), "target": "/new/place", "read_only": False}
            script = "id -u; hostname; ls /proc | grep -c '^[0-9]'; cut -d: -f1 /proc/net/dev; echo x > /new/place/file"
            spec = order(open_folder / "log", "sh", "-c", script, mounts=[mount], staging=trial)
            line.sendall(json.dumps(spec).encode() + b"\n")
            line.settimeout(20)
            with line.makefile("r") as answers:
                news = [json.loads(answer) for answer in answers]
    assert [item["is"] for item in news] == ["started", "exited"]
    assert news[-1] == {"is": "exited", "code": 0, "signal": 0}
    printed = [entry.split(" ", 3)[3] for entry in (open_folder / "log" / "0.log").read_text().splitlines()]
    assert printed[:2] == [str(user.number), "pod"]
    assert int(printed[2]) <= 5  # init, the shell and what it runs: nobody else is to be seen
    assert {name.strip() for name in printed[5:]} == {"lo", "eth0", "eth1"}
    assert (open_folder / "volume" / "file").read_text() == "x\n"
    assert not Path("/new").exists()


CLUSTER = """
import asyncio, os, pathlib, sys
from evertrain import aio
from tests.embedded.nodes import pod, small_cluster

async def main():
    async with small_cluster(pathlib.Path(sys.argv[1]), isolate=sys.argv[2] == "True") as cluster:
        fork = "if os.fork(): os._exit(0)\\n"
        daemon = f"import os, time\\n{fork}os.setsid()\\n{fork}time.sleep(777.75)"
        script = f"import subprocess, sys, time\\nsubprocess.run([sys.executable, '-c', {daemon!r}])\\n"
        script += "time.sleep(777.75)"
        await cluster.create(pod("a", "python", "-c", script))
        await cluster.phase("a", "Running")
        print("running", flush=True)
        await asyncio.sleep(60)

aio.run(main())
"""


@pytest.mark.parametrize("isolate", [True, False])
def test_nothing_outlives_a_killed_cluster(tmp_path: Path, isolate: bool) -> None:
    path = os.pathsep.join([str(sideprocess.ROOT), str(Path(__file__).parents[3]), *sys.path])
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(tmp_path), str(isolate)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        assert cluster.stdout.readline() == "running\n"
        wait_for(lambda: len([pid for pid in with_word("777.75") if pid != cluster.pid]) >= 2)
        cluster.send_signal(signal.SIGKILL)
        wait_for(lambda: not with_word("777.75"))
        wait_for(lambda: not with_word(str(tmp_path)))
    finally:
        cluster.kill()
        cluster.communicate()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_runtime_is_started_when_it_is_needed_and_again_after_its_death(tmp_path: Path) -> None:
    async def main() -> None:
        runtime = Engine(tmp_path)
        assert not runtime.runs
        link = await runtime.spawn()
        link.send(order(tmp_path, "sleep", "888.5"))
        started = await link.receive()
        assert started is not None and started["is"] == "started"
        (process,) = [p for p in psutil.Process().children() if "runtime.main" in " ".join(p.cmdline())]
        process.kill()
        assert await asyncio.wait_for(link.receive(), 5) is None
        runtime.forget(link)
        with pytest.raises((Lost, OSError)):
            await runtime.spawn()
        link = await runtime.spawn()
        link.send(order(tmp_path, "sh", "-c", "exit 4"))
        news = [await link.receive(), await link.receive()]
        assert news[1] == {"is": "exited", "code": 4, "signal": 0}
        runtime.forget(link)
        runtime.kill()

    aio.run(asyncio.wait_for(main(), 30))


def test_a_container_that_can_not_be_set_up_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def answer(runtime: Engine, **spec: Any) -> dict[str, Any] | None:
        link = await runtime.spawn()
        link.send(order(tmp_path, "true", **spec))
        try:
            return await asyncio.wait_for(link.receive(), 10)
        finally:
            runtime.forget(link)

    async def main() -> None:
        runtime = Engine(tmp_path)
        try:
            for source, target, message in (
                ("/no/such", "/a", "/no/such is not there"),
                (str(tmp_path), "/", "nothing can be mounted on /"),
                (str(tmp_path), "/etc/passwd", "/etc/passwd is no directory"),
                (str(tmp_path / "file"), "/etc", "/etc is a directory"),
                (str(tmp_path), "/etc/passwd/below", "/etc/passwd, on the way to"),
            ):
                mount = {"source": source, "target": target, "read_only": False}
                refused = await answer(runtime, mounts=[mount])
                assert refused is not None
                assert refused["reason"] == "CreateContainerError"
                assert message in refused["message"]
            nowhere = await answer(runtime, workdir="/no/such/place")
            assert nowhere == {
                "is": "refused",
                "reason": "StartError",
                "message": 'the working directory "/no/such/place" does not exist',
            }
        finally:
            runtime.kill()

    aio.run(asyncio.wait_for(main(), 30))


def test_volumes_inside_of_volumes_and_next_to_what_is_there(tmp_path: Path) -> None:
    for name in ("outer", "inner", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    home = tmp_path / "home"
    (home / "there").mkdir(parents=True)
    (home / "link").symlink_to("there")

    async def main() -> None:
        runtime = Engine(tmp_path)
        try:
            wanted = [
                (tmp_path / "inner", "/data/x/inner", True),
                (tmp_path / "outer", "/data", False),
                (tmp_path / "beside", f"{home}/new", False),
            ]
            mounts = [{"source": str(s), "target": str(t), "read_only": r} for s, t, r in wanted]
            script = (
                f"ls /data /data/x/inner {home} {home}/new; readlink {home}/link; echo y > /data/kept; "
                f"echo z > {home}/there/kept; echo w > {home}/lost; touch /data/x/inner/no 2>&1"
            )
            link = await runtime.spawn()
            link.send(order(tmp_path, "sh", "-c", script, mounts=mounts))
            started, ended = await link.receive(), await link.receive()
            assert started is not None and started["is"] == "started", started
            assert ended is not None and ended["is"] == "exited"
            runtime.forget(link)
        finally:
            runtime.kill()

    aio.run(asyncio.wait_for(main(), 30))
    printed = [entry.split(" ", 3)[3] for entry in (tmp_path / "0.log").read_text().splitlines()]
    expected = ["/data:", "outer", "x", "", "/data/x/inner:", "inner", "", f"{home}:", "link", "new", "there"]
    assert printed[: len(expected)] == expected
    assert printed[len(expected) + 1 :][:3] == [f"{home}/new:", "beside", "there"]
    assert "Read-only file system" in printed[-1]
    assert (tmp_path / "outer" / "kept").read_text() == "y\n"
    assert (home / "there" / "kept").read_text() == "z\n"
    assert not (home / "lost").exists()
    assert not (home / "new").exists()
    assert not Path("/data/x").exists()
